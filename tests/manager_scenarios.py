# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefix-caching scenarios on our two groups; `test_cache_manager.py` runs this per release.

Each test has the name of the scenario in vLLM's tests/v1/core/test_prefix_caching.py that it plays with
our managers; vLLM's expectations are about one group of 16-token blocks, ours about INT4 pages of
64 tokens and 16-bit pages of 16. Not here: Mamba, other groups than ours, connectors (all refused),
and block look-up tables, which are vLLM's own. Hybrid models with a window group are what all of these are.
"""
from __future__ import annotations

import itertools

import pytest
from manager_suite import held, make_manager, make_request, parts, start, step
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

NAMES = itertools.count()
SHARED = list(range(1000, 1320))  # five pages
BOTH = pytest.mark.parametrize("hits", ["relaxed", "strict"])


def look_up(manager: KVCacheManager, tokens: list[int], **keys) -> int:
    """The hit of a request that asks and leaves."""
    request = make_request(f"r{next(NAMES)}", tokens, **keys)
    hit = start(manager, request)
    manager.free(request)
    return hit


def serve(manager: KVCacheManager, tokens: list[int], **keys) -> Request:
    """A request whose prompt is computed in one step, still running; `.hit` is what it adopted."""
    request = make_request(f"r{next(NAMES)}", tokens, **keys)
    request.hit = start(manager, request)
    assert step(manager, request, len(tokens) - request.hit, first_hit=request.hit) is not None
    request.num_computed_tokens = len(tokens)
    return request


def decode(manager: KVCacheManager, request: Request, tokens: list[int]) -> None:
    for token in tokens:
        request.append_output_token_ids(token)
        assert step(manager, request, 1) is not None
        request.num_computed_tokens += 1


def free_pages(manager: KVCacheManager) -> int:
    return manager.block_pool.get_num_free_blocks()


@BOTH
def test_prefill(hits):
    """A common prefix is shared while its owner runs and after; pages without a text go first, prefixes last."""
    manager = make_manager(200, prefix_hits=hits)
    body, window = parts(manager)
    owner = serve(manager, SHARED + [1] * 7)
    sharer = serve(manager, SHARED + [2] * 5)
    assert (owner.hit, sharer.hit) == (0, 320)
    rows = [body.req_to_blocks[request.request_id] for request in (owner, sharer)]
    assert rows[0][:5] == rows[1][:5] and rows[0][5] is not rows[1][5]
    assert [block.ref_cnt for block in rows[0]] == [2] * 5 + [1]
    assert [block.block_hash is None for block in rows[0]] == [False] * 5 + [True]  # the partly filled page
    unhashed = {row[5].block_id for row in rows}
    for request in (owner, sharer):
        manager.free(request)
    assert free_pages(manager) == 199
    queue = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
    cached = [block.block_id for block in manager.block_pool.blocks if block.block_hash is not None]
    assert unhashed & set(queue[: len(queue) - len(cached)]) == unhashed and set(queue[-len(cached) :]) == set(cached)
    assert serve(manager, SHARED + [3] * 6).hit == 320


@BOTH
def test_prefill_hybrid_model(hits):
    """One group's page is missing: between sinks and window none was needed, in INT4 a hit ends before it."""
    manager = make_manager(200, prefix_hits=hits)
    body, window = parts(manager)
    owner = serve(manager, SHARED + [1] * 7)
    pages = [block.block_id for block in body.req_to_blocks[owner.request_id]]
    sixteen = window.req_to_blocks[owner.request_id]
    assert held(sixteen) == [0, *range(8, 21)]  # R = 191 tokens before 327, and the sinks
    near, sink = sixteen[15].block_id, sixteen[0].block_id
    manager.free(owner)
    assert look_up(manager, SHARED + [2]) == 320
    manager.evict_blocks({near})  # of the last 128 tokens
    assert look_up(manager, SHARED + [2]) == (320 if hits == "relaxed" else 0)
    for page, hit in ((4, 256), (2, 128)):
        manager.evict_blocks({pages[page]})
        assert look_up(manager, SHARED + [2]) == (hit if hits == "relaxed" else 0)
    manager.evict_blocks({sink})
    assert look_up(manager, SHARED + [2]) == 0


def test_prefill_plp():
    """Prompt log-probabilities: the prompt is computed in full, whatever is cached, and serves others."""
    manager = make_manager(200)
    assert serve(manager, SHARED + [1] * 7, prompt_logprobs=5).hit == 0
    assert serve(manager, SHARED + [2] * 5).hit == 320
    assert serve(manager, SHARED + [3] * 6, prompt_logprobs=5).hit == 0


