# SPDX-License-Identifier: Apache-2.0
"""What a model keeps in its cache, layer by layer, read from its `config.json`.

A model is a list of `Layer`s: full attention (MHA, MQA, GQA), sliding-window or
chunked attention, latent attention (MLA), or a state of fixed size (Mamba, gated
delta net, short convolution). Layers that share another layer's cache are left out.

Imports neither torch nor vLLM; transformers is asked only for keys that a config
leaves to the class's defaults.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bie_vllm_plugin.plan_layers import Layer, model_layers
from bie_vllm_plugin.plan_units import ModelNotFound, PlanError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"

TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Where multimodal configs keep their language model."""

@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it.

    Attributes:
        name: as the user wrote it.
        config: the whole config; `text` is the language model's part of it.
        layers: every cache the model keeps.
        max_context: tokens the model was made for, None when it does not say.
        itemsize: bytes per element that the model runs in.
        index_bytes: bytes of all weights by the safetensors index or files; None if absent.
    """

    name: str
    config: dict[str, Any]
    text: dict[str, Any]
    layers: tuple[Layer, ...]
    max_context: int | None
    itemsize: int
    index_bytes: int | None

    @property
    def model_type(self) -> str:
        """The language model's `model_type`."""
        return str(self.text.get("model_type", ""))

    @property
    def attention(self) -> str:
        """How the layers attend, for people: `32 layers GQA 32:8, head size 128`."""
        parts = []
        seen: dict[tuple[Any, ...], int] = {}
        for layer in self.layers:
            key = (layer.kind, layer.kv_heads, layer.head_size, layer.window)
            seen[key] = seen.get(key, 0) + 1
        heads = self.text.get("num_attention_heads")
        for (kind, kv_heads, head_size, window), count in seen.items():
            if kind == "state":
                parts.append(f"{count} recurrent layers")
                continue
            sort = "MLA" if kind == "mla" else "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
            detail = f"latent {head_size}" if kind == "mla" else f"{heads}:{kv_heads} heads of {head_size}"
            suffix = f", {'window' if kind == 'sliding' else 'chunks of'} {window:,}" if window else ""
            parts.append(f"{count} layers {sort} {detail}{suffix}")
        return "; ".join(parts)


