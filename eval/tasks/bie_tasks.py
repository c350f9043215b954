# SPDX-License-Identifier: Apache-2.0
"""Loaders and scoring of the offline tasks, called by lm-eval through the YAML files."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def _load(name: str) -> dict[str, Any]:
    import datasets

    lines = (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def load_arithmetic(**_: Any) -> dict[str, Any]:
    return _load("bie_arithmetic")


def load_json(**_: Any) -> dict[str, Any]:
    return _load("bie_json")


def load_retrieval(**_: Any) -> dict[str, Any]:
    return _load("bie_retrieval")


def load_copy(**_: Any) -> dict[str, Any]:
    return _load("bie_copy")


def score_text(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Exact match of the first line."""
    lines = results[0].strip().splitlines() or [""]
    return {"acc": float(lines[0].strip() == doc["answer"])}


def score_arithmetic(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """The number after ####, else the last number."""
    found = re.search(r"####\s*(-?\d+)", results[0])
    numbers = [found.group(1)] if found else re.findall(r"-?\d+", results[0])
    return {"acc": float(bool(numbers) and numbers[-1] == doc["answer"])}


def score_json(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """acc: valid by the schema and equal to the answer; valid: by the schema alone."""
    import jsonschema

    try:
        value = json.loads(results[0].strip().splitlines()[0])
        jsonschema.validate(value, json.loads((HERE / "schema.json").read_text()))
    except (ValueError, IndexError, jsonschema.ValidationError):
        return {"acc": 0.0, "valid": 0.0}
    return {"acc": float(value == json.loads(doc["answer"])), "valid": 1.0}