@BOTH
def test_decode(hits):
    """Pages that decoding fills are found by the next turn; the one that it has not filled is not."""
    manager = make_manager(200, prefix_hits=hits)
    request = serve(manager, SHARED + [1] * 7)
    answer = list(range(5000, 5130))
    decode(manager, request, answer)
    text = SHARED + [1] * 7 + answer
    assert len(text) == 457
    for length, hit in ((384, 320), (385, 384), (448, 384), (457, 448)):
        assert look_up(manager, text[:length]) == hit
    assert look_up(manager, text + [9] * 100) == 448


def test_evict():
    """The least recently used prefix goes first, from its end; the other one is untouched until then."""
    manager = make_manager(60, max_len=1024)
    first, second = [n + 10_000 for n in SHARED], [n + 20_000 for n in SHARED]
    for tokens in (first, second):
        manager.free(serve(manager, tokens + [1] * 7))
    lengths = []
    pool = manager.block_pool
    while look_up(manager, second + [2]) == 320:
        pool.free_blocks(taken := pool.get_new_blocks(1))
        assert taken[0].block_hash is None
        lengths.append(look_up(manager, first + [2]))
        pool.free_block_queue.append_n([pool.free_block_queue.popleft()])  # a page without a text is first otherwise
    assert lengths[0] == 320 and lengths[-1] == 0 and lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2


def test_hash_block_correct_reuse():
    """A page that is taken again has lost its text, and gets the new one when it is full."""
    manager = make_manager(60, max_len=1024)
    pool = manager.block_pool
    manager.free(serve(manager, SHARED))
    before = {block.block_id for block in pool.blocks if block.block_hash is not None}
    hog = pool.get_new_blocks(free_pages(manager) - len(before))
    other = serve(manager, list(range(3000, 3064)))
    reused = parts(manager)[0].req_to_blocks[other.request_id][0]
    assert reused.block_id in before and look_up(manager, SHARED + [1]) < 320
    assert look_up(manager, [*range(3000, 3064), 1]) == 64
    decode(manager, other, [7])
    second = parts(manager)[0].req_to_blocks[other.request_id][1]
    assert second.block_id in before and second.block_hash is None
    decode(manager, other, [8] * 63)
    assert second.block_hash is not None and look_up(manager, [*range(3000, 3064), 7, *[8] * 63, 1]) == 128
    pool.free_blocks(hog)


@BOTH
def test_computed_blocks_not_evicted(hits):
    """A hit's pages lie first in the free queue: what the request needs beside them is not taken from among them."""
    manager = make_manager(60, prefix_hits=hits, max_len=1024)
    body, window = parts(manager)
    pool = manager.block_pool
    manager.free(serve(manager, SHARED + [1] * 7))
    cached = [block for block in pool.blocks if block.block_hash is not None]
    others = [block for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash is None]
    taken = pool.get_new_blocks(len(others))
    assert set(map(id, taken)) == set(map(id, others))
    pool.free_blocks(taken)
    for block in others:  # to the end of the queue
        pool.free_block_queue.remove(block)
    pool.free_block_queue.append_n(others)
    request = serve(manager, SHARED + [2] * 200)
    assert request.hit == 320
    rows = body.req_to_blocks[request.request_id] + window.req_to_blocks[request.request_id]
    now = [block for block in rows if not block.is_null]
    assert len({block.block_id for block in now}) == len(now)
    assert {block.block_id for block in body.req_to_blocks[request.request_id][:5]} <= {b.block_id for b in cached}


def test_basic_prefix_caching_disabled():
    manager = make_manager(200, caching=False)
    for _ in range(2):
        request = serve(manager, SHARED + [1] * 7)
        assert request.hit == 0
        manager.free(request)
    assert all(block.block_hash is None for block in manager.block_pool.blocks)


