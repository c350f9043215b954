# SPDX-License-Identifier: Apache-2.0
"""What is asked of a model: documents to score, texts to force, needles to find.

A unit is {"id", "kind", "prompt", "forced", "warm", ...}: see `quality_engine.Engine.run`.
Everything is made from fixed seeds, so that every format sees the same tokens.
"""
from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).with_name("texts")
CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Tallinn", "Perth", "Lima")
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLES = ("passkey", "needle", "multi", "cached")

Unit = dict[str, Any]


def unit(kind: str, prompt: list[int], forced: list[int] = (), warm: list[int] = (), **facts: Any) -> Unit:
    """A unit whose id names its kind and its content."""
    digest = hashlib.sha256(json.dumps([prompt, list(forced), list(warm)]).encode()).hexdigest()[:12]
    return {
        "id": f"{kind}-{digest}", "kind": kind, "prompt": list(prompt), "forced": list(forced), "warm": list(warm),
        **facts,
    }  # fmt: skip


def documents(tokenizer: Any, names: list[str], extra: list[Path]) -> dict[str, list[int]]:
    """Token ids of the named texts of eval/texts and of the user's own files.

    Raises:
        ValueError: a text that does not exist, one sentence.
    """
    paths = {name: TEXTS / f"{name}.txt" for name in names} | {path.stem: path for path in extra}
    found = {}
    for name, path in paths.items():
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in TEXTS.glob("*.txt")))
            raise ValueError(f"there is no text {path}; eval/texts has {known}, and --text takes a file.")
        found[name] = tokenizer(path.read_text(encoding="utf-8")).input_ids
    return found


def score_units(docs: dict[str, list[int]], contexts: list[int], limit: int) -> list[Unit]:
    """Per document one prompt of the longest context that it fills.

    Precision depends on positions only, so the shorter contexts are the first tokens of the
    same run; they are not computed again.

    Args:
        limit: tokens that the model takes; one is left for the token that vLLM generates.

    Raises:
        ValueError: no document is as long as the shortest context.
    """
    units = []
    for name, ids in docs.items():
        fitting = [n for n in contexts if n <= len(ids)]
        if fitting:
            n = min(max(fitting), limit - 1)
            units.append(unit("score", ids[:n], document=name, context=max(fitting)))
    if not units:
        longest = max(map(len, docs.values()))
        raise ValueError(f"no document fills {min(contexts)} tokens (the longest has {longest}); lower --contexts.")
    return units


def decode_units(docs: dict[str, list[int]], contexts: list[int], tokens: int, limit: int) -> list[Unit]:
    """Per document and context a prompt and the `tokens` that follow it, forced through decoding."""
    units = []
    for name, ids in docs.items():
        for n in contexts:
            n = min(n, limit)
            if tokens and tokens < n <= len(ids):
                units.append(unit("decode", ids[: n - tokens], ids[n - tokens : n], document=name, context=n))
    return units


def _answer_ids(tokenizer: Any, tail: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids of the question and of the answer as they are when written together."""
    plain = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    whole, question = plain(tail + answer), plain(tail)
    if whole[: len(question)] != question:  # a token spans the border: keep both as they are alone
        return question, plain(answer)
    return question, whole[len(question) :]


def needle_units(
    tokenizer: Any, kinds: list[str], contexts: list[int], depths: list[float], repeats: int, limit: int
) -> list[Unit]:
    """The grid of needles: kind x context x depth x repeat.

    passkey: a number in repeated filler; needle: a number in prose; multi: eight in prose, one
    asked for; cached: a needle in a prefix that another request has put into the prefix cache.
    The prompt with its answer fills the context exactly.
    """
    plain = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    start = tokenizer("").input_ids if tokenizer("").input_ids else []
    prose = plain((TEXTS / "prose.txt").read_text(encoding="utf-8"))
    filler = plain(FILLER * 40)
    units = []
    for kind in kinds:
        for context in contexts:
            for depth in depths:
                for repeat in range(repeats):
                    rng = random.Random(f"{kind} {context} {depth} {repeat}")
                    units.append(_needle(kind, min(context, limit), depth, rng, plain, start, prose, filler, tokenizer))
                    units[-1].update(context=context, depth=depth, repeat=repeat)
    return units


def _needle(kind, context, depth, rng, plain, start, prose, filler, tokenizer) -> Unit:  # noqa: ANN001
    number = lambda: str(rng.randrange(10000, 99999))
    if kind == "passkey":
        facts = [(depth, "the pass key", number())]
    else:
        cities = rng.sample(CITIES, 8 if kind == "multi" else 1)
        places = [depth, *(rng.random() for _ in cities[1:])]
        facts = [(place, f"the code of {city}", number()) for place, city in zip(places, cities, strict=True)]
    said = [(place, plain(f"\nNote: {what} is {n}. Remember, {what} is {n}.\n")) for place, what, n in facts]
    _, what, answer = facts[0]
    question, forced = _answer_ids(
        tokenizer, f"\n\nQuestion: What is {what}?\nAnswer: As noted, {what} is", f" {answer}"
    )
    room = context - len(start) - len(question) - len(forced) - sum(len(ids) for _, ids in said)
    if kind == "passkey":
        hay = (filler * (room // len(filler) + 1))[:room]
    else:
        offset = rng.randrange(max(1, len(prose) - room))
        hay = (prose[offset:] + prose)[:room]
    for place, ids in sorted(said, key=lambda fact: -fact[0]):
        cut = int(place * room)
        hay = hay[:cut] + ids + hay[cut:]
    prompt = [*start, *hay, *question]
    warm = [*start, *hay, *plain("\n\nQuestion: Who is")] if kind == "cached" else []
    return unit(kind, prompt, forced, warm[: context - 1])
