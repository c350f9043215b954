# SPDX-License-Identifier: Apache-2.0
"""Changes of the torch path inside one engine process: keys only, values only, a wrong scale.

They are for ablations and for the test that the harness notices a broken format. They work
where `int4_asym` runs its torch path (CPUs); on GPUs the kernels are compiled and `apply_patches`
refuses.
"""
from __future__ import annotations

from typing import Any

import torch

WRONG_SCALE = 1.25
"""Factor on every stored scale for `fault=scale`."""


def apply_patches(patches: dict[str, Any]) -> None:
    """Apply {"fault": "scale"} or {"only": "keys" | "values"} to this process.

    Raises:
        ValueError: an unknown patch, or a machine where the torch path does not run.
    """
    if not patches:
        return
    if torch.cuda.is_available():
        raise ValueError("only= and fault= work on the CPU's torch path and not on a GPU.")
    match patches:
        case {"fault": "scale"}:
            _wrong_scale()
        case {"only": "keys" | "values" as side}:
            _one_side(side)
        case _:
            raise ValueError(f"unknown change {patches}; known are fault=scale, only=keys, only=values.")


def _wrong_scale() -> None:
    """Codes are computed with the right scale, and a wrong one is stored."""
    from bie_kernels import torch_pages

    for name in ("quantise_min", "quantise_zero_point"):
        original = getattr(torch_pages, name)

        def wrong(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            q = _original(*args, **kwargs)
            return q._replace(scale=q.scale * WRONG_SCALE)

        setattr(torch_pages, name, wrong)


def _one_side(side: str) -> None:
    """Quantise keys or values only: a shadow of the other side in the model's dtype, by block and offset.

    The shadow stands in for whole pages where `attend` dequantises them; it asks for them in
    order, slice by slice, so a counter tells which pages a slice holds.
    """
    from bie_kernels import torch_path
    from bie_kernels.layout import PAGE_TOKENS

    shadows: dict[int, torch.Tensor] = {}
    now: dict[str, Any] = {}
    store, attend = torch_path.store, torch_path.attend
    torch_path.FEW_QUERIES = 0  # decode dequantises pages too, so that there is one place to change

    def storing(k, v, body, window, body_slots, window_slots, layout):  # noqa: ANN001, ANN202
        store(k, v, body, window, body_slots, window_slots, layout)
        rows = v if side == "keys" else k
        shadow = shadows.get(body.data_ptr())
        if shadow is None:
            shape = (body.shape[0], PAGE_TOKENS, *rows.shape[1:])
            shadow = shadows[body.data_ptr()] = torch.zeros(shape, dtype=rows.dtype)
        live = body_slots >= PAGE_TOKENS
        shadow[body_slots[live] // PAGE_TOKENS, body_slots[live] % PAGE_TOKENS] = rows[live]

    def attending(q, k, v, body, window, step, layout, **options):  # noqa: ANN001, ANN202
        now.update(shadow=shadows[body.data_ptr()], pages=step.body_pages, done=0)
        return attend(q, k, v, body, window, step, layout, **options)

    def shadowed(page: torch.Tensor, layout: Any) -> torch.Tensor:
        ids = now["pages"][now["done"] : now["done"] + len(page)]
        now["done"] += len(page)
        return now["shadow"][ids].flatten(0, 1).transpose(0, 1).float()  # [H, n * 64, C]

    torch_path.store, torch_path.attend = storing, attending
    setattr(torch_path, "load_values" if side == "keys" else "load_keys", shadowed)
