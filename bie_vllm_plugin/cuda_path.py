# SPDX-License-Identifier: Apache-2.0
"""One layer's step on an NVIDIA GPU: which kernel gets which rows, and the memory they share.

Nothing here waits for the device: the split into decode rows (uniform length, first
in the batch) and prefill rows is made from host lengths when the metadata is built,
everything else from device tensors, so that FULL CUDA graphs hold.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bie_kernels import decode, flash_plan, prefill, prefill_flash, store
from bie_kernels.flash_plan import FlashPlan
from bie_kernels.layout import PAGE_TOKENS, SLICE_BYTES, SLICE_ROWS, PageLayout
from bie_kernels.torch_path import Rule
from bie_kernels.tuning import multiprocessors

if TYPE_CHECKING:
    from bie_vllm_plugin.metadata import Int4AsymMetadata

MAX_VERIFY_TOKENS = 16
"""Query tokens per request that the decode kernel takes; longer drafts are prefilled."""


LAUNCH_WORK = 6e7
"""Floating-point operations, per multiprocessor, that the fused kernel does while the host launches one kernel.

On an H200 186 TFLOP/s and about 40 us. Slices do a layer's attention in a third of the fused kernel's time, but
in 4 launches and more instead of one: with less work than that a step waits for its launches.
"""

LEAST_LAUNCHES = 4
"""Of one short prompt: the band, a slice's gather, its attention, the merge."""

FLASH_TOKENS = 4096
"""From so many tokens on the rest of the model keeps the device busy while the host launches."""


@dataclass(frozen=True)
class FlashLimits:
    """How flash attention's calls are cut (see `flash_plan`), and when it is used.

    Attributes:
        pair_work: operations of one query token and one key, all heads; launch_work: see LAUNCH_WORK, whole device.
        drafts: tokens that a step may have to take back.
    """

    flash: prefill_flash.Flash
    slice_tokens: int
    rows: int
    recent_tokens: int
    drafts: int
    pair_work: int
    launch_work: float


@dataclass(frozen=True)
class Split:
    """Decode rows first, then rows of the fused prefill kernel, then those of flash attention.

    Attributes:
        decodes: requests of the decode part, `q_len` rows each.
        starts: int32 [requests + 1], row offsets of the fused part from its first row.
        flash_first: first request of the flash part; flash_row: its first row.
        flash_starts: int32 [requests + 1], row offsets of the flash part from its first row.
        plan: what flash attention does, on the device.
    """

    decodes: int
    q_len: int
    starts: torch.Tensor | None
    flash_first: int = 0
    flash_row: int = 0
    flash_starts: torch.Tensor | None = None
    plan: FlashPlan | None = None

    @property
    def decode_rows(self) -> int:
        return self.decodes * self.q_len


@dataclass(frozen=True)
class Part:
    """One kernel's requests: their rows and what it reads of them."""

    rows: slice | None  # None: all of the step's
    body_table: torch.Tensor
    window_table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The part's rows of a step's tensor."""
        return x if self.rows is None else x[self.rows]


@dataclass(frozen=True)
class Step:
    """A step cut into parts, once for all layers: the host has little time between two of them."""

    slots: torch.Tensor
    window_slots: torch.Tensor
    q_len: int
    decode: Part | None
    fused: Part | None
    flash: Part | None
    plan: FlashPlan | None


def cut_step(meta: Int4AsymMetadata, window_meta: Int4AsymMetadata) -> Step:
    """The parts of a step, from its split and both groups' tables."""
    split, n = meta.split, meta.num_tokens
    assert split is not None, "metadata was built for another device"

    def part(requests: slice, rows: slice, starts: torch.Tensor | None) -> Part | None:
        if starts is None:
            return None
        return Part(
            None if rows == slice(0, n) else rows, meta.block_table[requests], window_meta.block_table[requests],
            meta.seq_lens[requests], starts,
        )  # fmt: skip

    decodes, first = split.decodes, split.decode_rows
    fused_end = split.flash_row if split.plan is not None else n
    last = decodes if split.starts is None else decodes + split.starts.shape[0] - 1
    flash = split.flash_first, 0 if split.flash_starts is None else split.flash_starts.shape[0] - 1
    return Step(
        meta.slot_mapping[:n], window_meta.slot_mapping[:n], split.q_len,
        part(slice(0, decodes), slice(0, first), meta.query_start_loc if decodes else None),
        part(slice(decodes, last), slice(first, fused_end), split.starts),
        part(slice(flash[0], sum(flash)), slice(split.flash_row, n), split.flash_starts), split.plan,
    )  # fmt: skip


