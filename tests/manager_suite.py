# SPDX-License-Identifier: Apache-2.0
"""The cache managers alone, inside vLLM's own KVCacheManager; `test_cache_manager.py` runs this per release.

No model and no worker; random schedules are in `manager_schedules.py`.
"""
from __future__ import annotations

import pytest
import torch

from bie_kernels.layout import PAGE_TOKENS, PageLayout
from bie_vllm_plugin import register
from bie_vllm_plugin.cache_manager import WindowManager
from bie_vllm_plugin.cache_spec import body_spec, window_spec
from bie_vllm_plugin.config import Int4AsymConfig

register()

from types import SimpleNamespace

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

MAX_LEN = 4096
# What the platform hook sees of the engine's configuration: enough to know the dtype.
register_all_kvcache_specs(SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="int4_asym")))
init_none_hash(sha256)


def make_manager(blocks: int, *, caching: bool = True, lookahead: int = 0, itemsize: int = 2,
                 retention: int | None = 0, max_len: int = MAX_LEN, batches: int = 1, chunk: int = 0,
                 events: bool = False, ahead: int = 0, dropped: int = 0, stats: bool = True,
                 **options) -> KVCacheManager:  # fmt: skip
    """vLLM's manager over a body and a window group."""
    config = Int4AsymConfig(**options)
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    window = window_spec(config, 2, 64, 64, dtype, lookahead, retention, batches=batches, chunk_tokens=chunk,
                         drafted_ahead=ahead, dropped=dropped)  # fmt: skip
    groups = [KVCacheGroupSpec(["a"], body_spec(PageLayout(64), 2)), KVCacheGroupSpec(["a.window"], window)]
    kv_config = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention
    )
    return KVCacheManager(
        kv_config, max_model_len=max_len, scheduler_block_size=PAGE_TOKENS, hash_block_size=window.block_size,
        max_in_flight_tokens=2048, enable_caching=caching, log_stats=stats, enable_kv_cache_events=events,
        use_eagle=dropped > 0,
    )  # fmt: skip


def make_request(name: str, tokens: list[int], page: int = 16, prompt_logprobs: int | None = None, **keys) -> Request:
    """`keys` go to the request: cache_salt, lora_request, mm_features."""
    return Request(
        request_id=name, prompt_token_ids=tokens, pooling_params=None,
        sampling_params=SamplingParams(max_tokens=10_000, prompt_logprobs=prompt_logprobs),
        block_hasher=get_request_block_hasher(page, sha256), **keys,
    )  # fmt: skip


def parts(manager: KVCacheManager) -> tuple:
    body, window = manager.coordinator.single_type_managers
    assert isinstance(window, WindowManager)
    return body, window


def start(manager: KVCacheManager, request: Request) -> int | None:
    """Look the prefix up and allocate nothing yet; returns the hit."""
    blocks, hit, boundary = manager.get_computed_blocks(request)
    request.shared_prefix_boundary = boundary
    request.hit_blocks = blocks
    return hit


def step(manager: KVCacheManager, request: Request, tokens: int, lookahead: int = 0, first_hit: int | None = None):
    """One scheduled step; returns the new blocks or None when the pool is short."""
    if first_hit is None:
        return manager.allocate_slots(request, tokens, num_lookahead_tokens=lookahead)
    return manager.allocate_slots(request, tokens, first_hit, request.hit_blocks, num_lookahead_tokens=lookahead)


def held(rows: list) -> list[int]:
    return [i for i, block in enumerate(rows) if not block.is_null]


