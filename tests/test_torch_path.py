# SPDX-License-Identifier: Apache-2.0
"""The torch path on paged, poisoned caches against the oracle."""
from __future__ import annotations

import math

import pytest
import torch
from paged import PagedRequest, make_request, nan_body, nan_window

from bie_kernels import reference
from bie_kernels.layout import HEAD_SIZES, PAGE_TOKENS, PageLayout
from bie_kernels.torch_path import RequestStep, Rule, seal, store

RULE = Rule(8, 128, 128 + 63)
CHUNKS = [[300], [64] * 4 + [44], [33, 1, 1, 1, 64, 130, 63, 1, 6], [1] * 150 + [150]]


def oracle(request: PagedRequest, q: torch.Tensor, rule: Rule = RULE, soft_cap: float = 0.0) -> torch.Tensor:
    n = q.shape[0]
    k4, v4 = reference.quantised_copy(request.k[:n], request.v[:n], request.layout, rule.sink_tokens)
    return reference.attention(
        q, torch.arange(n), request.k[:n], request.v[:n], k4, v4, scale=q.shape[-1] ** -0.5, soft_cap=soft_cap,
        sink_tokens=rule.sink_tokens, recent_tokens=rule.recent_tokens,
    )  # fmt: skip


def run_chunks(request: PagedRequest, q: torch.Tensor, chunks: list[int], soft_cap: float = 0.0) -> torch.Tensor:
    return torch.cat(
        [request.run(part, scale=q.shape[-1] ** -0.5, soft_cap=soft_cap) for part in q.split(chunks)]
    )


