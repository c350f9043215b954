# SPDX-License-Identifier: Apache-2.0
"""AWQ and GPTQ checkpoints of a tiny model, packed as those formats want it."""
from __future__ import annotations

import json
from pathlib import Path

GROUP = 64
DETAILS = {
    "awq": {"zero_point": True, "version": "gemm", "group_size": GROUP, "bits": 4},
    "gptq": {"desc_act": False, "sym": True, "group_size": GROUP, "bits": 4},
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack(codes):  # noqa: ANN001, ANN201
    """[n, 8 m] numbers from 0 to 15 -> int32 [n, m], the first in the lowest bits."""
    import torch

    shifts = 4 * torch.arange(8, dtype=torch.int64)
    words = (codes.reshape(codes.shape[0], -1, 8).to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def packed_linear(weight, method: str) -> dict:  # noqa: ANN001
    """Tensors of a linear layer whose `weight` [out, in] is rounded to 4 bits in groups of 64 inputs around 8."""
    import torch

    wide = weight.T.reshape(-1, GROUP, weight.shape[0])  # group, input, output
    scales = (wide.abs().amax(1) / 7).half().clamp(min=1e-6)
    codes = ((wide / scales[:, None].float()).round() + 8).clamp(0, 15).to(torch.int64).reshape(weight.shape[::-1])
    if method == "awq":
        ordered = codes.reshape(codes.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(codes.shape)
        return {"qweight": pack(ordered), "qzeros": pack(torch.full_like(scales, 8)), "scales": scales}
    index = torch.arange(codes.shape[0], dtype=torch.int32) // GROUP
    zeros = pack(torch.full_like(scales, 7))  # GPTQ adds 1
    return {"qweight": pack(codes.T).T.contiguous(), "qzeros": zeros, "scales": scales, "g_idx": index}


def tiny_packed(folder: Path, model: str, method: str) -> str:
    """`model` (a folder with one safetensors file) with its linear layers in `method`; returns the new folder."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in load_file(Path(model) / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = packed_linear(tensor.float(), method)
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            tensors[name] = tensor.half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {"dtype": "float16", "quantization_config": {"quant_method": method, **DETAILS[method]}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