# -- what is held -----------------------------------------------------------------
@pytest.mark.parametrize("chunk", [64, 100, 512, 2048])
def test_middles_are_never_held(chunk):
    """A long prompt costs its body pages, the sinks and one window; one more window while a chunk runs."""
    manager = make_manager(200, caching=False)
    body, window = parts(manager)
    request = make_request("r", list(range(2048)))
    for computed in range(0, 2048, chunk):
        n = min(chunk, 2048 - computed)
        assert step(manager, request, n) is not None
        request.num_computed_tokens = computed + n
        end = computed + n
        now = held(window.req_to_blocks["r"])
        wanted = {0} | set(range(max(0, end - 191) // 16, -(-end // 16)))
        before = set(range(max(0, computed - 191) // 16, -(-computed // 16)))
        assert wanted <= set(now) <= wanted | before
        assert len(now) <= window.kv_cache_spec.peak_pages
        assert len(body.req_to_blocks["r"]) == -(-end // 64)
    step(manager, request, 1)
    assert len(held(window.req_to_blocks["r"])) <= window.kv_cache_spec.pages_held(2049)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 199


def test_the_admission_cap_is_what_is_held():
    manager = make_manager(300, caching=False)
    _, window = parts(manager)
    for length in (1, 64, 130, 192, 200, 1000, 4000):
        request = make_request(f"r{length}", list(range(length)))
        count = window.get_num_blocks_to_allocate(
            request.request_id, length, [], 0, 0, length, apply_admission_cap=True
        )
        assert step(manager, request, length) is not None
        assert len(held(window.req_to_blocks[request.request_id])) == count
        assert count <= window.kv_cache_spec.max_admission_blocks_per_request(2048, MAX_LEN)
        manager.free(request)


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("chunk", [64, 300, 512])
@pytest.mark.parametrize("ahead", [0, 8])
def test_the_smallest_accepted_pool_serves_the_longest_prompt(batches, chunk, ahead):
    """Steps in flight free nothing until they are processed: the pool that `check_pool` accepts must still do.

    With `ahead` a drafter with a cache has the scheduler take pages behind each step.
    """
    length = 2048
    options = {"batches": batches, "max_len": length, "caching": False, "lookahead": ahead, "ahead": ahead}
    probe = parts(make_manager(500, **options))[1].kv_cache_spec
    blocks = 1 + length // 64 + probe.peak_pages
    with pytest.raises(ValueError, match="KV-cache pages"):
        make_manager(blocks - 1, **options)
    manager = make_manager(blocks, **options)
    request = make_request("r", list(range(length)))
    flight: list[int] = []
    computed = 0
    while computed < length:
        n = min(chunk, length - computed)
        request.num_computed_tokens = computed
        request.num_in_flight_tokens = sum(flight)
        assert step(manager, request, n, ahead) is not None, (computed, flight)
        computed += n
        flight.append(n)
        if len(flight) == batches:  # the oldest step is processed before another one is scheduled
            flight.pop(0)


@pytest.mark.parametrize("drafts", [0, 1, 8, 16])
@pytest.mark.parametrize("cached_drafter", [False, True])
def test_the_cap_holds_while_decoding_with_drafts(drafts, cached_drafter):
    ahead = drafts if cached_drafter else 0
    manager = make_manager(300, caching=False, lookahead=drafts, ahead=ahead)
    _, window = parts(manager)
    request = make_request("r", list(range(300)))
    step(manager, request, 300)
    for computed in range(300, 700):
        request.num_computed_tokens = computed
        request.append_output_token_ids(7)
        assert step(manager, request, 1 + drafts, ahead) is not None
        assert len(held(window.req_to_blocks["r"])) <= window.kv_cache_spec.pages_held(computed + 1 + drafts + ahead)


@pytest.mark.parametrize("interval", [64, 128, 256, None])
@pytest.mark.parametrize("chunk", [128, 512])
def test_strict_with_a_retention_interval_is_admitted_and_served(interval, chunk):
    """Windows in front of boundaries are taken by chunks and freed: they must not count against admission."""
    options = {"prefix_hits": "strict", "retention": interval, "max_len": 2048, "chunk": chunk}
    probe = parts(make_manager(900, **options))[1].kv_cache_spec
    manager = make_manager(1 + 32 + probe.peak_pages, **options)
    request = make_request("r", list(range(2000)))
    hit = start(manager, request)
    assert manager.allocate_slots(request, chunk, hit, request.hit_blocks, full_sequence_must_fit=True) is not None
    for computed in range(chunk, 2000, chunk):
        request.num_computed_tokens = computed
        assert step(manager, request, min(chunk, 2000 - computed)) is not None


def test_kv_events_name_whole_pages_of_both_groups():
    """Body pages of 64 tokens as full attention; sinks and the prompt's tail as a sliding window of R."""
    manager = make_manager(200, events=True)
    run_prompt(manager, "a", list(range(500)))
    stored = [event for event in manager.take_events() if type(event).__name__ == "BlockStored"]
    body = [event for event in stored if event.group_idx == 0]
    window = [event for event in stored if event.group_idx == 1]
    assert sum(len(event.block_hashes) for event in body) == 7
    assert {event.block_size for event in body} == {64} and {event.block_size for event in window} == {16}
    assert {event.kv_cache_spec_kind for event in body} == {"full_attention"}
    assert {(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in window} == {
        ("sliding_window", 191)
    }
    # The sink page, and 8 pages that hold the 127 positions in front of 448.
    assert sum(len(event.block_hashes) for event in window) == 1 + 8


def test_usage_and_hit_rate_are_what_metrics_read():
    manager = make_manager(101)
    assert manager.usage == 0
    request = make_request("a", list(range(640)))
    start(manager, request)
    step(manager, request, 640)
    _, window = parts(manager)
    assert manager.usage == pytest.approx((10 + len(held(window.req_to_blocks["a"]))) / 100)
    manager.record_prefix_cache_stats(request, 0)
    manager.free(request)
    assert manager.usage == 0
    again = make_request("b", list(range(640)))
    hit = start(manager, again)
    manager.record_prefix_cache_stats(again, hit)
    stats = manager.make_prefix_cache_stats()
    assert (stats.queries, stats.hits) == (1280, 576)


def test_waiting_requests_do_not_pile_up_tails():
    manager = make_manager(300, prefix_hits="strict")
    _, window = parts(manager)
    run_prompt(manager, "a", list(range(700)))
    request = make_request("b", [*range(400), *[9999] * 100])
    for _ in range(50):
        start(manager, request)
    assert list(window._wanted_tail) == ["b"]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sink", [0, 8, 17, 64])
def test_every_position_that_a_query_reads_is_resident(itemsize, sink):
    """Decode over many pages: sinks and the last `recent` positions have blocks at every step."""
    manager = make_manager(300, caching=False, itemsize=itemsize, sink_tokens=sink)
    _, window = parts(manager)
    page = window.block_size
    request = make_request("r", list(range(300)), page)
    step(manager, request, 300)
    for computed in range(300, 700):
        request.num_computed_tokens = computed
        request.append_output_token_ids(7)
        assert step(manager, request, 1) is not None
        rows = window.req_to_blocks["r"]
        for position in [*range(sink), *range(computed + 1 - 128, computed + 1)]:
            assert not rows[position // page].is_null


def test_freed_pages_are_reused_and_counted():
    manager = make_manager(120, caching=False, max_len=2048)
    _, window = parts(manager)
    request = make_request("r", list(range(1500)))
    step(manager, request, 1500)
    for computed in range(1500, 2000):
        request.num_computed_tokens = computed
        request.append_output_token_ids(7)
        assert step(manager, request, 1) is not None, "decode must not run out of pages"
    used = 119 - manager.block_pool.get_num_free_blocks()
    assert used == len(held(window.req_to_blocks["r"])) + 32


def test_too_small_a_pool_is_named():
    with pytest.raises(ValueError, match=r"max_model_len 4096 needs 91 KV-cache pages .* pool has 79.* at most 3328"):
        make_manager(80)
    with pytest.raises(ValueError, match="pool has 19: give the cache more memory"):  # no length would fit
        make_manager(20)
    make_manager(92)


# -- prefix hits ---------------------------------------------------------------------
def run_prompt(manager: KVCacheManager, name: str, tokens: list[int], chunk: int = 4096) -> int:
    request = make_request(name, tokens)
    hit = start(manager, request)
    first, computed = hit, hit
    while computed < len(tokens):
        n = min(chunk, len(tokens) - computed)
        assert step(manager, request, n, first_hit=first) is not None
        first, computed = None, computed + n
        request.num_computed_tokens = computed
    manager.free(request)
    return hit


@pytest.mark.parametrize("hits", ["relaxed", "strict"])
@pytest.mark.parametrize("length", [63, 64, 65, 128, 129, 500, 640])
def test_an_exact_repeat_hits_its_last_whole_page(hits, length):
    manager = make_manager(200, prefix_hits=hits)
    tokens = list(range(length))
    assert run_prompt(manager, "a", tokens) == 0
    assert run_prompt(manager, "b", tokens) == 64 * ((length - 1) // 64)


@pytest.mark.parametrize("chunk", [128, 4096])
@pytest.mark.parametrize("length", [100, 128, 129, 500, 640])
def test_an_exact_repeat_with_eagle_finds_its_window_one_page_earlier(length, chunk):
    """vLLM drops the last page of a hit for EAGLE heads; the window in front of what is left must still be there."""
    manager = make_manager(200, prefix_hits="strict", lookahead=3, ahead=3, dropped=64)
    tokens = list(range(length))
    assert run_prompt(manager, "a", tokens, chunk) == 0
    assert run_prompt(manager, "b", tokens, chunk) == max(0, 64 * (length // 64) - 64)


def test_strict_needs_the_window_and_relaxed_does_not():
    tokens = list(range(700))
    sharer = tokens[:400] + [9999] * 100
    for hits, expected in (("relaxed", 384), ("strict", 0)):
        manager = make_manager(200, prefix_hits=hits)
        run_prompt(manager, "a", tokens)
        assert run_prompt(manager, "b", sharer) == expected
        # The junction was noted: the next sharer hits in strict mode too.
        assert run_prompt(manager, "c", tokens[:400] + [8888] * 100) == 384


def test_hits_need_the_sink_page():
    manager = make_manager(200)
    body, window = parts(manager)
    tokens = list(range(500))
    run_prompt(manager, "a", tokens)
    request = make_request("b", tokens)
    start(manager, request)
    sink = request.hit_blocks.blocks[1][0]
    assert not sink.is_null
    manager.evict_blocks({sink.block_id})
    assert run_prompt(manager, "c", tokens) == 0


def test_partly_filled_pages_are_never_published():
    """vLLM's own full-attention manager would share a tail at 16-token granularity: its keys are not sealed."""
    manager = make_manager(200)
    tokens = list(range(500))
    run_prompt(manager, "a", tokens)
    body, _ = parts(manager)
    published = [b for b in manager.block_pool.blocks if b.block_hash is not None]
    for block in published:
        assert block.block_hash_num_tokens % 16 == 0
    # 7 whole body pages of 500 tokens; window pages: the sink and the prompt's tail.
    assert run_prompt(manager, "b", tokens[:449] + [1]) == 448
