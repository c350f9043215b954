# SPDX-License-Identifier: Apache-2.0
"""Which pages a request holds: vLLM's managers for the two caches, run by the scheduler.

`BodyManager` is vLLM's full-attention manager without its partly filled tails,
which could not be shared: a body page is quantised as a whole.

`WindowManager` keeps, per request, the sink pages and the pages of the last R
tokens of the *end* of each step, and null pages for everything between: keys of
the running chunk are read from the step's own tensors, never from pages. So a
prefill chunk of any length costs the same pages as a short one.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec

from bie_kernels.layout import PAGE_TOKENS
from bie_vllm_plugin.cache_spec import WindowSpec


class BodyManager(FullAttentionManager):
    """Pages of 64 tokens, shared only when full."""

    supports_fine_grained_hash_lookup = False

    def _cache_partial_tail_block(self, request: Any, num_tokens: int) -> None:
        """A partly filled page is not published: its keys are not quantised yet."""


class WindowManager(SingleTypeKVCacheManager):
    """Sink pages and the last R tokens of a request; see the module's docstring."""

    kv_cache_spec: WindowSpec

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.retained = kv_cache_spec.sliding_window
        self.sink_pages = kv_cache_spec.sink_pages
        # Pages below this index (sinks aside) are freed already, per request.
        self._first_held: dict[str, int] = {}
        # strict: pages whose window a later request will want (the shared-prefix junction).
        self._wanted_tail: dict[str, range] = {}

    # -- what is held ------------------------------------------------------------
    def tail_pages(self, boundary: int) -> range:
        """Pages a query at `boundary` (rounded down to 64) reads in 16 bits besides the sinks."""
        return _tail(boundary, self.kv_cache_spec)

    def note_boundary(self, request_id: str, boundary: int) -> None:
        """A shared prefix ends at `boundary`: with strict hits, keep the window in front of it.

        Called by the scheduler's look-up before the request's first allocation.
        """
        if self.kv_cache_spec.strict and boundary > 0:
            self._wanted_tail[request_id] = self.tail_pages(boundary)  # a waiting request looks up every step

    def _new_pages(
        self, request_id: str, have: int, num_tokens: int, num_tokens_main_model: int, at_the_end: bool = False
    ) -> list[bool]:
        """For pages from `have` up to `num_tokens`: whether each gets a block (True) or stays null.

        Args:
            at_the_end: count what is held when the request is done; windows in front
                of boundaries are taken by the chunks that pass them and freed again.
        """
        keep_from = max(0, num_tokens_main_model - self.retained) // self.block_size
        tails = [self._wanted_tail[request_id]] if request_id in self._wanted_tail and not at_the_end else []
        interval = 0 if at_the_end else self.kv_cache_spec.retention_interval
        pages = range(have, cdiv(num_tokens, self.block_size))
        if self.kv_cache_spec.strict and interval is None:
            return [True] * len(pages)
        if self.kv_cache_spec.strict and interval:
            start = have * self.block_size // interval * interval
            tails = [*tails, *(self.tail_pages(b) for b in range(start, num_tokens + 1, interval) if b)]
        return [i < self.sink_pages or i >= keep_from or any(i in tail for tail in tails) for i in pages]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that `allocate_new_blocks` will take, plus hits that leave the free queue.

        With `apply_admission_cap` (the whole prompt must fit) the count is what the
        request holds at its end, within the spec's cap: middles are never held.
        """
        del total_computed_tokens, num_local_computed_tokens, prefill_end
        have = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        new = sum(self._new_pages(request_id, have, num_tokens, num_tokens_main_model, apply_admission_cap))
        return new + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the request's row to `num_tokens`; the result holds nulls, in position order."""
        row = self.req_to_blocks[request_id]
        wanted = self._new_pages(request_id, len(row), num_tokens, num_tokens_main_model)
        fresh = iter(self.block_pool.get_new_blocks(sum(wanted)))
        new_row = [next(fresh) if want else self._null_block for want in wanted]
        row.extend(new_row)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_row if not block.is_null)
        return new_row

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt a prefix hit: sinks, nulls, and what was found of the window."""
        if num_external_computed_tokens:
            raise NotImplementedError("int4_asym does not take tokens from a KV connector; run without one.")
        row = self.req_to_blocks[request_id]
        assert not row, "prefix hits are adopted once, before the first allocation"
        self.block_pool.touch([block for block in new_computed_blocks if not block.is_null])
        row.extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(row)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the pages wholly below the last R processed tokens, sinks excepted."""
        del num_prompt_tokens
        row = self.req_to_blocks.get(request_id)
        if not row:
            return
        start = max(self.sink_pages, self._first_held.get(request_id, 0))
        end = min(len(row), max(0, processed_computed_tokens - self.retained) // self.block_size)
        freed = [row[i] for i in range(start, end) if not row[i].is_null]
        if end > start:
            row[start:end] = [self._null_block] * (end - start)
            self._first_held[request_id] = end
        if freed:
            self.block_pool.free_blocks(reversed(freed))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request; its blocks go back to the pool."""
        self._first_held.pop(request_id, None)
        self._wanted_tail.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the last R; the sinks among them are held all the same."""
        return max(0, num_computed_tokens - self.retained)

    # -- prefix cache ---------------------------------------------------------------
    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix, aligned to 64, whose 16-bit pages suffice.

        Sink pages are needed always. `relaxed` takes what it finds of the window;
        `strict` shortens the hit until the whole window in front of it is there.
        """
        assert isinstance(kv_cache_spec, WindowSpec)
        assert dcp_world_size == 1 and pcp_world_size == 1, "context parallelism is refused at configuration"
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, size)
        align = max(alignment_tokens, PAGE_TOKENS)
        length = max_length // align * align
        if drop_eagle_block and length:
            length = max(0, (max_length - size) // align * align)

        def cached(page: int) -> list[KVCacheBlock] | None:
            return block_pool.get_cached_block(hashes[page], kv_cache_group_ids)

        nothing: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        sinks = [cached(page) for page in range(min(kv_cache_spec.sink_pages, length // size))]
        if any(blocks is None for blocks in sinks):
            return nothing, 0
        while length > 0:
            tail = {page: cached(page) for page in _tail(length, kv_cache_spec)}
            if not kv_cache_spec.strict or all(blocks is not None for blocks in tail.values()):
                break
            length -= align
        if length <= 0:
            return nothing, 0
        found = {**tail, **dict(enumerate(sinks))}
        rows: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for page in range(length // size):
            blocks = found.get(page)
            for i, row in enumerate(rows):
                row.append(blocks[i] if blocks is not None else block_pool.null_block)
        return rows, length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """Pages worth publishing: sinks, windows in front of boundaries, and all generated tokens.

        Generated pages are published because the next turn of a chat resumes at
        the end of the answer, which nobody knows while it is generated.
        """
        del alignment_tokens, use_eagle, dcp_world_size, final_segment_end_block
        assert isinstance(kv_cache_spec, WindowSpec)
        if retention_interval is None:
            return None
        boundaries = list(reachable_boundaries)
        if retention_interval:
            last = end_block * kv_cache_spec.block_size
            boundaries += range(retention_interval, last + 1, retention_interval)
        tails = [_tail(boundary, kv_cache_spec) for boundary in boundaries]
        # Boundaries are prompt ends and junctions; what lies behind the last one was generated.
        prompt_end = max((tail.stop for tail in tails), default=0)
        sinks = kv_cache_spec.sink_pages
        return [
            page < sinks or page >= prompt_end or any(page in tail for tail in tails)
            for page in range(start_block, end_block)
        ]


def _tail(boundary: int, spec: WindowSpec) -> range:
    """Pages with positions in [end - recent + 1, end), where end is `boundary` rounded down to 64."""
    end = boundary // PAGE_TOKENS * PAGE_TOKENS
    return range(max(0, end - spec.recent_tokens + 1) // spec.block_size, end // spec.block_size)