def test_cache_blocks():
    """Chunk by chunk: only whole pages are published, at the step that fills them."""
    manager = make_manager(200)
    request = make_request("chunks", SHARED)
    start(manager, request)
    published = []
    for computed in range(0, 320, 40):
        step(manager, request, 40, first_hit=0 if not computed else None)
        request.num_computed_tokens = computed + 40
        published.append(sum(b.block_hash is not None for b in parts(manager)[0].req_to_blocks["chunks"]))
    assert published == [(computed + 40) // 64 for computed in range(0, 320, 40)]


def test_different_block_size():
    """Groups of 64 and 16 tokens: hits end where both have a whole page."""
    manager = make_manager(200)
    serve(manager, SHARED + [1] * 7)
    assert [look_up(manager, SHARED[:n]) for n in (63, 65, 80, 127, 129, 320)] == [0, 64, 64, 64, 128, 256]


def test_fully_cached_prefill_needs_uncached_token():
    """A prompt that is cached to its last token computes its last page again, for the logits."""
    manager = make_manager(200)
    serve(manager, SHARED)
    assert look_up(manager, SHARED) == 256 and look_up(manager, [*SHARED, 1]) == 320


def test_hash_block_tokens():
    """The same 64 tokens behind another text are another page."""
    manager = make_manager(200)
    serve(manager, SHARED)
    assert look_up(manager, [*SHARED[64:], 1]) == 0
    assert look_up(manager, [9, *SHARED[1:], 1]) == 0
    assert look_up(manager, [*SHARED[:64], 9, *SHARED[65:], 1]) == 64


def image(name: str, offset: int, length: int = 30) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


def test_mm_prefix_caching():
    """The same placeholder tokens of another image, or of the same one elsewhere, are another text."""
    manager = make_manager(200)
    tokens = [*SHARED[:140], *[7] * 60, *SHARED[200:], 1]
    serve(manager, tokens, mm_features=[image("cat", 140), image("dog", 170)])
    assert look_up(manager, tokens, mm_features=[image("cat", 140), image("dog", 170)]) == 320
    assert look_up(manager, tokens, mm_features=[image("cat", 140), image("cow", 170)]) == 128
    assert look_up(manager, tokens, mm_features=[image("dog", 140), image("cat", 170)]) == 128
    assert look_up(manager, tokens, mm_features=[image("cat", 141), image("dog", 170)]) == 128
    assert look_up(manager, tokens) == 128


@pytest.mark.parametrize("first", [{"cache_salt": "a"}, {"lora_request": LoRARequest("a", 1, "/a")}, {}])
def test_cache_key_salting(first):
    """Another salt or adapter, one more or one less: nothing is shared, from the first page on."""
    manager = make_manager(200)
    serve(manager, [*SHARED, 1], **first)
    others = [{"cache_salt": "b"}, {"lora_request": LoRARequest("b", 2, "/b")}, {"cache_salt": "a"},
              {"lora_request": LoRARequest("a", 1, "/a")}, {}]  # fmt: skip
    for other in others:
        assert look_up(manager, [*SHARED, 1], **other) == (320 if other == first else 0)


@BOTH
@pytest.mark.parametrize("running", [True, False])
def test_prefill_not_enough_free_blocks_with_computed_blocks(hits, running):
    """A request that hits and does not fit is refused and leaves no trace; pages that it hits are not free for it."""
    manager = make_manager(60, prefix_hits=hits, max_len=1024)
    pool = manager.block_pool
    owner = serve(manager, SHARED + [1] * 7)
    if not running:
        manager.free(owner)
    blocks, *_ = manager.get_computed_blocks(make_request("probe", SHARED + [2]))
    adopted = sum(len(held(list(row))) for row in blocks.blocks)
    new = 7 + 12  # 400 tokens more: INT4 pages to 720, and 16-bit ones of the last 191
    hog = pool.get_new_blocks(free_pages(manager) - new - (0 if running else adopted) + 1)
    counts, free = [block.ref_cnt for block in pool.blocks], free_pages(manager)
    request = make_request("late", SHARED + [2] * 400)
    hit = start(manager, request)
    assert hit == 320 and step(manager, request, 400, first_hit=hit) is None
    assert [block.ref_cnt for block in pool.blocks] == counts and free_pages(manager) == free
    assert not parts(manager)[0].req_to_blocks.get("late") and not parts(manager)[1].req_to_blocks.get("late")
    pool.free_blocks([hog.pop()])
    assert start(manager, request) == 320 and step(manager, request, 400, first_hit=320) is not None
    assert free_pages(manager) == 0
    pool.free_blocks(hog)
    for one in (owner, request) if running else (request,):
        manager.free(one)
    assert free_pages(manager) == 59


def test_reset_prefix_cache():
    """Refused while a page is in use, and without effect then; afterwards nothing is found."""
    manager = make_manager(200)
    request = serve(manager, SHARED + [1] * 7)
    assert not manager.reset_prefix_cache() and look_up(manager, [*SHARED, 2]) == 320
    manager.free(request)
    assert manager.reset_prefix_cache() and look_up(manager, [*SHARED, 2]) == 0
    assert all(block.block_hash is None for block in manager.block_pool.blocks)


def test_prefix_cache_stats_disabled():
    manager = make_manager(200, stats=False)
    serve(manager, SHARED)
    assert manager.make_prefix_cache_stats() is None


@BOTH
@pytest.mark.parametrize(("length", "hit"), [(320, 256), (321, 256), (383, 256), (384, 320)])
def test_eagle_removes_the_last_block(hits, length, hit):
    """With EAGLE heads the last page of what could be hit is computed again, aligned and not."""
    manager = make_manager(200, prefix_hits=hits, lookahead=3, ahead=3, dropped=64)
    tokens = list(range(2000, 2000 + length))
    serve(manager, tokens)
    assert look_up(manager, [*tokens, 1]) == hit