# -- finding the config ----------------------------------------------------------------
def load_model(name: str, itemsize: int = 2) -> ModelShape:
    """Read a model by Hugging Face id, local folder or `config.json`.

    From the Hub only the config and the safetensors index are fetched.

    Args:
        name: the model.
        itemsize: bytes per element that it will run in; vLLM's `--dtype auto` runs
            fp32 checkpoints in 16 bits too.

    Raises:
        ModelNotFound: nothing there.
        PlanError: not a model, or a cache that the planner does not know.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return parse_config(name, _read_json(path), _index_bytes(path.parent), itemsize)
    if path.is_dir():
        if not (path / CONFIG).exists():
            raise ModelNotFound(f"{name} has no {CONFIG}; name a Hugging Face model folder, a config.json or a Hub id.")
        return parse_config(name, _read_json(path / CONFIG), _index_bytes(path), itemsize)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json"):
        raise ModelNotFound(f"{name} does not exist; name a Hugging Face model folder, a config.json or a Hub id.")
    return _from_hub(name, itemsize)


def _from_hub(name: str, itemsize: int) -> ModelShape:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # its retries would be reported one by one
    try:
        config = Path(hf_hub_download(name, CONFIG))
        try:
            folder = Path(hf_hub_download(name, INDEX)).parent
        except (EntryNotFoundError, LocalEntryNotFoundError):  # one file of weights: the config's shapes must do
            folder = None
    except Exception as error:  # whatever the client raises, and it differs by version, there is no config
        raise ModelNotFound(
            f"{name} is not a local path and could not be read from the Hugging Face Hub ({_hub_reason(error)}); "
            "check the name and the network, or name a local folder or config.json."
        ) from None
    return parse_config(name, _read_json(config), _index_bytes(folder) if folder else None, itemsize)


def _hub_reason(error: Exception) -> str:
    """Why the Hub gave nothing, in a few words."""
    from huggingface_hub import errors

    for kind, reason in (
        (errors.HFValidationError, "a Hub id looks like org/model"),
        (errors.GatedRepoError, "it is gated: accept its terms there and run hf auth login"),
        (errors.RepositoryNotFoundError, "no such repository, or it is private"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached and nothing is cached"),
        (errors.EntryNotFoundError, f"the repository has no {CONFIG}"),
    ):
        if isinstance(error, kind):
            return reason
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); name a model's config.json.") from None
    if not isinstance(content, dict) or not (
        "model_type" in content or "architectures" in content or "num_hidden_layers" in content
    ):
        raise PlanError(f"{path} is not a model's config.json: it has neither model_type nor num_hidden_layers.")
    return content


def _index_bytes(folder: Path) -> int | None:
    """Bytes of all tensors by the index, else of the safetensors files, else None."""
    index = folder / INDEX
    if index.exists():
        try:
            total = json.loads(index.read_text())["metadata"]["total_size"]
        except (ValueError, KeyError, TypeError):
            total = None
        if total:
            return int(total)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return files or None


# -- reading it -----------------------------------------------------------------------------
def parse_config(
    name: str, config: dict[str, Any], index_bytes: int | None = None, itemsize: int = 2
) -> ModelShape:
    """The model that a parsed `config.json` describes.

    Args:
        name: how to call it.
        config: the whole config.
        index_bytes: bytes of its weights where known.
        itemsize: bytes per element that it runs in.

    Raises:
        PlanError: a cache that the planner does not know, or a key that is missing.
    """
    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), config)
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise PlanError(f"{name} is an encoder-decoder model, which bie-plan does not compute.")
    _check_kinds(name, config, text)
    text = _completed(name, text)
    if text.get("index_topk") or text.get("compress_ratios"):
        raise PlanError(f"{name} uses sparse latent attention with an index cache, which bie-plan does not compute.")
    try:
        layers = model_layers(name, text, itemsize)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, PlanError):
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            f"{name}: the config of model type {text.get('model_type')!r} is not as bie-plan knows it ({what})."
        ) from None
    return ModelShape(
        name=name,
        config=config,
        text=text,
        layers=layers,
        max_context=_max_context(text),
        itemsize=itemsize,
        index_bytes=index_bytes,
    )


SIZES = {
    "num_hidden_layers": 10_000, "num_attention_heads": 1 << 20, "num_key_value_heads": 1 << 20, "head_dim": 1 << 20,
    "hidden_size": 1 << 24, "vocab_size": 1 << 28, "max_position_embeddings": 1 << 32,
}  # fmt: skip
"""Keys that are counts, and more than any model has."""


def _check_kinds(name: str, config: dict[str, Any], text: dict[str, Any]) -> None:
    for key, most in SIZES.items():
        value = text.get(key)
        plain = isinstance(value, int) and not isinstance(value, bool)
        # Some models state a list, one entry a layer: their own readers know.
        if value is not None and not isinstance(value, list) and not (plain and 0 < value <= most):
            raise PlanError(f"{name}: {key}={value!r} in its config is not a number from 1 to {most}.")
    quant = config.get("quantization_config")
    if quant is not None and not isinstance(quant, dict):
        raise PlanError(f"{name}: quantization_config={quant!r} in its config is not a mapping.")


NEEDED: Sequence[str] = ("num_hidden_layers", "hidden_size", "vocab_size")


def _completed(name: str, text: dict[str, Any]) -> dict[str, Any]:
    """`text`, with keys left to the class's defaults filled in by transformers (slow, so only then)."""
    heads_known = any(key in text for key in ("num_attention_heads", "n_head", "num_heads"))
    if all(key in text for key in NEEDED) and heads_known:
        return text
    model_type = text.get("model_type")
    try:
        from transformers import AutoConfig

        rest = {key: value for key, value in text.items() if key != "model_type"}
        full = AutoConfig.for_model(str(model_type), **rest).to_dict()
    except (ImportError, ValueError, TypeError, KeyError):
        missing = next(key for key in (*NEEDED, "num_attention_heads") if key not in text)
        raise PlanError(
            f"{name}: the config of model type {model_type!r} has no {missing}, and transformers does not know the "
            "type; add the key to a local copy of config.json."
        ) from None
    return {**full, **text}


def _max_context(text: dict[str, Any]) -> int | None:
    """Tokens by vLLM's rule: max_position_embeddings, times the factor of plain RoPE scaling."""
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
    length = next((text[key] for key in keys if text.get(key)), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, dict) else None
    already = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "default", None)
    if length and kind not in already and "gemma3" not in str(text.get("model_type")):
        length = int(length * (scaling.get("factor") or 1))
    return length
