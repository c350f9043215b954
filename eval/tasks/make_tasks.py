# SPDX-License-Identifier: Apache-2.0
"""Makes the data of the offline lm-eval tasks from a fixed seed: `python eval/tasks/make_tasks.py`.

Each line of a .jsonl has `prompt` and `answer` (a string; for bie_json the JSON text). The files
are checked in; running this again must not change them.
"""
from __future__ import annotations

import json
import random
import string
from pathlib import Path

HERE = Path(__file__).parent
ITEMS = 500
NAMES = ("Ada", "Bo", "Chen", "Dara", "Emil", "Fay", "Gus", "Hana", "Ines", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "lamps", "nails", "pens", "shells", "stamps", "tiles")
TOWNS = ("Bergen", "Cusco", "Dakar", "Ghent", "Jaipur", "Kyoto", "Leeds", "Malaga", "Porto", "Turku")


def _sum(rng: random.Random) -> tuple[str, str, int]:
    """A word problem, its worked solution and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have, boxes, each, gone = rng.randint(5, 60), rng.randint(2, 9), rng.randint(3, 12), rng.randint(1, 20)
    total = have + boxes * each
    question = (
        f"{name} has {have} {thing}, buys {boxes} boxes of {each} {thing} and gives {gone} away. "
        f"How many {thing} are left?"
    )
    solution = (
        f"{boxes} boxes of {each} are {boxes * each}. {have} and {boxes * each} are {total}. "
        f"{total} minus {gone} is {total - gone}."
    )
    return question, solution, total - gone


def arithmetic(rng: random.Random) -> dict[str, str]:
    """Eight worked examples, then a problem: chain of thought."""
    shots = "".join(f"Question: {q}\nAnswer: {s} #### {a}\n\n" for q, s, a in (_sum(rng) for _ in range(8)))
    question, _, answer = _sum(rng)
    return {"prompt": f"{shots}Question: {question}\nAnswer:", "answer": str(answer)}


def _order(rng: random.Random) -> tuple[str, dict[str, object]]:
    record = {
        "id": "".join(rng.choices(string.ascii_uppercase + string.digits, k=8)),
        "customer": rng.choice(NAMES), "item": rng.choice(THINGS), "quantity": rng.randint(1, 99),
        "town": rng.choice(TOWNS), "express": rng.random() < 0.5,
    }  # fmt: skip
    text = (
        f"Order {record['id']}: {record['customer']} from {record['town']} wants {record['quantity']} "
        f"{record['item']}, {'by express' if record['express'] else 'by normal post'}."
    )
    return text, record


def json_by_schema(rng: random.Random) -> dict[str, str]:
    """Six orders written as JSON, then a seventh; the schema is in schema.json."""
    schema = (HERE / "schema.json").read_text()
    shots = "".join(f"Text: {text}\nJSON: {json.dumps(record)}\n\n" for text, record in (_order(rng) for _ in range(6)))
    text, record = _order(rng)
    prompt = f"Write each order as JSON by this schema:\n{schema}\n{shots}Text: {text}\nJSON:"
    return {"prompt": prompt, "answer": json.dumps(record)}


def retrieval(rng: random.Random) -> dict[str, str]:
    """Forty pairs of key and value, one of them asked for."""
    keys = rng.sample(range(1000, 9999), 40)
    pairs = [(f"key-{key}", "".join(rng.choices(string.digits, k=6))) for key in keys]
    lines = "\n".join(f"{key}: {value}" for key, value in pairs)
    key, value = rng.choice(pairs)
    return {"prompt": f"{lines}\n\nThe value of a key is repeated below.\n{key}:", "answer": value}


def copy(rng: random.Random) -> dict[str, str]:
    """Twelve long identifiers, one of them to be copied by its line number."""
    ids = ["-".join("".join(rng.choices("0123456789abcdef", k=4)) for _ in range(8)) for _ in range(12)]
    wanted = rng.randrange(12)
    lines = "\n".join(f"{i + 1}. {text}" for i, text in enumerate(ids))
    return {"prompt": f"{lines}\n\nCopies of some of the lines above:\n{wanted + 1}.", "answer": ids[wanted]}


def main() -> None:
    makers = {"arithmetic": arithmetic, "json": json_by_schema, "retrieval": retrieval, "copy": copy}
    for name, make in makers.items():
        rng = random.Random(f"bie {name}")
        lines = [json.dumps(make(rng)) for _ in range(ITEMS)]
        (HERE / f"bie_{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
