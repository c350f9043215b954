# SPDX-License-Identifier: Apache-2.0
"""`bie-plan`: worked examples, weights, verdicts, errors, JSON, speed of the ceiling, the command line."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bie_vllm_plugin import plan
from bie_vllm_plugin.config import Int4AsymConfig
from bie_vllm_plugin.plan_formats import FORMATS, refusal
from bie_vllm_plugin.plan_model import load_model, parse_config
from bie_vllm_plugin.plan_report import as_json
from bie_vllm_plugin.plan_units import GIB, KIB, MIB, PlanError, binary, both, parse_bytes, parse_rate
from bie_vllm_plugin.plan_weights import count_parameters, weigh

MODELS = Path(__file__).parent / "plan_models"
LLAMA_8B, LLAMA_70B = str(MODELS / "Llama-3.1-8B"), str(MODELS / "Llama-3.1-70B")


def planned(*argv: str) -> dict:
    """The JSON of a command line."""
    return as_json(plan.plan_of(list(argv)))


# -- worked examples ----------------------------------------------------------------------
def test_llama_8b_per_token_and_at_64k() -> None:
    figures = planned(LLAMA_8B, "--context", "65536")["formats"]
    expected = {"bf16": (128, 8.0), "fp8": (64, 4.0), "int4_asym": (36, 2.25)}
    for name, (kib, gib) in expected.items():
        assert figures[name]["bytes_per_token"] == kib * KIB
        assert figures[name]["nominal_bytes"] == gib * GIB
    assert figures["bf16"]["bytes_per_sequence"] == 8 * GIB
    assert figures["fp8"]["bytes_per_sequence"] == 4 * GIB
    # As allocated int4_asym takes its 16-bit window besides: 1 sink page and 13 of the recent window, a block each.
    assert figures["int4_asym"]["bytes_per_sequence"] == (65536 // 64 + 14) * 64 * 36 * KIB


def test_two_to_the_33_elements() -> None:
    figures = planned(LLAMA_8B, "--concurrency", "16", "--context", "8192")["formats"]
    assert figures["bf16"]["nominal_bytes"] // 2 == 2**33
    nominal = {"bf16": 16.0, "fp8": 8.0, "int8_per_token_head": 8.125, "nvfp4": 4.5, "mxfp4": 4.25}
    for name, gib in nominal.items():
        assert figures[name]["nominal_bytes"] == gib * GIB, name
    allocated = {"bf16": 16.0, "fp8": 8.0, "int8_per_token_head": 8.25, "nvfp4": 4.5}
    for name, gib in allocated.items():
        assert figures[name]["allocated_bytes"] == gib * GIB, name


def test_sessions_of_a_20_gib_pool() -> None:
    figures = planned(LLAMA_8B, "--pool", "20GiB", "--context", "8192")["formats"]
    for name, sessions in {"bf16": 20, "fp8": 40, "nvfp4": 71}.items():
        assert figures[name]["nominal_sessions"] == sessions
        assert int(figures[name]["vllm_max_concurrency"]) == sessions  # as vLLM logs it
    # vLLM's figure counts the null block; one session less runs without preemption where it divides exactly.
    assert [figures[name]["max_concurrency"] for name in ("bf16", "fp8", "nvfp4")] == [19, 39, 71]


def test_llama_70b_batch() -> None:
    figures = planned(LLAMA_70B, "--concurrency", "32", "--context", "4096")["formats"]
    assert figures["bf16"]["allocated_bytes"] == figures["bf16"]["nominal_bytes"] == 40 * GIB
    assert figures["fp8"]["allocated_bytes"] == figures["fp8"]["nominal_bytes"] == 20 * GIB


def test_128k_on_24_gb() -> None:
    line = [LLAMA_8B, "--vram", "24GiB", "--context", "131072", "--kv-cache-dtype", "fp8"]
    assert not planned(*line)["fits"]
    assert planned(*line)["formats"]["fp8"]["fits"] is False
    assert planned(*line, "--weights", "fp8")["fits"]


# -- drafters -----------------------------------------------------------------------------
def _head(folder: Path, **changes: object) -> str:
    """A drafter's config for Llama-3.1-8B, an EAGLE-3 head's if nothing is changed."""
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "draft_vocab_size": 32000,
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _speculate(**config: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


def test_a_drafter_costs_weights_and_pages(tmp_path: Path) -> None:
    head = _head(tmp_path / "head")
    plain = planned(LLAMA_8B, "--vram", "24GiB")
    drafted = planned(LLAMA_8B, "--vram", "24GiB", *_speculate(method="eagle3", model=head, num_speculative_tokens=3))
    # Projection of three states, attention on state and embedding, MLP, its own lm_head; the embedding is shared.
    own = 3 * 4096**2 + 8192 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 32000 * 4096
    assert drafted["drafter_bytes"] == pytest.approx(2 * own, rel=1e-3)
    assert drafted["weights_bytes"] == plain["weights_bytes"] + drafted["drafter_bytes"]
    for name, extra in {"bf16": 4096, "fp8": 2048, "int4_asym": 4096}.items():  # int4_asym leaves it in 16 bits
        before, after = (one["formats"][name]["bytes_per_token"] for one in (plain, drafted))
        assert after == before + extra
    # A page of the window is as wide as a block: 32 bodies and the head's dense page; R grew by 3 drafts and 64.
    pages = 65536 // 64 + 1 + -(-(128 + 3 + 63 + 64 + 2 * 7 - 1) // 16) + 1
    assert drafted["formats"]["int4_asym"]["bytes_per_sequence"] == pages * 64 * (36864 + 4096)
    assert drafted["formats"]["int4_asym"]["max_tokens_per_second"] < plain["formats"]["int4_asym"][
        "max_tokens_per_second"]  # fmt: skip
    assert any("yields 1 to 4 tokens" in note for note in drafted["notes"])
    again = planned(LLAMA_8B, "--speculative-draft-tokens", "3")
    assert again == planned(LLAMA_8B, *_speculate(method="ngram", num_speculative_tokens=3))
    assert again["drafter_bytes"] == 0


def test_a_draft_model_by_its_files(tmp_path: Path) -> None:
    draft = _head(tmp_path / "draft", num_hidden_layers=4)
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"x" * 12345)
    figures = planned(LLAMA_8B, *_speculate(model=draft, num_speculative_tokens=5))
    assert figures["drafter_bytes"] == 12345
    assert figures["formats"]["bf16"]["bytes_per_token"] == 36 * 4096
    two = planned(LLAMA_8B, "--tensor-parallel", "2", *_speculate(model=draft, num_speculative_tokens=5))
    assert two["formats"]["bf16"]["bytes_per_token"] == 18 * 4096


def test_mtp_modules_are_in_the_checkpoint(tmp_path: Path) -> None:
    mimo = {
        "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151680,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mimo))
    plain, drafted = planned(str(tmp_path)), planned(str(tmp_path), *_speculate(method="mtp"))
    assert drafted["drafter_bytes"] / 2 == pytest.approx(4096 * (2 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 11008), rel=1e-3)
    assert drafted["formats"]["bf16"]["bytes_per_token"] == plain["formats"]["bf16"]["bytes_per_token"] * 37 // 36
    (tmp_path / "model.safetensors").write_bytes(b"x" * 54321)
    assert planned(str(tmp_path), *_speculate(method="mtp"))["weights_bytes"] == 54321


def test_drafters_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    head = _head(tmp_path / "head")
    odd = _head(tmp_path / "odd", num_attention_heads=12, num_key_value_heads=3)
    wrong = _head(tmp_path / "wrong", draft_vocab_size="many")
    foreign = _head(tmp_path / "foreign", speculators_config={})
    k = {"num_speculative_tokens": 3}
    for arguments, message in (
        (("--speculative-config", "3"), "is not a JSON object"),
        (_speculate(**k), "needs a model"),
        (_speculate(method=[], **k), "does not compute method []"),
        (_speculate(method="medusa", model=head, **k), "does not compute method 'medusa'"),
        (_speculate(method="eagle3", model=head), "num_speculative_tokens=None must be a number of drafts"),
        (_speculate(method="eagle3", model=head, parallel_drafting=True, **k), "does not compute parallel_drafting"),
        (_speculate(method="eagle3", model=head, quantization="awq", **k), "quantization='awq'"),
        (_speculate(method="eagle3", model=head, kv_cache_dtype="nf4", **k), "kv_cache_dtype='nf4' is not planned"),
        (_speculate(model=head, draft_tensor_parallel_size=2, **k), "draft_tensor_parallel_size=2 differs"),
        ((*_speculate(model=odd, **k), "--tensor-parallel", "4"), "of the draft model"),
        (_speculate(method="eagle3", model=wrong, **k), "not as bie-plan knows them"),
        (_speculate(model=foreign, **k), "speculators library"),
        (_speculate(model=str(tmp_path / "none"), **k), "does not exist"),
        (_speculate(method="mtp"), "has no MTP modules"),
        ((*_speculate(method="ngram", **k), "--speculative-draft-tokens", "3"), "say the same twice"),
    ):
        assert plan.main([LLAMA_8B, *arguments]) == plan.EXIT_ERROR
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1 and err.startswith("bie-plan: ")
    # What int4_asym alone does not serve leaves the other formats planned.
    windowed = _head(tmp_path / "windowed", model_type="mistral", sliding_window=512)
    for arguments, message in (
        (_speculate(model=windowed, **k), "with full attention only"),
        (_speculate(model=head, kv_cache_dtype="fp8", **k), "in full precision"),
    ):
        formats = planned(LLAMA_8B, *arguments)["formats"]
        assert message in formats["int4_asym"]["reason"] and formats["fp8"]["supported"]
    gemma = planned(str(MODELS / "Gemma-3-4B"), *_speculate(model=head, **k))["formats"]
    assert "beside sliding windows" in gemma["int4_asym"]["reason"] and gemma["bf16"]["supported"]


# -- weights ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B", 8.030),
        ("Llama-3.1-70B", 70.55),
        ("Mistral-7B-v0.3-AWQ", 7.248),
        ("Qwen2.5-7B-Instruct-AWQ", 7.616),
        ("Qwen3-8B-AWQ", 8.191),
        ("Gemma-3-4B", 4.300),
    ],
)
def test_parameters_are_the_published_number(name: str, billions: float) -> None:
    count = count_parameters(load_model(str(MODELS / name)))
    assert count.total / 1e9 == pytest.approx(billions, rel=1e-3)


def test_awq_keeps_its_embeddings_in_16_bits() -> None:
    weights = weigh(load_model(str(MODELS / "Llama-3.1-8B-Instruct-AWQ")), "auto", 1)
    assert weights.total / GIB == pytest.approx(5.4, rel=0.02)  # and not 4.25
    assert weights.kind == "awq 4-bit"


def test_index_wins_over_shapes(tmp_path: Path) -> None:
    config = (MODELS / "Llama-3.1-8B" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16_060_522_240}}))
    figures = planned(str(tmp_path))
    assert figures["weights_bytes"] == 16_060_522_240
    assert "index" in figures["weights_source"]
    # A chosen precision is computed from the shapes all the same.
    assert planned(str(tmp_path), "--weights", "int4")["weights_bytes"] < 6 * GIB
    assert planned(str(tmp_path / "config.json"))["weights_bytes"] == 16_060_522_240


@pytest.mark.engine
def test_shapes_agree_with_a_real_models_file(smollm2: str) -> None:
    """The weights by the config's shapes are within 2 % of the file that vLLM loads (measured: 0.01 %)."""
    model = load_model(smollm2)
    assert model.index_bytes is not None
    by_shape = 2 * count_parameters(model).total
    assert by_shape == pytest.approx(model.index_bytes, rel=0.02)
    assert weigh(model, "auto", 1).total == model.index_bytes


