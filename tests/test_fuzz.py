# SPDX-License-Identifier: Apache-2.0
"""Whatever a user types into settings, `bie-plan` and `bie-serve --dry-run`: an answer or a sentence, no traceback."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_models import COMMON, config_only

from bie_vllm_plugin import plan, serve
from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.plan_units import GIB

FIELDS = ["sink_tokens", "recent_tokens", "group_size", "key_axis", "prefix_hits", "sinks", ""]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.sampled_from([0, 8, 32, 63, 64, 128, "channel", "head_dim", "strict", "relaxed"]),
)  # fmt: skip
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
NUMBERS = st.sampled_from(
    ["0", "1", "2", "16", "64", "4096", "-1", "-5", "1e3", "1.5", "1.5k", "4K", "infk", "nank", "inf", "nan", "auto",
     "", " ", "8GiB", "8 GiB", "-8GiB", "0GiB", "1e400GiB", "x", "0x10", "9" * 40, "٣", "1_000", "[1]", "{}", "null"]
) | st.integers(-(10**20), 10**20).map(str)  # fmt: skip
OBJECTS = st.one_of(
    st.just("{}"), st.just("[1]"), st.just("{"), JSON.map(lambda x: json.dumps({"int4_asym": x})),
    st.dictionaries(st.sampled_from(FIELDS), JSON).map(lambda x: json.dumps({"int4_asym": x})),
    JSON.map(lambda x: json.dumps({"method": "ngram", "num_speculative_tokens": x})),
)  # fmt: skip
WORDS = st.sampled_from(["int4_asym", "auto", "fp8", "fp8_e4m3", "int3", "", "bfloat16", "float32", "8gb", "0,1"])
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PLAN_FLAGS = {
    **dict.fromkeys(
        ["--vram", "--context", "--concurrency", "--tensor-parallel", "--chunked-prefill-size", "--max-num-seqs",
         "--block-size", "--kv-sink-tokens", "--kv-recent-tokens", "--kv-group-size", "--speculative-draft-tokens",
         "--pool", "--utilization", "--reserve", "--bandwidth", "--pcie"], NUMBERS,
    ),
    "--speculative-config": OBJECTS,
    **dict.fromkeys(["--card", "--weights", "--kv-cache-dtype", "--skip-layers"], WORDS | NUMBERS),
    **dict.fromkeys(["--json", "--markdown", "--cpu"], st.none()),
}  # fmt: skip
SERVE_FLAGS = {
    **dict.fromkeys(
        ["--kv-sink-tokens", "--kv-recent-tokens", "--kv-group-size", "--chunked-prefill-size", "--max-model-len",
         "--speculative-draft-tokens", "--paged-block-size", "--max-num-batched-tokens", "--max-num-seqs", "-tp",
         "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--block-size", "--port",
         "--kv-cache-dtype-skip-layers"], NUMBERS,
    ),
    **dict.fromkeys(["--profile", "--kv-cache-dtype", "--quantization", "--dtype", "--host"], WORDS),
    **dict.fromkeys(["--additional-config", "--speculative-config", "--hf-overrides"], OBJECTS),
    **dict.fromkeys(["--force", "--unknown-flag"], st.none()),
}  # fmt: skip


def command_lines(flags: dict) -> st.SearchStrategy[list[str]]:
    """Up to four flags with their values, written `--flag value` or `--flag=value`."""
    one = st.sampled_from(sorted(flags)).flatmap(
        lambda flag: st.tuples(flags[flag], st.booleans()).map(
            lambda pair: [flag] if pair[0] is None else [f"{flag}={pair[0]}"] if pair[1] else [flag, pair[0]]
        )
    )
    return st.lists(one, max_size=4).map(lambda parts: [word for part in parts for word in part])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    config = {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 64}
    return config_only(tmp_path_factory.mktemp("fuzz") / "model", **config, torch_dtype="bfloat16")


@QUICK
@given(JSON | st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_settings(raw):
    try:
        parsed = Int4AsymConfig.parse(raw)
    except ValueError as error:
        sentence = str(error)
        assert "int4_asym" in sentence and sentence.endswith(".") and "\n" not in sentence.strip(), sentence
    else:
        assert parsed.page_layout(128).page_bytes > 0 and Int4AsymConfig.parse(parsed.model_dump()) == parsed


def run_cli(main, argv: list[str], capsys, allowed: set[int]) -> None:
    """Exit status among `allowed`; an error is one or a few lines that name the program."""
    capsys.readouterr()
    try:
        status = main(argv)
    except SystemExit as exit_:  # --help
        status = exit_.code
    printed = capsys.readouterr()
    assert status in allowed, (argv, status)
    assert "Traceback" not in printed.out + printed.err
    if status == 2:
        assert printed.err.startswith("bie-") and printed.err.strip().endswith("."), printed.err


@QUICK
@given(command_lines(PLAN_FLAGS))
@example(["--vram", "1e400GiB"])
def test_plan(model, capsys, argv):
    run_cli(plan.main, [model, *argv], capsys, {0, 2, 3})


@QUICK
@given(command_lines(SERVE_FLAGS), st.sampled_from([4, 24, 0]))
@example(["--max-model-len", "infk"], 24)
@example(["--additional-config", '{"int4_asym": [1]}'], 24)
@example(["--kv-cache-dtype", "auto", "--additional-config", '{"int4_asym": []}'], 4)
@example(["--kv-cache-dtype", "auto", "--kv-group-size", "0"], 4)
@example(["--speculative-config", '{"num_speculative_tokens": "x"}'], 24)
def test_serve_dry_run(model, capsys, argv, gib):
    device = serve.Device("card" if gib else "CPU", (gib or 16) * GIB, (gib or 16) * GIB, not gib)
    run_cli(lambda words: serve.main(words, device), [model, *argv, "--dry-run"], capsys, {0, 2, 3})


@QUICK
@given(st.dictionaries(st.sampled_from(["kv-cache-dtype", "max-model-len", "additional-config", "block_size",
                                        "max-num-seqs", "tensor_parallel_size", "speculative-config", "port",
                                        "gpu-memory-utilization", "kv_cache_memory_bytes", "dtype", "",
                                        "kv-cache-dtype-skip-layers"]), JSON, max_size=4))  # fmt: skip
@example({"max-model-len": [1]})
def test_serve_config_files(model, tmp_path, capsys, content):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(content))
    device = serve.Device("card", 24 * GIB, 24 * GIB, False)
    argv = [model, "--config", str(path), "--dry-run"]
    run_cli(lambda words: serve.main(words, device), argv, capsys, {0, 2, 3})


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "head_dim", "num_key_value_heads",
                                   "model_type", "max_position_embeddings", "quantization_config", "layer_types"])
def test_model_configurations(model, tmp_path, capsys, field):  # fmt: skip
    """A config.json with a field missing or of the wrong kind."""
    good = json.loads(Path(model, "config.json").read_text())
    for value in (None, "x", -1, 0, [], {}, 1.5, 10**30, "MISSING"):
        config = {k: v for k, v in good.items() if k != field} if value == "MISSING" else {**good, field: value}
        folder = config_only(tmp_path / "m", **config)
        run_cli(plan.main, [folder, "--json"], capsys, {0, 2, 3})
