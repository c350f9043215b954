# SPDX-License-Identifier: Apache-2.0
"""Every launcher refuses every tensor of another dtype, shape or stride than its kernel reads, and launches nothing.

A launcher gets good tensors, of which one is spoilt in one way at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kernel_cases import DEVICE, make_batch  # noqa: E402

from bie_kernels import decode, flash_plan, launches, merge, plan, prefill, prefill_flash, store  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402

LAYOUT, HEADS, GROUP = PageLayout(64), 2, 2
NUMBERS = {"sink_tokens": 8, "recent_tokens": 128, "retained": 191}
SEAL = {"sink_tokens": 8, "retained": 191, "max_query_len": 70}
WRITTEN = ("out", "body", "window")
FREE = {"body": (0,), "window": (0,), "body_table": (1,), "window_table": (1,), "workspace": (0,)}
"""Dimensions of any size."""

MORE_FREE = {
    "seal": {"k": (0,)}, "merge": {"plan": (0,)}, "make_plan": {"plan": (0,), "seq_lens": (0,)},
    "plan_for": {"seq_lens": (0,)},
}  # fmt: skip

Case = tuple[Callable[..., object], dict[str, torch.Tensor]]


def _batch(lengths: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    b = make_batch(lengths, LAYOUT, heads=HEADS)
    tensors = {name: x.to(DEVICE) for name, x in vars(b).items() if isinstance(x, torch.Tensor)}
    q = torch.zeros(b.k.shape[0], HEADS * GROUP, 64, dtype=torch.float16, device=DEVICE)
    return tensors | {"q": q, "out": torch.zeros_like(q)}


def _only(tensors: dict[str, torch.Tensor], names: str) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in names.split()}


def _flash(q, k, v, *, out, **kwargs):  # noqa: ANN001, ANN003, ANN202
    return out, torch.zeros(q.shape[1], q.shape[0], device=DEVICE)


def _cases() -> dict[str, Case]:
    """Launchers, and good tensors for them."""
    steps, mixed = _batch([(130, 2), (200, 2)]), _batch([(300, 70), (0, 20)])
    cut = flash_plan.plan_flash([0, 70, 90], [370, 20], recent_tokens=128, slice_tokens=1024).to(torch.device(DEVICE))
    bytes_ = lambda n: torch.zeros(n, dtype=torch.uint8, device=DEVICE)
    floats = lambda *shape: torch.zeros(*shape, device=DEVICE)
    work = decode.workspace_bytes(2, HEADS * GROUP, 64, 2, kv_heads=HEADS, device=DEVICE)
    pages = "body_table window_table query_start_loc seq_lens"
    decoded = _only(steps, "q body window body_table window_table seq_lens out")
    prefilled = _only(mixed, f"q k v body window {pages} out")
    sizes = {"q_heads": HEADS * GROUP, "kv_heads": HEADS, "head_size_v": 64, "q_len": 2}
    windows = {"sink_tokens": 8, "recent_tokens": 128}
    budget = plan.item_budget(2, HEADS, 2 * GROUP, 64, torch.device(DEVICE))
    made = torch.zeros(plan.plan_ints(2, budget), dtype=torch.int32, device=DEVICE)
    parts = {"acc": floats(6, HEADS, 4, 64), "peak": floats(6, HEADS, 4), "total": floats(6, HEADS, 4)}
    attend = {"layout": LAYOUT, "scale": 0.125, **NUMBERS}
    return {
        "decode": (
            lambda **x: decode.decode(**x, q_len=2, **attend), decoded | {"workspace": bytes_(work), "plan": made}
        ),
        "plan_for": (
            lambda **x: decode.plan_for(**x, **sizes, **windows),
            _only(steps, "seq_lens") | {"workspace": bytes_(1 << 18)},
        ),
        "make_plan": (
            lambda **x: plan.make_plan(**x, q_len=2, budget=8, **windows), _only(steps, "seq_lens") | {"plan": made}
        ),
        "merge": (
            lambda **x: merge.merge(**x, requests=2, q_len=2), parts | {"plan": made, "out": steps["out"]}
        ),
        "merge of splits": (
            lambda **x: merge.merge(None, **x, requests=2, q_len=2, splits=3), parts | {"out": steps["out"]}
        ),
        "prefill": (
            lambda **x: prefill.prefill(**x, **attend),
            prefilled | {"workspace": bytes_(prefill.workspace_bytes(64, device=DEVICE))},
        ),
        "flash": (
            lambda **x: prefill_flash.prefill(**x, plan=cut, flash=_flash, **attend),
            prefilled | {"workspace": bytes_(flash_plan.workspace_bytes(1024, 90, HEADS * GROUP, HEADS, LAYOUT, 2))},
        ),
        "store": (lambda **x: store.store(**x, layout=LAYOUT), _only(mixed, "k v body window body_slots window_slots")),
        "seal": (lambda **x: store.seal(**x, layout=LAYOUT, **SEAL), _only(mixed, f"k body window {pages}")),
        "store_and_seal": (
            lambda **x: store.store_and_seal(**x, layout=LAYOUT, **SEAL),
            _only(mixed, f"k v body window body_slots window_slots {pages}"),
        ),
    }  # fmt: skip


CASES = _cases()


def _spoilt(launcher: str, name: str, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(what is wrong, tensor)."""
    flat = name == "workspace"
    if launcher not in ("decode", "plan_for", "prefill") or not flat:  # memory of any dtype
        yield "dtype", x.to({torch.int32: torch.int64, torch.int64: torch.int32}.get(x.dtype, torch.float64))
    if x.dtype == torch.float16 and not launcher.startswith("merge"):
        yield "other 16-bit dtype", x.bfloat16()
    if not flat:
        yield "one dimension more", x[None]
        yield "one dimension less", x[0]
    free = FREE.get(name, ()) + MORE_FREE.get(launcher, {}).get(name, ())
    for dim in range(x.dim()):
        if dim not in free:
            yield f"dimension {dim} too small", x.narrow(dim, 0, x.shape[dim] - 1)
            yield f"dimension {dim} too large", torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if flat or name == "plan" and launcher == "decode":
        yield "too small", x[:16]
    yield "strided rows", torch.stack([x, x], -1)[..., 0]
    if name in ("body", "window"):
        wide = torch.cat([x, x[..., :4]], -1)[..., : x.shape[-1]]
        yield "rows at multiples of 4", wide
        moved = torch.empty(x.numel() + 16, dtype=x.dtype, device=x.device)
        yield "starting anywhere", moved[1 : x.numel() + 1].view(x.shape)
    if flat:
        yield "starting anywhere", torch.cat([x, x])[4:]
    if name in WRITTEN:
        for dim in range(x.dim() - 1):
            yield f"dimension {dim} expanded", x.narrow(dim, 0, 1).expand(x.shape)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that were to be launched; none is."""
    made: list[object] = []
    monkeypatch.setattr(
        launches.Launches, "__getitem__", lambda self, grid: lambda *args, **kwargs: made.append(self.kernel)
    )
    return made


@pytest.mark.parametrize(("launcher", "name"), [(x, name) for x, (_, tensors) in CASES.items() for name in tensors])
def test_one_wrong_tensor_is_refused(launcher: str, name: str, launched: list[object]) -> None:
    call, good = CASES[launcher]
    call(**good)
    assert launched
    launched.clear()
    for what, bad in _spoilt(launcher, name, good[name]):
        with pytest.raises(ValueError) as refusal:
            call(**good | {name: bad})
            pytest.fail(f"{launcher} took {name}: {what}", pytrace=False)
        assert not launched, f"{launcher} launched before it refused {name}: {what}"
        named = good if re.search("too|16-bit", what) else (name,)  # where two tensors do not fit, either is named
        assert any(re.search(rf"\b{x}\b", str(refusal.value)) for x in named), f"{what}: {refusal.value}"


def test_a_plan_of_another_batch_is_refused(launched: list[object]) -> None:
    _, good = CASES["flash"]
    for starts, lens in (([0, 70], [370]), ([0, 70, 91], [370, 21])):
        cut = flash_plan.plan_flash(starts, lens, recent_tokens=128, slice_tokens=1024).to(torch.device(DEVICE))
        with pytest.raises(ValueError, match="plan: made for"):
            prefill_flash.prefill(**good, layout=LAYOUT, plan=cut, flash=_flash, scale=0.125, **NUMBERS)
    assert not launched
