# SPDX-License-Identifier: Apache-2.0
"""Random schedules of the cache managers against a model of the worker; `test_cache_manager.py` runs this per release.

Requests arrive, are chunked, drafted, rejected, preempted, resumed, finished, two steps of one are
in flight (asynchronous scheduling), and cached pages are evicted. The worker is a book of what it
would have written: per position the hash of the text up to there, so that a page that holds another
text, or a part of one, is told from the right one.
"""
from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from manager_suite import held, make_manager, make_request, parts, start
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from bie_kernels.layout import PAGE_TOKENS

MAX_LEN = 1024
CHUNKS = (64, 100, 300)
ACTIONS = (
    *["arrive"] * 4, *["step"] * 10, "preempt", "preempt", "resume", "resume", "finish", "evict", "squeeze", "reset"
)  # fmt: skip


@dataclass
class Sequence:
    """A request, the hashes of its text, and what it was promised."""

    request: Request
    reserved: int
    limit: int
    keys: list[int] = field(default_factory=list)
    computed: int = 0
    hit: int = 0

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.keys.append(hash((self.keys[-1] if self.keys else 0, token)))


@dataclass
class Step:
    """Positions `start` and on are computed; `text` are the hashes up to their end, drafts included."""

    sequence: Sequence
    start: int
    text: list[int]
    adopts: bool