def _flash_part(common: Any, decodes: int, limits: FlashLimits) -> tuple[int, FlashPlan] | None:
    """The first of the trailing requests that flash attention takes, and its plan; None where it does not pay.

    Their lengths on the host must be exact. They are for prefill rows; rows with drafts of a
    step still in flight are upper bounds, and those have at most 1 + drafts tokens.
    """
    lens = getattr(common, "seq_lens_cpu_upper_bound", None)
    if lens is None:
        return None
    starts, seq_lens = common.query_start_loc_cpu.tolist(), lens.tolist()
    prefilling = getattr(common, "is_prefilling", None)
    prefilling = [] if prefilling is None else prefilling.tolist()
    requests = common.num_reqs
    while requests > decodes and starts[requests] == starts[requests - 1]:  # padding of a captured batch
        requests -= 1
    first = requests
    while first > decodes:
        rows = starts[first] - starts[first - 1]
        # The flags cover the batch without its padding.
        if rows <= 1 + limits.drafts and not (first <= len(prefilling) and prefilling[first - 1]):
            break
        first -= 1
    if first == requests:  # a captured batch of verify rows must keep vLLM's own offsets
        return None
    pairs = 0.0
    for i in range(first, requests):
        rows = starts[i + 1] - starts[i]
        pairs += rows * (seq_lens[i] - rows / 2)
    offsets, lengths = [s - starts[first] for s in starts[first : requests + 1]], seq_lens[first:requests]
    work = math.inf if offsets[-1] >= FLASH_TOKENS else pairs * limits.pair_work
    if work < LEAST_LAUNCHES * limits.launch_work:
        return None
    plan = flash_plan.plan_flash(
        offsets, lengths, recent_tokens=limits.recent_tokens, slice_tokens=limits.slice_tokens, max_rows=limits.rows
    )
    return (first, plan) if plan.launches * limits.launch_work <= work else None


def split_batch(common: Any, threshold: int, limits: FlashLimits | None) -> Split:
    """Split a batch by host lengths.

    Args:
        common: vLLM's CommonAttentionMetadata, decode requests first.
        threshold: longest query that counts as decode.
        limits: None where there is no flash attention to use.
    """
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    threshold = min(threshold, MAX_VERIFY_TOKENS)
    decodes, prefills, _, _ = split_decodes_and_prefills(common, threshold, require_uniform=True)
    starts_cpu = common.query_start_loc_cpu
    q_len = int(starts_cpu[1] - starts_cpu[0]) if decodes else 0
    if decodes and q_len not in (1, threshold):  # another length is another kernel, which nobody has warmed up
        decodes, prefills, q_len = 0, common.num_reqs, 0
    if prefills and limits is not None and (part := _flash_part(common, decodes, limits)) is not None:
        first, plan = part
        row, loc = int(starts_cpu[first]), common.query_start_loc
        end = first + plan.requests
        starts = loc[decodes : first + 1] - decodes * q_len if first > decodes else None
        return Split(decodes, q_len, starts, first, row, loc[first : end + 1] - row, plan.to(common.seq_lens.device))
    starts = None
    if prefills:
        # Without decode rows the offsets are vLLM's own persistent buffer: a graph captured for
        # a uniform batch of more than 16 rows a request reads them at replay.
        starts = common.query_start_loc if not decodes else common.query_start_loc[decodes:] - decodes * q_len
    return Split(decodes, q_len, starts)


def flash_limits(
    vllm_config: Any, layers: list[Any], rule: Rule, itemsize: int, drafts: int, flash: prefill_flash.Flash | None
) -> FlashLimits | None:
    """How prefill is cut for flash attention; None where it cannot serve these layers."""
    if flash is None or any(layer.head_size != layer.head_size_v for layer in layers):
        return None
    if rule.recent_tokens == 0:  # no band, which every row's result starts from
        return None
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    limit = max(vllm_config.model_config.max_model_len, tokens + rule.recent_tokens) + PAGE_TOKENS
    row_bytes = max(layer.num_kv_heads * 2 * layer.head_size * itemsize for layer in layers)
    if row_bytes * flash_plan.least_slice_tokens(rule.recent_tokens) > SLICE_BYTES:
        return None  # a window this long does not fit into the workspace
    return FlashLimits(
        flash, flash_plan.slice_tokens_of(row_bytes, limit, rule.recent_tokens), min(SLICE_ROWS, tokens),
        rule.recent_tokens, drafts, 4 * max(layer.num_heads * layer.head_size for layer in layers),
        LAUNCH_WORK * multiprocessors(torch.device("cuda", torch.cuda.current_device())),
    )  # fmt: skip


