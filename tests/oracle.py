# SPDX-License-Identifier: Apache-2.0
"""A `transformers` model whose attention follows `bie_kernels.reference` literally: what an engine has to say."""
from __future__ import annotations

import numpy as np
import torch

from bie_kernels import reference
from bie_kernels.layout import PageLayout

SINK, RECENT = 8, 128


def attention_function(recent_tokens: int):
    """An attention function of `transformers` (batch 1, no cache); windowed layers keep full precision."""

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                  softcap=None, **kwargs):  # fmt: skip
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        if sliding_window is not None:
            return windowed(q, k, v, scale, sliding_window, softcap or 0.0)[None].to(query.dtype), None
        layout = PageLayout(query.shape[-1])
        k4, v4 = reference.quantised_copy(k, v, layout, SINK)
        out = reference.attention(
            q, torch.arange(q.shape[0]), k, v, k4, v4, scale=scale, sink_tokens=SINK, recent_tokens=recent_tokens,
            soft_cap=softcap or 0.0,
        )  # fmt: skip
        return out[None].to(query.dtype), None

    return attention


def windowed(q, k, v, scale: float, window: int, soft_cap: float) -> torch.Tensor:
    """Plain sliding-window attention, [T, heads, D] each."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    weights = logits.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Oracle:
    """log-probabilities [T, vocab] of the reference model in fp32, by model folder."""

    def __init__(self, recent_tokens: int = RECENT) -> None:
        from transformers import AttentionInterface

        self._name = f"int4_asym_{recent_tokens}"
        AttentionInterface.register(self._name, attention_function(recent_tokens))
        self._models: dict = {}

    def __call__(self, folder: str, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._model(folder)(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    def embedding(self, folder: str, ids: list[int]) -> torch.Tensor:
        """The last token's final hidden state, normalised."""
        with torch.inference_mode():
            hidden = self._model(folder).model(torch.tensor([ids]), use_cache=False).last_hidden_state
        return torch.nn.functional.normalize(hidden[0, -1], dim=0)

    def _model(self, folder: str):  # noqa: ANN202 - a class of transformers, by the configuration
        from transformers import AutoModelForCausalLM

        if folder not in self._models:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            model.set_attn_implementation(self._name)
            self._models[folder] = model.eval()
        return self._models[folder]

    def check(self, model: str, prompts: list[list[int]], results: list[dict], *, median: float = 1e-3,
              worst: float = 0.05) -> None:  # fmt: skip
        """Teacher-forced along the engine's greedy tokens: same log-probabilities, and each token the oracle's best."""
        differences, regrets = [], []
        for prompt, result in zip(prompts, results, strict=True):
            ids = prompt + result["tokens"]
            logprobs = self(model, ids[:-1])[len(prompt) - 1 :]
            chosen = logprobs.gather(1, torch.tensor(result["tokens"])[:, None])[:, 0].numpy()
            differences.append(np.abs(chosen - np.array(result["logprobs"])))
            regrets.append(logprobs.amax(-1).numpy() - chosen)
        difference, regret = np.concatenate(differences), np.concatenate(regrets)
        assert np.median(difference) < median and difference.max() < worst, (np.median(difference), difference.max())
        # A greedy token may only differ from the oracle's best within the noise of both.
        assert regret.max() < 2 * worst, regret.max()