class Worker:
    """Pages as the worker fills them: all stores of a batch, then all seals, then all reads."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.body, self.window = parts(manager)
        self.spec = self.window.kv_cache_spec
        self.values: dict[tuple[int, int], int] = {}  # (block, offset): what is stored as it arrives
        self.codes: dict[int, list[int]] = {}  # block: what it was sealed with

    def run(self, batch: list[Step]) -> None:
        for work in (self.store, self.seal, self.read):
            for step in batch:
                name = step.sequence.request.request_id
                work(step, self.body.req_to_blocks[name], self.window.req_to_blocks[name])

    def in_16_bits(self, row: list, position: int) -> int | None:
        """What the window's page of a position holds there."""
        page, offset = divmod(position, self.window.block_size)
        return None if row[page].is_null else self.values.get((row[page].block_id, offset), 0)

    def store(self, step: Step, body: list, window: list) -> None:
        for position in range(step.start, len(step.text)):
            for row, size in ((body, PAGE_TOKENS), (window, self.window.block_size)):
                block = row[position // size]
                if not block.is_null:
                    self.values[block.block_id, position % size] = step.text[position]

    def seal(self, step: Step, body: list, window: list) -> None:
        for last in range(step.start, len(step.text)):
            if last % PAGE_TOKENS == PAGE_TOKENS - 1:
                first = last + 1 - PAGE_TOKENS
                earlier = [self.in_16_bits(window, position) for position in range(first, min(step.start, last + 1))]
                page = earlier + step.text[max(first, step.start) : last + 1]
                assert page == step.text[first : last + 1], "sealed with keys that were gone, or another text's"
                self.codes[body[first // PAGE_TOKENS].block_id] = page

    def sealed(self, body: list, page: int, text: list[int]) -> bool:
        block, now = body[page].block_id, text[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        return self.codes.get(block) == now == [self.values.get((block, i)) for i in range(PAGE_TOKENS)]

    def read(self, step: Step, body: list, window: list) -> None:
        text, hit = step.text, step.sequence.hit
        if step.adopts:  # hits are sealed pages of this very text, and whole 16-bit pages of it
            assert hit % PAGE_TOKENS == 0 and all(self.sealed(body, page, text) for page in range(hit // PAGE_TOKENS))
            for position in range(hit):
                assert self.in_16_bits(window, position) in (None, text[position])
        for query in {step.start, len(text) - 1}:
            near = range(max(0, query - self.spec.recent_tokens + 1), step.start)
            for position in {*range(min(self.spec.sink_tokens, step.start)), *near}:
                found = self.in_16_bits(window, position)
                if found is None:
                    assert not self.spec.strict and self.spec.sink_tokens <= position < hit, (position, query, hit)
                    assert self.sealed(body, position // PAGE_TOKENS, text)
                else:
                    assert found == text[position], (position, query, hit)
            for page in range(max(0, query - self.spec.recent_tokens + PAGE_TOKENS) // PAGE_TOKENS):
                assert self.sealed(body, page, text), (page, query)


class Schedule:
    """A scheduler that takes its decisions from a list of (action, number)."""

    def __init__(self, manager: KVCacheManager, drafts: int, ahead: int, flights: int, reserving: bool) -> None:
        self.manager, self.drafts, self.ahead = manager, drafts, ahead
        self.flights, self.reserving = flights, reserving
        self.body, self.window = parts(manager)
        self.spec, self.worker = self.window.kv_cache_spec, Worker(manager)
        self.pages = manager.block_pool.num_gpu_blocks - 1
        self.running: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.batch: list[Step] = []
        self.next_batch: list[Step] = []
        self.evicted: set[int] = set()
        self.taken: list = []
        self.names = itertools.count()
        self.seen: set[str] = set()
        shared = random.Random(0)
        self.prefixes = [[shared.randrange(1000) for _ in range(400)] for _ in range(2)]

    def act(self, action: str, number: int) -> None:
        self.rng = random.Random(number)
        if action in ("arrive", "resume", "step"):
            getattr(self, action)()
            if self.rng.random() < 0.5:
                self.flush()
        else:
            self.flush()  # what a step computes arrives before the next one is scheduled
            getattr(self, action)()
        self.check()

    def flush(self) -> None:
        for batch in (self.batch, self.next_batch):
            self.worker.run(batch)
            batch.clear()

    # -- actions -------------------------------------------------------------------
    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randrange(1, 400)] + [rng.randrange(1000)] * rng.randrange(1, 200)
        request = make_request(f"r{next(self.names)}", prompt, self.window.block_size)
        limit = min(MAX_LEN, len(prompt) + rng.randrange(1, 400))
        pages = -(-min(MAX_LEN, limit + self.ahead) // PAGE_TOKENS)
        sequence = Sequence(request, pages + self.spec.peak_pages, limit)
        sequence.extend(prompt)
        self.admit(sequence)

    def resume(self) -> None:
        if self.waiting:
            self.admit(self.waiting.pop(self.rng.randrange(len(self.waiting))))

    def admit(self, sequence: Sequence) -> None:
        """What the scheduler does with a waiting or preempted request: look up, then the first chunk if all fits."""
        request = sequence.request
        assert request.num_computed_tokens == 0
        hit = start(self.manager, request)
        promised = sum(other.reserved for other in self.running.values())
        if len(self.running) == 5 or (self.reserving and promised + sequence.reserved > self.pages):
            self.waiting.append(sequence)
            return
        tokens = min(self.rng.choice(CHUNKS), request.num_tokens - hit)
        taken = self.manager.allocate_slots(
            request, tokens, hit, request.hit_blocks, num_lookahead_tokens=self.ahead, full_sequence_must_fit=True
        )
        assert taken is not None or not self.reserving, "a request was refused what it was promised"
        if taken is None:
            self.waiting.append(sequence)
            return
        self.seen |= {"hit"} if hit else set()
        self.seen |= {"resumed with a hit"} if hit and request.num_preemptions else set()
        sequence.hit = hit
        self.running[request.request_id] = sequence
        self.computed(sequence, hit, sequence.keys[: hit + tokens], hit + tokens, self.batch, adopts=True)

    def step(self) -> None:
        """A step of one request, or two, the second one scheduled before the first one's result is known."""
        idle = [s for s in self.running.values() if not any(s is step.sequence for step in self.batch)]
        if not idle:
            return
        sequence = self.rng.choice(idle)
        request = sequence.request
        if request.num_tokens == sequence.computed:
            self.sample(sequence, 1)
        steps, leave = [], self.preempt  # tokens of each, drafts among them
        for _ in range(self.rng.randint(1, self.flights)):
            pending = request.num_tokens - request.num_computed_tokens
            decodes = pending <= 1 and request.num_computed_tokens + pending >= request.num_prompt_tokens
            tokens, drafts = (1 + self.drafts, self.drafts) if decodes else (min(self.rng.choice(CHUNKS), pending), 0)
            if request.num_computed_tokens + tokens > sequence.limit:
                leave = self.finish
                break
            if self.manager.allocate_slots(request, tokens, num_lookahead_tokens=self.ahead) is None:
                assert not self.reserving, "a request was refused what it was promised"
                break
            steps.append((tokens, drafts))
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
        request.num_in_flight_tokens, request.num_computed_tokens = 0, sequence.computed
        for batch, (tokens, drafts) in zip((self.batch, self.next_batch), steps, strict=False):
            begin = sequence.computed
            if begin == request.num_tokens:
                self.sample(sequence, 1)
            guess = Sequence(request, 0, 0, sequence.keys[: begin + tokens - drafts])
            guesses = [self.rng.randrange(1000) for _ in range(drafts)]
            guess.extend(guesses)
            accepted = self.rng.randrange(drafts + 1)
            self.sample(sequence, accepted, guesses)
            self.seen |= {"rejected"} if accepted < drafts else set()
            self.computed(sequence, begin, guess.keys, begin + tokens - drafts + accepted, batch)
        if not steps:
            self.flush()
            leave(sequence)

    def sample(self, sequence: Sequence, count: int, tokens: list[int] | None = None) -> None:
        tokens = tokens[:count] if tokens is not None else [self.rng.randrange(1000) for _ in range(count)]
        sequence.request.append_output_token_ids(tokens)
        sequence.extend(tokens)

    def computed(self, sequence: Sequence, begin: int, text: list[int], end: int, batch: list, adopts: bool = False):
        batch.append(Step(sequence, begin, text, adopts))
        sequence.computed = sequence.request.num_computed_tokens = end

    def preempt(self, sequence: Sequence | None = None) -> None:
        if sequence or self.running:
            sequence = sequence or self.rng.choice([*self.running.values()])
            self.manager.free(self.running.pop(sequence.request.request_id).request)
            sequence.computed = sequence.request.num_computed_tokens = 0
            sequence.request.num_preemptions += 1
            self.waiting.append(sequence)

    def finish(self, sequence: Sequence | None = None) -> None:
        if sequence or self.running:
            sequence = sequence or self.rng.choice([*self.running.values()])
            self.manager.free(self.running.pop(sequence.request.request_id).request)

    def evict(self) -> None:
        """Some pages lose their place in the prefix cache, also while they are read."""
        cached = [block.block_id for block in self.manager.block_pool.blocks if block.block_hash is not None]
        chosen = set(self.rng.sample(cached, len(cached) // 3))
        self.manager.evict_blocks(chosen)
        self.evicted |= chosen
        self.seen |= {"evicted"} if chosen else set()

    def squeeze(self) -> None:
        """Somebody takes free pages, cached ones among them, and gives them back: at the next squeeze, if nobody was
        promised any.
        """
        pool, free = self.manager.block_pool, self.manager.block_pool.get_num_free_blocks()
        taken = pool.get_new_blocks(max(0, free - self.rng.randint(0, 40)))
        pool.free_blocks(self.taken)
        self.taken = [] if self.reserving else taken
        if self.reserving:
            pool.free_blocks(taken)

    def reset(self) -> None:
        """`reset_prefix_cache` as the scheduler does it: all are preempted, nothing stays cached."""
        for sequence in list(self.running.values()):
            self.preempt(sequence)
        self.manager.block_pool.free_blocks(self.taken)
        self.taken = []
        assert self.manager.reset_prefix_cache()
        assert all(block.block_hash is None for block in self.manager.block_pool.blocks)

    # -- invariants -----------------------------------------------------------------
    def check(self) -> None:
        pool, recent, sink = self.manager.block_pool, self.spec.recent_tokens, self.spec.sink_tokens
        owners: dict[int, list[bool]] = {}  # block: whether a request holds it for positions of its own
        groups: tuple[set[int], set[int]] = (set(), set())
        for name, sequence in self.running.items():
            rows = self.body.req_to_blocks[name], self.window.req_to_blocks[name]
            for row, size, group in zip(rows, (PAGE_TOKENS, self.window.block_size), groups, strict=True):
                for page in held(row):
                    owners.setdefault(row[page].block_id, []).append((page + 1) * size > sequence.hit)
                    group.add(row[page].block_id)
            body, window = rows
            # Resident: the body, and whatever the next query reads in 16 bits, but for a relaxed hit's window.
            assert len(held(body)) == len(body) >= -(-sequence.computed // PAGE_TOKENS)
            own = 0 if self.spec.strict else sequence.hit
            near = range(max(own, sequence.computed - recent + 1, 0), sequence.computed)
            for position in [*range(min(sink, sequence.computed)), *near]:
                assert not window[position // self.window.block_size].is_null, (name, position, sequence.hit)
            assert len(held(window)) <= self.spec.peak_pages
            assert len(held(body)) + len(held(window)) <= sequence.reserved
        # No page is owned twice: shared ones are hits of all their holders but one, and were published.
        assert not groups[0] & groups[1]
        assert all(sum(own) <= 1 for own in owners.values())
        shared = {block for block, own in owners.items() if len(own) > 1}
        self.evicted &= shared
        assert all(pool.blocks[block].block_hash is not None for block in shared - self.evicted)
        counts = {block: len(own) for block, own in owners.items()} | {block.block_id: 1 for block in self.taken}
        assert len(counts) == len(owners) + len(self.taken)
        assert all(block.is_null or block.ref_cnt == counts.get(block.block_id, 0) for block in pool.blocks)
        assert pool.get_num_free_blocks() == self.pages - len(counts)
        if self.reserving:
            assert len(owners) <= sum(sequence.reserved for sequence in self.running.values()) <= self.pages

    def end(self) -> None:
        """Everybody leaves; nothing is held and nobody known."""
        self.flush()
        self.manager.block_pool.free_blocks(self.taken)
        for sequence in [*self.running.values(), *self.waiting]:
            self.manager.free(sequence.request)
        assert self.manager.block_pool.get_num_free_blocks() == self.pages
        books = ("req_to_blocks", "num_cached_block", "_first_held", "_wanted_tail")
        assert not any(getattr(manager, book, ()) for manager in (self.body, self.window) for book in books)


SEEN: set[str] = set()


@given(
    schedule=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1 << 20)), min_size=40, max_size=100),
    hits=st.sampled_from(["relaxed", "strict"]), caching=st.sampled_from([True, True, False]),
    drafts=st.sampled_from([0, 1, 5]), drafter=st.sampled_from(["none", "cached", "eagle"]),
    flights=st.sampled_from([1, 2]),
    room=st.sampled_from([0, 20, 150]), retention=st.sampled_from([0, 0, 128, None]),
    shape=st.sampled_from([(2, 8, 128), (2, 0, 64), (4, 40, 100)]), reserving=st.booleans(),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_random_schedules_keep_the_invariants(
    schedule, hits, caching, drafts, drafter, flights, room, retention, shape, reserving
):
    itemsize, sink, recent = shape
    ahead = drafts if drafter != "none" else 0
    options = {
        "caching": caching, "lookahead": drafts, "ahead": ahead, "dropped": PAGE_TOKENS if drafter == "eagle" else 0,
        "max_len": MAX_LEN, "prefix_hits": hits, "retention": retention, "chunk": max(CHUNKS), "itemsize": itemsize,
        "sink_tokens": sink, "recent_tokens": recent, "batches": flights,
    }  # fmt: skip
    smallest = 1 + MAX_LEN // PAGE_TOKENS + parts(make_manager(500, **options))[1].kv_cache_spec.peak_pages
    manager = make_manager(smallest + room, **options)
    driver = Schedule(manager, drafts, ahead, flights, reserving)
    for action, number in schedule:
        driver.act(action, number)
    driver.end()
    SEEN.update(driver.seen)


def test_the_schedules_did_what_they_are_for():
    assert not {"hit", "resumed with a hit", "rejected", "evicted"} - SEEN