def workspace_bytes(
    vllm_config: Any, layers: list[Any], q_tokens: int, limits: FlashLimits | None, itemsize: int
) -> int:  # fmt: skip
    """Bytes of the one workspace that all layers and kernels of a worker share, one after the other.

    Args:
        layers: vLLM's attention layers of this worker.
        q_tokens: longest decode query (1 plus drafts).
    """
    requests = vllm_config.scheduler_config.max_num_seqs
    size = max(
        decode.workspace_bytes(
            requests, layer.num_heads, layer.head_size_v, min(q_tokens, MAX_VERIFY_TOKENS),
            kv_heads=layer.num_kv_heads,
        )
        for layer in layers
    )  # fmt: skip
    size = max(size, prefill.workspace_bytes(max(layer.head_size_v for layer in layers)))
    if limits is None:
        return size
    return max(size, *(
        flash_plan.workspace_bytes(
            limits.slice_tokens, limits.rows, layer.num_heads, layer.num_kv_heads,
            PageLayout(layer.head_size, layer.head_size_v), itemsize,
        )
        for layer in layers
    ))  # fmt: skip


def plan_decode(
    split: Split, seq_lens: torch.Tensor, buffer: torch.Tensor, heads: tuple[int, int, int], rule: Rule
) -> torch.Tensor | None:
    """The decode plan of a step, shared by all layers of a group; None without decode rows.

    Args:
        buffer: persistent int32 tensor that graphs read the plan from.
        heads: (query heads, KV heads, channels of a value) of the group's layers.
    """
    if not split.decodes:
        return None
    return decode.plan_for(
        seq_lens[: split.decodes], buffer, q_heads=heads[0], kv_heads=heads[1], head_size_v=heads[2], q_len=split.q_len,
        sink_tokens=rule.sink_tokens, recent_tokens=rule.recent_tokens,
    )  # fmt: skip


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    body: torch.Tensor,
    window: torch.Tensor,
    meta: Int4AsymMetadata,
    window_meta: Int4AsymMetadata,
    layout: PageLayout,
    rule: Rule,
    workspace: torch.Tensor,
    output: torch.Tensor,
    limits: FlashLimits | None,
    *,
    scale: float,
    soft_cap: float,
) -> None:
    """Store and seal the step's rows, then attend; shapes as in `backend.Int4AsymImpl.forward`."""
    step = meta.gpu_step(window_meta)
    if query.shape[0] != meta.num_tokens:  # padding of a captured batch
        n = meta.num_tokens
        query, key, value, output = query[:n], key[:n], value[:n], output[:n]
    store.store_and_seal(
        key, value, body, window, step.slots, step.window_slots, meta.block_table, window_meta.block_table,
        meta.query_start_loc, meta.seq_lens, layout, sink_tokens=rule.sink_tokens, retained=rule.retained_tokens,
        max_query_len=meta.max_query_len,
    )  # fmt: skip
    numbers: dict[str, Any] = {
        "scale": scale, "sink_tokens": rule.sink_tokens, "recent_tokens": rule.recent_tokens,
        "retained": rule.retained_tokens, "soft_cap": soft_cap,
    }  # fmt: skip
    if (part := step.decode) is not None:
        decode.decode(
            part.of(query), body, window, part.body_table, part.window_table, part.seq_lens, part.of(output), workspace,
            layout, q_len=step.q_len, plan=meta.plan, **numbers,
        )  # fmt: skip
    if (part := step.fused) is not None:
        prefill.prefill(
            part.of(query), part.of(key), part.of(value), body, window, part.body_table, part.window_table,
            part.starts, part.seq_lens, part.of(output), workspace, layout, **numbers,
        )  # fmt: skip
    if (part := step.flash) is not None:
        assert limits is not None and step.plan is not None
        prefill_flash.prefill(
            part.of(query), part.of(key), part.of(value), body, window, part.body_table, part.window_table,
            part.starts, part.seq_lens, part.of(output), workspace, layout, step.plan, limits.flash, **numbers,
        )  # fmt: skip
