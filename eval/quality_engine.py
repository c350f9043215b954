# SPDX-License-Identifier: Apache-2.0
"""One engine with one KV format in a process of its own: reads a job, scores its units, saves each as it is done.

    python eval/quality_engine.py JOB.json

A unit is a prompt and, optionally, tokens that are then forced one after the other through
the decode path. The model's last hidden states are caught on their way out of `forward`,
row by row with their positions; the language-model head then turns them into logits of the
full vocabulary, a few rows at a time. Hidden states are small (8k tokens x 896 channels are
15 MB in bf16, their log-probabilities 2.5 GB), so those of `auto` are kept on disk and every
format is compared with them exactly: no top-k, no sampling.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_patch import apply_patches

ROWS = 64
"""Rows of logits held at a time: 64 x 152k x 4 bytes, several copies of it."""

BASE_WAIT_S = 3600


class Captured:
    """Catches the last hidden states of one request at a time, by position.

    A forward hook and not prompt_logprobs: it needs no memory for top-k tables, serves
    prefill and decode alike and depends on no private method of a model runner.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.expected = 0
        model.register_forward_hook(self._hook, with_kwargs=True)

    def start(self, first: int = 0) -> None:
        """Forget everything; the next request's first computed position is `first`."""
        self.rows, self.expected = {}, first

    def _hook(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        if positions.dim() > 1:  # M-RoPE: text has the same position in all sections
            positions = positions[0]
        hidden = output[0] if isinstance(output, tuple) else output
        positions = positions.tolist()
        if self.expected is None:
            self.expected = positions[0]
        n = 0
        while n < len(positions) and positions[n] == self.expected + n:  # what follows is padding
            n += 1
        kept = hidden[:n].detach().to("cpu", copy=True)
        for i in range(n):
            self.rows[self.expected + i] = kept[i]
        self.expected += n

    def take(self, positions: range) -> torch.Tensor:
        """Hidden states [len(positions), H]; raises RuntimeError if some were never computed."""
        if missing := [p for p in positions if p not in self.rows]:
            raise RuntimeError(f"the engine did not compute positions {missing[0]} to {missing[-1]} of a unit")
        return torch.stack([self.rows[p] for p in positions])


class Forcing:
    """Makes a lone request emit given tokens: the logits of the row behind position p are pinned.

    The model's `compute_logits` is wrapped, and the position is the last one that `Captured` saw:
    both of vLLM's model runners call it so, while their logits processors have different interfaces.
    """

    def __init__(self, model: torch.nn.Module, captured: Captured) -> None:
        self.compute_logits, self.captured = model.compute_logits, captured
        self.forced: list[int] = []
        self.first = 0
        model.compute_logits = self._pinned

    def start(self, forced: list[int], first: int) -> None:
        """From position `first` on (the last of the prompt) the next tokens are those of `forced`."""
        self.forced, self.first = list(forced), first

    def _pinned(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = self.compute_logits(hidden, *args, **kwargs)
        step = (self.captured.expected or 0) - 1 - self.first
        if 0 <= step < len(self.forced) and logits is not None:
            logits = torch.full_like(logits, float("-inf"))
            logits[:, self.forced[step]] = 0.0
        return logits


def compare(
    logits: Callable[[torch.Tensor], torch.Tensor], device: torch.device, hidden: torch.Tensor,
    base: torch.Tensor | None, targets: list[int],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Full-vocabulary measures per row, fp32.

    Args:
        logits: the language-model head, [m, H] -> [m, V].
        hidden, base: [n, H], this format's and `auto`'s hidden states of the same positions.
        targets: n next tokens.

    Returns:
        nll, top (argmax equals the target) and, with a base, its nll_base and top_base, kl(base || format)
        in nats, agree (equal argmax).
    """
    out: dict[str, list[torch.Tensor]] = {}

    def log_probs(rows: torch.Tensor) -> torch.Tensor:
        return logits(rows.to(device)).float().log_softmax(-1)

    def put(name: str, value: torch.Tensor) -> None:
        out.setdefault(name, []).append(value.float().cpu())

    goal = torch.tensor(targets, device=device)
    with torch.inference_mode():
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            mine, wanted = log_probs(hidden[rows]), goal[rows, None]
            put("nll", -mine.gather(1, wanted)[:, 0])
            put("top", mine.argmax(-1) == wanted[:, 0])
            if base is not None:
                ours = log_probs(base[rows])
                best = ours.argmax(-1)
                put("nll_base", -ours.gather(1, wanted)[:, 0])
                put("top_base", best == wanted[:, 0])
                put("agree", mine.argmax(-1) == best)
                put("kl", torch.nn.functional.kl_div(mine, ours, log_target=True, reduction="none").sum(-1))
    return {name: torch.cat(parts).numpy() for name, parts in out.items()}


class Engine:
    """vLLM with hooks; see `run`."""

    def __init__(self, llm_arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**llm_arguments)
        self.model = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
        self.captured = Captured(self.model)
        self.forcing = Forcing(self.model, self.captured)

    def run(self, unit: dict[str, Any]) -> tuple[torch.Tensor, list[int], int]:
        """Compute one unit.

        Args:
            unit: prompt (token ids), forced (token ids, may be empty), warm (token ids of a
                request that fills the prefix cache first, may be empty).

        Returns:
            Hidden states [n, H] of the rows that predict the targets, the targets, and
            how many prompt tokens came from the prefix cache.
        """
        from vllm import SamplingParams

        prompt, forced = unit["prompt"], unit.get("forced") or []
        common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        if warm := unit.get("warm"):
            self.captured.start()
            one = SamplingParams(max_tokens=1, **common)
            self.llm.generate([{"prompt_token_ids": warm}], one, use_tqdm=False)
        # With a prefix hit the first computed position is not 0: the hook takes what comes.
        self.captured.start(None if warm else 0)
        self.forcing.start(forced, len(prompt) - 1)
        sampling = SamplingParams(max_tokens=max(1, len(forced)), **common)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        self.forcing.start([], 0)
        if forced:
            if list(output.outputs[0].token_ids) != forced:
                raise RuntimeError("the engine did not emit the forced tokens")
            positions, targets = range(len(prompt) - 1, len(prompt) - 1 + len(forced)), forced
        else:
            positions, targets = range(len(prompt) - 1), prompt[1:]
        return self.captured.take(positions), targets, int(output.num_cached_tokens or 0)


def wait_for(stored: Path) -> torch.Tensor:
    """Hidden states of `auto`, whose engine may be running beside this one.

    Who started both ends this process if `auto` fails, so the limit is only for a parent that died.
    """
    for _ in range(int(BASE_WAIT_S / 0.1)):
        if stored.exists():
            return torch.load(stored)
        time.sleep(0.1)
    raise RuntimeError(f"auto has not computed {stored.stem} within {BASE_WAIT_S} s")


def run_job(job: dict[str, Any]) -> None:
    """All units of a job: results go to `folder`/<id>.npz, `auto`'s hidden states to `base`/<id>.pt."""
    folder, base = Path(job["folder"]), Path(job["base"])
    folder.mkdir(parents=True, exist_ok=True)
    base.mkdir(parents=True, exist_ok=True)
    apply_patches(job.get("patches", {}))
    engine = Engine(job["llm"])
    for unit in job["units"]:
        begin = time.perf_counter()
        hidden, targets, cached = engine.run(unit)
        stored = base / f"{unit['id']}.pt"
        if job["is_base"]:
            scratch = stored.with_suffix(".tmp")
            torch.save(hidden, scratch)
            scratch.rename(stored)
        result = {}
        if not job["is_base"] or unit["kind"] != "score":  # a format's comparison holds auto's numbers as well
            reference = None if job["is_base"] else wait_for(stored)
            device = next(engine.model.parameters()).device
            result = compare(engine.forcing.compute_logits, device, hidden, reference, targets)
        scratch = folder / f"{unit['id']}.tmp.npz"
        np.savez(scratch, cached=cached, **result)
        scratch.rename(folder / f"{unit['id']}.npz")
        print(json.dumps({"unit": unit["id"], "seconds": round(time.perf_counter() - begin, 2)}), flush=True)


def one_sentence(error: Exception) -> str:
    """What an engine that did not start says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic wraps the sentence: its second line says what is wrong
    text = next((line for line in lines if "validation error" not in line), type(error).__name__)
    return text.split(" [type=")[0]


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        run_job(job)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises becomes one sentence of the report
        import traceback

        traceback.print_exc()
        print(json.dumps({"error": one_sentence(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