def test_fp32_checkpoints_are_loaded_in_16_bits(tmp_path: Path) -> None:
    config = json.loads((MODELS / "Llama-3.1-8B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 4_000_000}}))
    assert planned(str(tmp_path))["weights_bytes"] == 2_000_000
    assert weigh(load_model(str(tmp_path), itemsize=4), "auto", 1).total == 4_000_000


def test_weights_of_files_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODELS / "Llama-3.1-8B" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"x" * 12345)
    assert planned(str(tmp_path))["weights_bytes"] == 12345


def test_tensor_parallel_shares_heads_and_weights() -> None:
    one, two = planned(LLAMA_8B), planned(LLAMA_8B, "--tensor-parallel", "2")
    for name in ("bf16", "int4_asym"):
        assert two["formats"][name]["bytes_per_token"] * 2 == one["formats"][name]["bytes_per_token"]
    assert two["weights_bytes"] == pytest.approx(one["weights_bytes"] / 2, rel=0.001)
    sixteen = planned(LLAMA_70B, "--tensor-parallel", "16")  # 8 KV heads: one per GPU, each on two
    assert sixteen["formats"]["bf16"]["bytes_per_token"] == planned(LLAMA_70B)["formats"]["bf16"]["bytes_per_token"] / 8


def test_mixture_of_experts_reads_only_chosen_experts() -> None:
    mixtral = parse_config(
        "mixtral",
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
            "num_experts_per_tok": 2, "tie_word_embeddings": False, "sliding_window": None,
        },
    )  # fmt: skip
    count = count_parameters(mixtral)
    assert count.total / 1e9 == pytest.approx(46.70, rel=1e-3)
    active = count.total - count.experts + count.active_experts
    assert active / 1e9 == pytest.approx(12.88, rel=2e-3)
    weights = weigh(mixtral, "auto", 1)
    assert weights.per_step == pytest.approx(2 * (active - count.embedding), rel=1e-6)