@pytest.mark.parametrize("chunks", CHUNKS, ids=["one", "pages", "odd", "decode"])
@pytest.mark.parametrize("axis", ["channel", "head_dim"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_equal_the_oracle(chunks, axis, dtype):
    request = make_request(300, 2, PageLayout(64, None, 64, axis), RULE, dtype)
    q = torch.randn(300, 6, 64).to(dtype)
    assert torch.allclose(run_chunks(request, q, chunks), oracle(request, q), atol=2e-5)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("group_size", [64, 32])
@pytest.mark.parametrize("axis", ["channel", "head_dim"])
def test_head_sizes_and_groups(head_size, group_size, axis):
    request = make_request(210, 2, PageLayout(head_size, None, group_size, axis), RULE, torch.float32)
    q = torch.randn(210, 2, head_size)
    assert torch.allclose(run_chunks(request, q, [200] + [1] * 10), oracle(request, q), atol=2e-5)


@pytest.mark.parametrize(("heads", "heads_q"), [(1, 8), (4, 4), (2, 14)], ids=["MQA", "MHA", "GQA 7"])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_head_groupings_soft_cap_and_other_value_size(heads, heads_q, soft_cap):
    request = make_request(210, heads, PageLayout(96, 64), RULE, torch.float32)
    q = torch.randn(210, heads_q, 96)
    out = run_chunks(request, q, [150, 50] + [1] * 10, soft_cap)
    assert torch.allclose(out, oracle(request, q, soft_cap=soft_cap), atol=2e-5)


@pytest.mark.parametrize(
    "rule", [Rule(0, 64, 127), Rule(64, 64, 127), Rule(13, 100, 163), Rule(8, 300, 363)], ids=str
)
def test_other_windows(rule):
    request = make_request(400, 2, PageLayout(64), rule, torch.float32)
    q = torch.randn(400, 4, 64)
    assert torch.allclose(run_chunks(request, q, [130, 200] + [7] * 10), oracle(request, q, rule), atol=2e-5)


def test_head_dim_axis_needs_no_window_at_all():
    rule = Rule(0, 0, 63)
    request = make_request(200, 2, PageLayout(64, None, 64, "head_dim"), rule, torch.float32)
    q = torch.randn(200, 4, 64)
    assert torch.allclose(run_chunks(request, q, [90, 60] + [1] * 50), oracle(request, q, rule), atol=2e-5)


def test_long_diffuse_attention():
    """Many keys of equal weight: where accumulators that truncate show."""
    request = make_request(9000, 1, PageLayout(64), RULE, torch.float32)
    q = torch.zeros(9000, 2, 64)
    q[-4:] = torch.randn(4, 2, 64) * 0.01
    out = run_chunks(request, q, [8996, 4])[-4:]
    k4, v4 = reference.quantised_copy(request.k, request.v, request.layout, 8)
    want = reference.attention(
        q[-4:], torch.arange(8996, 9000), request.k, request.v, k4, v4, scale=0.125, sink_tokens=8, recent_tokens=128
    )
    assert ((out - want).norm() / want.norm()) < 1e-4


def readable_bytes(request: PagedRequest, length: int) -> dict[str, torch.Tensor]:
    """Everything a later step may read after `length` committed tokens."""
    layout, rule = request.layout, request.rule
    body = [request.body[page] for page in request.body_pages]
    values, keys = [], []
    for token in range(length):
        page, offset = body[token // PAGE_TOKENS], token % PAGE_TOKENS
        bytes_ = [layout.v_code_byte(offset, channel)[0] for channel in range(0, layout.v_size) if not channel & 8]
        bytes_ += [
            layout.v_meta_byte(base, offset, channel) + i
            for base in (layout.v_scale, layout.v_min)
            for channel in range(0, layout.v_size, layout.group_size)
            for i in (0, 1)
        ]
        values.append(page[:, bytes_])
    for page in range(length // PAGE_TOKENS):
        keys += [body[page][:, : layout.v_codes], body[page][:, layout.k_scale : layout.v_scale]]
    positions = [j for j in range(length) if j < rule.sink_tokens or j >= length - rule.retained_tokens]
    window = [
        request.window[request.window_table[j // request.page_tokens], :, j % request.page_tokens] for j in positions
    ]
    return {"values": torch.stack(values), "keys": torch.cat(keys, 1), "window": torch.stack(window)}


@pytest.mark.parametrize("drafts", [1, 4, 8, 16])
def test_rejected_drafts_leave_no_trace(drafts):
    """After k of K drafts are rejected, every readable byte equals the never-drafted run's, for every k."""
    layout = PageLayout(64)
    rule = Rule(8, 128, 128 + drafts + 63)
    committed = 0
    drafted = make_request(420, 2, layout, rule, torch.float32, seed=3)
    plain = make_request(420, 2, layout, rule, torch.float32, seed=3)
    truth_k, truth_v = drafted.k.clone(), drafted.v.clone()
    q = torch.randn(420, 4, 64)
    for request in (drafted, plain):
        request.run(q[:180], scale=0.125)
    committed = 180
    rejected = 0
    while committed + drafts + 1 < 400:
        accepted = 1 + (drafts - rejected)  # one real token and the accepted drafts
        span = slice(committed, committed + drafts + 1)
        # Rejected drafts have other keys and values than the tokens that come in their place.
        drafted.k[committed + accepted : span.stop] = torch.randn(rejected, 2, 64) * 50
        drafted.v[committed + accepted : span.stop] = torch.randn(rejected, 2, 64) * 50
        out = drafted.run(q[span], scale=0.125, accept=accepted)
        drafted.k[:], drafted.v[:] = truth_k, truth_v
        want = plain.run(q[committed : committed + accepted], scale=0.125)
        assert torch.allclose(out[:accepted], want, atol=2e-5)
        committed += accepted
        ours, theirs = readable_bytes(drafted, committed), readable_bytes(plain, committed)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), (name, committed, rejected)
        rejected = (rejected + 1) % (drafts + 1)


def test_slot_minus_one_and_the_null_block_write_nothing():
    layout = PageLayout(64)
    body, window = nan_body(4, 2, layout), nan_window(6, 2, layout, torch.float32)
    before = body.clone(), window.clone()
    k, v = torch.randn(6, 2, 64), torch.randn(6, 2, 64)
    store(k, v, body, window, torch.tensor([-1, -1, 0, 5, 63, -1]), torch.tensor([-1, 0, 3, 7, -1, -1]), layout)
    assert torch.equal(body, before[0]) and torch.equal(window.isnan(), before[1].isnan())


def test_missing_windows_are_read_in_int4():
    """A relaxed prefix hit: positions of the window that nobody holds in 16 bits come from the codes."""
    layout = PageLayout(64)
    owner = make_request(330, 2, layout, RULE, torch.float32)
    q = torch.randn(330, 4, 64)
    owner.run(q[:256], scale=0.125)
    held = owner.window_table.clone()
    # The hit at 256 finds the sinks and the last 5 pages of its window, not the ones before.
    owner.window_table[1:27] = 0
    out = owner.run(q[256:330], scale=0.125)
    resident = torch.ones(330, dtype=torch.bool)
    resident[8 : 27 * 8] = False
    k4, v4 = reference.quantised_copy(owner.k, owner.v, layout, 8)
    want = reference.attention(
        q[256:330], torch.arange(256, 330), owner.k, owner.v, k4, v4, scale=0.125, sink_tokens=8, recent_tokens=128,
        resident=resident,
    )  # fmt: skip
    assert torch.allclose(out, want, atol=2e-5)
    assert (held[1:27] != 0).any()  # something was taken away


def test_a_nan_token_stays_in_its_page_and_request():
    layout = PageLayout(64)
    heads, shared_body = 2, nan_body(20, 2, layout)
    window = nan_window(100, 2, layout, torch.float32)
    requests = []
    for i, (pages, windows) in enumerate((([1, 2, 3, 4, 5], range(1, 45)), ([6, 7, 8, 9, 10], range(45, 90)))):
        k, v = torch.randn(300, heads, 64), torch.randn(300, heads, 64)
        if i == 0:
            k[70] = torch.nan
            v[70] = torch.nan
        requests.append(PagedRequest(k, v, shared_body, window, layout, RULE, torch.tensor(pages), list(windows)))
    q = torch.randn(300, 4, 64)
    sick, healthy = (torch.cat([r.run(part, scale=0.125) for part in q.split([200, 100])]) for r in requests)
    assert healthy.isfinite().all()
    assert sick[:64].isfinite().all()  # queries that cannot see token 70 nor its page
    assert sick[250:].isnan().any()  # and those that do see it are not silently wrong
    # Only page 1 of the sick request is damaged.
    keys = shared_body[torch.tensor([1, 3, 4])][:, :, layout.k_scale : layout.v_scale].contiguous().view(torch.float16)
    assert keys[[0, 1]].isfinite().all()


def test_sealing_takes_keys_from_the_window_and_from_the_step():
    """A page that fills in the middle of a chunk equals the same page packed at once by the oracle."""
    layout = PageLayout(64)
    request = make_request(200, 2, layout, RULE, torch.float32)
    for part in torch.randn(200, 4, 64).split([50, 1, 1, 60, 88]):
        request.run(part, scale=0.125)
    for page in range(3):
        rows = slice(page * 64, page * 64 + 64)
        valid = torch.arange(rows.start, rows.stop) >= 8
        for head in range(2):
            want = reference.pack_page(
                reference.quantise_keys(request.k[rows, head], layout, valid),
                reference.quantise_values(request.v[rows, head], layout),
                layout,
            )
            assert torch.equal(request.body[request.body_pages[page], head], want)


def test_seal_is_a_no_op_on_the_head_dim_axis():
    layout = PageLayout(64, None, 64, "head_dim")
    body, window = nan_body(3, 1, layout), nan_window(9, 1, layout, torch.float32)
    step = RequestStep(0, 64, 0, torch.tensor([1]), torch.arange(1, 9), 8, RULE)
    seal(torch.full((64, 1, 64), math.nan), body, window, [step], layout)
    assert (body == 0xFF).all()