def test_deepseek_v3_is_671_billion() -> None:
    deepseek = parse_config("deepseek", DEEPSEEK)
    assert count_parameters(deepseek).total / 1e9 == pytest.approx(671.0, rel=0.002)


# -- layers -------------------------------------------------------------------------------
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "max_position_embeddings": 163840,
}  # fmt: skip


def test_mla_caches_one_latent_vector(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    figures = planned(str(tmp_path), "--block-size", "64", "--kv-cache-dtype", "fp8")
    assert figures["formats"]["bf16"]["bytes_per_token"] == 61 * 576 * 2
    assert figures["formats"]["fp8"]["bytes_per_token"] == 61 * 576
    ours = figures["formats"]["int4_asym"]
    assert not ours["supported"] and "MLA" in ours["reason"]
    refused = planned(str(tmp_path), "--vram", "2000GiB")
    assert not refused["fits"]
    assert refused["sentence"].startswith("Does not fit: int4_asym does not serve latent attention (MLA)")


def test_gemma_keeps_its_sliding_layers() -> None:
    model = load_model(str(MODELS / "Gemma-3-4B"))
    kinds = [layer.kind for layer in model.layers]
    assert kinds.count("sliding") == 29 and kinds.count("full") == 5 and kinds[5] == "full"
    assert model.max_context == 131072
    figures = planned(str(MODELS / "Gemma-3-4B"))
    assert figures["formats"]["bf16"]["bytes_per_token"] == 5 * 4 * 256 * 4  # only full layers grow
    assert figures["formats"]["int4_asym"]["bytes_per_token"] == 5 * 4 * 256 * 2 * 36 // 64
    assert any("slide over 1,024" in note for note in figures["notes"])


def _layers(**config: object) -> list[str]:
    base = {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 512,
        "intermediate_size": 512,
    }  # fmt: skip
    return [layer.kind for layer in parse_config("m", {**base, **config}).layers]


def test_which_layers_slide() -> None:
    assert _layers(model_type="mistral", sliding_window=4096) == ["sliding"] * 4
    assert _layers(model_type="qwen2", sliding_window=64, use_sliding_window=False) == ["full"] * 4
    qwen = _layers(model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3)
    assert qwen == ["full"] * 3 + ["sliding"]
    assert _layers(model_type="gemma2", sliding_window=64) == ["sliding", "full"] * 2
    assert _layers(model_type="llama", num_kv_shared_layers=1) == ["full"] * 3
    jamba = _layers(
        model_type="jamba", attn_layer_period=4, attn_layer_offset=2, mamba_expand=2, mamba_d_state=16, mamba_d_conv=4
    )
    assert jamba == ["state", "state", "full", "state"]


def test_refusals_follow_the_plugins_checks() -> None:
    """Head sizes, learnable sinks and image prefixes as `checks.py` has them."""
    base = {
        "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 512, "intermediate_size": 512,
    }  # fmt: skip
    fmt, settings = FORMATS["int4_asym"], Int4AsymConfig()
    assert "learnable attention sinks" in refusal(parse_config("m", {**base, "model_type": "gpt_oss"}), fmt, settings)
    odd = parse_config("m", {**base, "model_type": "llama", "head_dim": 72})
    assert refusal(odd, fmt, settings) == "int4_asym does not serve head size 72"
    assert not refusal(odd, FORMATS["fp8"], settings)
    gemma = planned(str(MODELS / "Gemma-3-4B"), "--weights", "int4")
    assert any("--language-model-only" in note for note in gemma["notes"])


def test_hybrids_hold_a_state_of_fixed_size(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 1000, "intermediate_size": 512,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    short, long = (planned(str(tmp_path), "--context", n)["formats"] for n in ("4096", "65536"))
    assert short["bf16"]["bytes_per_token"] == 2 * 256 * 4
    growth = long["bf16"]["bytes_per_sequence"] - short["bf16"]["bytes_per_sequence"]
    assert growth == pytest.approx((65536 - 4096) * 2048, rel=0.02)
    assert "recurrent" in short["int4_asym"]["reason"]


# -- verdicts -----------------------------------------------------------------------------
def test_sentences_name_the_cheapest_change() -> None:
    awq = str(MODELS / "Llama-3.1-8B-Instruct-AWQ")
    small = planned(awq)
    assert small["sentence"].startswith("Does not fit: 65,536 tokens with int4_asym need 8.46 GiB")
    assert small["changes"][0].startswith("--context ")
    assert any("a card with" in change for change in small["changes"])
    longest = small["changes"][0].split()[1]
    assert planned(awq, "--context", longest)["fits"]
    assert not planned(awq, "--context", str(int(longest) + 64))["fits"]
    assert small["missing_bytes"] > 0 == planned(awq, "--vram", "12GiB")["missing_bytes"]

    heavier = planned(awq, "--kv-cache-dtype", "bf16", "--context", "32768")
    assert heavier["changes"][0] == "--kv-cache-dtype int4_asym"
    big_chunk = planned(awq, "--context", "32768", "--chunked-prefill-size", "8192")
    assert big_chunk["changes"][0].startswith("--chunked-prefill-size")
    assert planned(awq, "--context", "32768", "--chunked-prefill-size", "512")["fits"]


def test_memory_adds_up() -> None:
    figures = planned(str(MODELS / "Mistral-7B-v0.3-AWQ"), "--reserve", "600MiB")
    assert figures["cuda_context_bytes"] == 600 * MIB
    pool = figures["formats"]["int4_asym"]["pool_bytes"]
    parts = figures["weights_bytes"] + figures["cuda_context_bytes"] + figures["activation_bytes"] + pool
    assert parts == figures["budget_bytes"] == int(8 * GIB * 0.92)
    assert any("made for 32,768" in note for note in figures["notes"])


def test_max_context_is_the_largest() -> None:
    for name in ("Llama-3.1-8B-Instruct-AWQ", "Gemma-3-4B"):
        base = [str(MODELS / name), "--vram", "16GiB", "--concurrency", "3"]
        for fmt in ("bf16", "int4_asym", "turboquant_4bit_nc"):
            most = planned(*base, "--kv-cache-dtype", fmt)["formats"][fmt]["max_context"]
            line = [*base, "--kv-cache-dtype", fmt, "--context"]
            assert planned(*line, str(most))["fits"]
            assert not planned(*line, str(most + 1))["fits"]


def test_turboquant_keeps_boundary_layers() -> None:
    figures = planned(LLAMA_8B)["formats"]["turboquant_4bit_nc"]
    slot = 64 + 2 + 64 + 4  # packed keys and norm, packed values, scale and zero
    assert figures["bytes_per_token"] == 28 * 8 * slot + 4 * 8 * 512
    assert figures["nominal_bytes_per_token"] == 32 * 8 * slot


def test_skipped_layers_cost_16_bits() -> None:
    plain, skipped = planned(LLAMA_8B), planned(LLAMA_8B, "--skip-layers", "0,31")
    difference = 2 * 8 * (512 - 144)
    fmt = "int4_asym"
    assert skipped["formats"][fmt]["bytes_per_token"] - plain["formats"][fmt]["bytes_per_token"] == difference


# -- speed --------------------------------------------------------------------------------
def test_ceiling_and_cliff() -> None:
    figures = planned(LLAMA_8B, "--card", "rtx-4090", "--context", "8192", "--kv-cache-dtype", "bf16")
    weights_read = figures["weights_bytes"] - 128256 * 4096 * 2  # of the embedding one row
    expected = 1008e9 / (weights_read + 8192 * 128 * KIB)
    assert figures["formats"]["bf16"]["max_tokens_per_second"] == pytest.approx(expected, abs=0.01)
    assert figures["formats"]["int4_asym"]["max_tokens_per_second"] > expected
    rows = {row["bytes"]: row["max_tokens_per_second"] for row in figures["spill"]}
    seconds = (weights_read + 8192 * 128 * KIB - GIB) / 1008e9 + GIB / 31.5e9
    assert rows[GIB] == pytest.approx(1 / seconds, abs=0.01)
    assert rows[0] > rows[256 * MIB] > rows[GIB]
    slow = planned(LLAMA_8B, "--bandwidth", "100GB/s", "--context", "8192")
    assert slow["bandwidth_bytes_per_second"] == 1e11


# -- units --------------------------------------------------------------------------------
def test_units() -> None:
    assert parse_bytes("8GiB", "x") == parse_bytes("8", "x") == parse_bytes("8192 MiB", "x") == 8 * GIB
    assert parse_bytes("8.6GB", "x") == 8_600_000_000
    assert parse_rate("1008", "x") == parse_rate("1008GB/s", "x") == 1.008e12
    assert binary(2.25 * GIB) == "2.25 GiB" and both(2.25 * GIB) == "2.25 GiB (2.42 GB)"
    assert binary(36 * KIB) == "36.00 KiB" and binary(12) == "12 B"
    for bad in ("", "-1GiB", "0", "8XB", "GiB"):
        with pytest.raises(PlanError, match="--vram"):
            parse_bytes(bad, "--vram")


# -- command line -------------------------------------------------------------------------
BAD = [
    (["/no/such/folder"], "/no/such/folder does not exist"),
    (["missing.json"], "missing.json does not exist"),
    ([LLAMA_8B, "--vram", "8XB"], "--vram '8XB' is not a size"),
    ([LLAMA_8B, "--card", "voodoo2"], "--card voodoo2 is not in the table"),
    ([LLAMA_8B, "--card", "l4", "--vram", "8"], "leave one out"),
    ([LLAMA_8B, "--context", "0"], "--context"),
    ([LLAMA_8B, "--context", "many"], "--context"),
    ([LLAMA_8B, "--weights", "int3"], "--weights"),
    ([LLAMA_8B, "--kv-cache-dtype", "int2"], "--kv-cache-dtype int2 is not planned"),
    ([LLAMA_8B, "--utilization", "1.5"], "--utilization 1.5"),
    ([LLAMA_8B, "--tensor-parallel", "3"], "--tensor-parallel 3 does not divide"),
    ([LLAMA_8B, "--skip-layers", "40"], "--skip-layers 40"),
    ([LLAMA_8B, "--skip-layers", "first"], "--skip-layers first"),
    ([LLAMA_8B, "--kv-recent-tokens", "10"], "recent_tokens=10"),
    ([LLAMA_8B, "--kv-group-size", "48"], "group_size=48"),
    ([LLAMA_8B, "--bandwidth", "fast"], "--bandwidth 'fast'"),
    ([LLAMA_8B, "--plot", "/no/such/folder/x.png"], "--plot /no/such/folder/x.png"),
    ([LLAMA_8B, "--nonsense"], "--nonsense"),
    ([], "MODEL"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(argv[-2:])[-30:] or "none" for argv, _ in BAD])
def test_bad_input_is_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert plan.main(argv) == plan.EXIT_ERROR
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and message in err and err.startswith("bie-plan: ")


def test_unknown_configs_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    for config, message in (
        ({"a": 1}, "not a model's config.json"),
        ({**base, "model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({**base, "model_type": "rwkv"}, "rwkv"),
        ({**base, "model_type": "gemma4_text"}, "gemma4_text"),
        ({**base, "model_type": "x", "num_key_value_heads": [1, 2]}, "not as bie-plan knows it"),
        ({**base, "model_type": "x", "layer_types": ["chunked_attention"] * 2}, "no 'attention_chunk_size'"),
        ({**base, "model_type": "x", "layer_types": ["spiral", "spiral"]}, "'spiral'"),
        ({"model_type": "unheard_of", "hidden_size": 64}, "has no num_hidden_layers"),
        ({**base, "model_type": "llama", "quantization_config": {"quant_method": "quip"}}, "'quip'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert plan.main([str(tmp_path)]) == plan.EXIT_ERROR
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    (tmp_path / "config.json").write_text("{")
    assert plan.main([str(tmp_path)]) == plan.EXIT_ERROR
    assert "cannot be read as JSON" in capsys.readouterr().err


def test_hub_failures_are_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    assert plan.main(["some/model"]) == plan.EXIT_ERROR
    err = capsys.readouterr().err
    assert "some/model" in err and "(no route)" in err and err.count("\n") == 1

    def offline(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("An error happened.\nPlease check.")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    assert plan.main(["some/model"]) == plan.EXIT_ERROR
    assert "(the Hub cannot be reached and nothing is cached)" in capsys.readouterr().err


def test_hub_fetches_config_and_index_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    fetched = []
    (tmp_path / "config.json").write_text((MODELS / "Llama-3.1-8B" / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 123456789}}))

    def download(repo: str, name: str) -> str:
        fetched.append((repo, name))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert planned("meta-llama/Llama-3.1-8B")["weights_bytes"] == 123456789
    assert fetched == [
        ("meta-llama/Llama-3.1-8B", "config.json"),
        ("meta-llama/Llama-3.1-8B", "model.safetensors.index.json"),
    ]


def test_json_is_stable(capsys: pytest.CaptureFixture) -> None:
    assert plan.main([LLAMA_8B, "--json", "--vram", "40GiB"]) == plan.EXIT_FITS
    figures = json.loads(capsys.readouterr().out)
    assert figures["version"] == 1 and figures["fits"] is True
    assert set(figures["formats"]) == set(FORMATS)
    keys = {"bytes_per_token", "bytes_per_sequence", "max_context", "fits", "max_concurrency", "allocated_bytes"}
    assert all(keys <= set(fmt) for fmt in figures["formats"].values())
    assert {"weights_bytes", "sentence", "changes", "activation_bytes", "cuda_context_bytes"} <= set(figures)


def test_exit_status_and_tables(capsys: pytest.CaptureFixture) -> None:
    assert plan.main([LLAMA_8B]) == plan.EXIT_DOES_NOT_FIT
    out = capsys.readouterr().out
    for text in ("14.96 GiB (16.06 GB)", "int8_per_token_head", "not in vLLM 0.32", "Does not fit:", "tokens/s"):
        assert text in out
    assert "…" not in out  # no figure is cut off
    assert plan.main([str(MODELS / "Qwen3-8B-AWQ"), "--markdown"]) == plan.EXIT_DOES_NOT_FIT
    assert capsys.readouterr().out.startswith("| ")


def test_the_readmes_table_is_the_planners() -> None:
    """Every row of "what fits in 8 GB" is what bie-plan prints today."""
    from bie_vllm_plugin.plan_report import markdown_header, markdown_row

    text = (Path(__file__).parent.parent / "configs" / "README.md").read_text()
    profile = ["--vram", "8GiB", "--context", "65536", "--chunked-prefill-size", "512", "--max-num-seqs", "4"]
    names = ("Mistral-7B-v0.3", "Qwen2.5-7B-Instruct", "Llama-3.1-8B-Instruct", "Qwen3-8B")
    plans = [plan.plan_of([str(MODELS / f"{name}-AWQ"), *profile]) for name in names]
    plans.append(plan.plan_of([str(MODELS / "Gemma-3-4B"), *profile]))
    plans.append(plan.plan_of([str(MODELS / "Gemma-3-4B"), "--weights", "int4", *profile]))
    assert markdown_header(plans[0]) in text
    for one in plans:
        assert markdown_row(one) in text


def test_eight_gb_script_plans_the_profile() -> None:
    """The GPU script's planning half runs anywhere; 64k of the Mistral shape fit its budget."""
    script = Path(__file__).parent.parent / "eval" / "fit_8gb.py"
    done = subprocess.run([sys.executable, str(script), "--plan-only"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{") :])["plan"]
    parts = ("weights_bytes", "cuda_context_bytes", "activation_bytes", "pool_bytes")
    assert sum(figures[part] for part in parts) == int(8192 * MIB * 0.92)
    assert figures["kv_cache_tokens"] > 65536


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert plan.main([str(MODELS / "Mistral-7B-v0.3-AWQ"), "--plot", str(picture)]) == plan.EXIT_FITS
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_help_fits_a_screen_and_starts_without_torch() -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from bie_vllm_plugin import plan\n"
        "try:\n    plan.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'matplotlib', 'triton'} & set(sys.modules)\n"
        "print(heavy, time.process_time() - start, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    heavy, seconds = done.stderr.rsplit(" ", 1)
    assert heavy == "set()" and float(seconds) < 2
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; from bie_vllm_plugin import plan; plan.main([{LLAMA_8B!r}, '--json']); "
         "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0
