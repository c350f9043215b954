# SPDX-License-Identifier: Apache-2.0
"""`bie-serve`: flags and profiles, refusals, and a real server answering the `openai` client on a CPU."""
from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from live_server import Server, free_port

from bie_vllm_plugin import serve
from bie_vllm_plugin.plan_units import GIB, PlanError
from bie_vllm_plugin.serve_args import PROFILES, config_path, profile_for, read
from bie_vllm_plugin.serve_run import ServerLog

MODELS = Path(__file__).parent / "plan_models"
MISTRAL, LLAMA_AWQ, LLAMA_70B = (
    str(MODELS / name) for name in ("Mistral-7B-v0.3-AWQ", "Llama-3.1-8B-Instruct-AWQ", "Llama-3.1-70B")
)
CARD_8 = serve.Device("NVIDIA GeForce RTX 4060", 8 * GIB, 8 * GIB, False)
CARD_24 = serve.Device("NVIDIA GeForce RTX 4090", 24 * GIB, 24 * GIB, False)
CPU = serve.Device("CPU", 32 * GIB, 24 * GIB, True)


def dry(capsys: pytest.CaptureFixture, device: serve.Device, *argv: str) -> tuple[list[str], str]:
    """The vLLM command line that a bie-serve line makes, and what was said on stderr."""
    assert serve.main([*argv, "--dry-run"], device) == 0
    out, err = capsys.readouterr()
    return shlex.split(out), err


def value(command: list[str], flag: str) -> str:
    """What follows the last `flag`, as argparse would read it."""
    return command[len(command) - command[::-1].index(flag)]


# -- flags ----------------------------------------------------------------------------------
def test_short_flags_become_vllms(capsys: pytest.CaptureFixture) -> None:
    command, err = dry(
        capsys, CARD_24, LLAMA_AWQ, "--profile", "8gb", "--kv-sink-tokens", "4", "--kv-recent-tokens", "256",
        "--kv-group-size", "32", "--chunked-prefill-size", "1024", "--speculative-draft-tokens", "3",
        "--paged-block-size", "64", "--port", "9000", "--max-model-len", "16384", "--served-model-name", "a", "b",
    )  # fmt: skip
    assert json.loads(value(command, "--additional-config")) == {
        "int4_asym": {
            "sink_tokens": 4, "recent_tokens": 256, "group_size": 32, "key_axis": "channel", "prefix_hits": "relaxed"
        }
    }  # fmt: skip
    assert value(command, "--max-num-batched-tokens") == "1024"
    assert value(command, "--block-size") == "64"
    speculation = json.loads(value(command, "--speculative-config"))
    assert speculation["method"] == "ngram" and speculation["num_speculative_tokens"] == 3
    assert value(command, "--config").endswith("configs/8gb.yaml")
    # Every other flag goes on unchanged, in order, and after the config so that it wins.
    tail = ["--port", "9000", "--max-model-len", "16384", "--served-model-name", "a", "b"]
    assert command[-len(tail) :] == tail
    assert "Fits: 16,384 tokens" in err


def test_draft_model_when_named(capsys: pytest.CaptureFixture) -> None:
    command, _ = dry(
        capsys, CARD_24, LLAMA_AWQ, "--max-model-len", "4096", "--speculative-draft-tokens", "2",
        "--speculative-draft-model", LLAMA_AWQ,
    )  # fmt: skip
    assert json.loads(value(command, "--speculative-config")) == {"model": LLAMA_AWQ, "num_speculative_tokens": 2}


def test_profile_follows_the_card(capsys: pytest.CaptureFixture) -> None:
    assert [profile_for(gib * GIB) for gib in (4, 8, 11, 12, 16, 24, 32, 48, 141)] == [
        "8gb", "8gb", "8gb", "12gb", "16gb", "24gb", "24gb", "server", "server"
    ]  # fmt: skip
    assert profile_for(8188 << 20) == "8gb" and profile_for(23028 << 20) == "24gb"  # as drivers report them
    command, _ = dry(capsys, CARD_24, LLAMA_AWQ)
    assert value(command, "--config").endswith("24gb.yaml")


def test_auto_context_is_what_fits(capsys: pytest.CaptureFixture) -> None:
    command, err = dry(capsys, CARD_8, LLAMA_AWQ, "--profile", "8gb", "--max-model-len", "auto")
    assert value(command, "--max-model-len") == "auto"
    assert "Fits: 38,336" in err  # of the model's 131,072


def test_own_config_replaces_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("kv-cache-dtype: fp8\nmax-model-len: 8192\n")
    command, err = dry(capsys, CARD_24, LLAMA_AWQ, "--config", str(config))
    assert command.count("--config") == 1 and "8,192 tokens with fp8" in err


def test_a_profile_is_lowered_to_the_models_context(capsys: pytest.CaptureFixture) -> None:
    command, err = dry(capsys, CARD_8, MISTRAL, "--profile", "8gb")
    assert value(command, "--max-model-len") == "32768"
    assert "profile 8gb asks for 65,536 tokens and the model was made for 32,768: serving 32,768" in err


def test_cpu_gets_a_pool_of_its_own(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    command, _ = dry(capsys, CPU, MISTRAL)
    assert 0 < int(value(command, "--kv-cache-memory-bytes")) < 12 * GIB
    command, _ = dry(capsys, CPU, MISTRAL, "--kv-cache-memory-bytes", "4000000000")
    assert command.count("--kv-cache-memory-bytes") == 1
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert "--kv-cache-memory-bytes" not in dry(capsys, CPU, MISTRAL)[0]


def test_finds_the_gpu_that_vllm_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is asked; CUDA_VISIBLE_DEVICES chooses by index or UUID; without one it is the CPU."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        "echo '0, GPU-aa, NVIDIA GeForce RTX 4060, 8188, 7900'\n"
        "echo '1, GPU-bb, NVIDIA GeForce RTX 4090, 24564, 24100'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(serve, "_installed", lambda name: name == "vllm")
    assert serve.find_device() == serve.Device("NVIDIA GeForce RTX 4060", 8188 << 20, 7900 << 20, False)
    for choice, name in (("1", "4090"), ("GPU-bb", "4090"), ("0,1", "4060")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
        assert serve.find_device().name.endswith(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert serve.find_device().cpu
    smi.write_text("#!/bin/sh\nexit 9\n")  # a driver that does not answer
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert serve.find_device().cpu
    monkeypatch.setattr(serve, "_installed", lambda name: name == "vllm-cpu")
    assert serve.find_device().cpu


def test_command_with_and_without_vllms_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read([MISTRAL, "--port", "1234"], "8gb")
    monkeypatch.setattr(serve, "_installed", lambda name: name == "vllm")
    assert serve.command(settings)[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", MISTRAL]
    monkeypatch.setattr(serve, "_installed", lambda name: name == "vllm-cpu")
    assert serve.command(settings)[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", MISTRAL]


# -- profiles -----------------------------------------------------------------------------
def test_profiles_are_plain_vllm_configs() -> None:
    """vLLM's own parser reads every profile, and its dataclasses take the values."""
    from bie_vllm_plugin import register

    register()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in PROFILES:
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(["--model", "m", "--config", str(config_path(name))])
        engine = AsyncEngineArgs.from_cli_args(args)
        assert engine.kv_cache_dtype == "int4_asym"
        assert engine.additional_config["int4_asym"]["recent_tokens"] == 128
        content = yaml.safe_load(config_path(name).read_text())
        assert engine.max_num_batched_tokens == content["max-num-batched-tokens"]
        assert engine.max_num_seqs == content["max-num-seqs"]
        assert engine.max_model_len == content.get("max-model-len")
    assert engine.gpu_memory_utilization == 0.92


def test_profiles_fit_what_they_are_meant_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The cards and models that the profiles' comments name."""
    config = json.loads((MODELS / "Llama-3.1-8B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    qwen_14b = tmp_path / "14b"
    qwen_14b.mkdir()
    shape = {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "quantization_config": awq,
    }  # fmt: skip
    (qwen_14b / "config.json").write_text(json.dumps(shape))
    for gib, model, tokens in (
        (12, LLAMA_AWQ, "131,072"), (16, LLAMA_AWQ, "131,072"), (24, str(tmp_path), "131,072"),
        (24, str(qwen_14b), "131,072"), (48, str(MODELS / "Llama-3.1-8B"), "131,072"),
    ):  # fmt: skip
        card = serve.Device("card", gib * GIB, gib * GIB, False)
        assert f"Fits: {tokens} tokens" in dry(capsys, card, model)[1], (gib, model)


# -- refusals -------------------------------------------------------------------------------
def refused(capsys: pytest.CaptureFixture, device: serve.Device, *argv: str) -> tuple[int, str]:
    status = serve.main(list(argv), device)
    out, err = capsys.readouterr()
    assert status and not out and "Traceback" not in err
    return status, err.splitlines()[-1]


def test_what_cannot_fit_is_refused_with_the_plans_sentence(capsys: pytest.CaptureFixture) -> None:
    status, line = refused(capsys, CARD_8, LLAMA_AWQ, "--max-model-len", "65536")
    assert status == 3
    assert line.startswith("bie-serve: Does not fit: 65,536 tokens with int4_asym need")
    assert "--max-model-len" in line and "--force" in line
    assert "--context" not in line
    status, line = refused(capsys, CPU, LLAMA_70B)
    assert status == 3 and "Does not fit" in line
    command, err = dry(capsys, CARD_8, LLAMA_AWQ, "--max-model-len", "65536", "--force")
    assert "forced: Does not fit" in err and value(command, "--max-model-len") == "65536"


def test_a_pool_that_leaves_no_room_is_refused(capsys: pytest.CaptureFixture) -> None:
    status, line = refused(capsys, CPU, MISTRAL, "--kv-cache-memory-bytes", "30G")
    assert status == 3 and "KV pool of 30.00 GiB" in line


BAD = [
    (["--port", "1"], "MODEL comes first, before --port"),
    (["/no/such/model"], "/no/such/model does not exist"),
    ([MISTRAL, "--profile", "6gb"], "--profile"),
    ([MISTRAL, "--kv-recent-tokens", "10"], "recent_tokens=10"),
    ([MISTRAL, "--kv-sink-tokens", "x"], "--kv-sink-tokens"),
    ([MISTRAL, "--max-model-len", "65536"], "--max-model-len 65536 is more than the 32768 tokens"),
    ([MISTRAL, "--chunked-prefill-size", "64", "--max-num-batched-tokens", "64"], "leave one out"),
    ([MISTRAL, "--chunked-prefill-size", "0"], "--chunked-prefill-size 0"),
    ([MISTRAL, "--speculative-draft-model", "m"], "needs --speculative-draft-tokens"),
    ([MISTRAL, "--config", "/no/such.yaml"], "--config /no/such.yaml cannot be read"),
    ([MISTRAL, "--config", "a.yaml", "--profile", "8gb"], "leave one out"),
    ([MISTRAL, "--additional-config", "{"], "JSON"),
    ([MISTRAL, "--port", "99999"], "--port 99999 is not a port"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(argv[-2:])[-30:] for argv, _ in BAD])
def test_bad_input_is_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    status, line = refused(capsys, CARD_24, *argv)
    assert status == 2 and message in line


def test_port_in_use(capsys: pytest.CaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, line = refused(capsys, CARD_8, MISTRAL, "--port", str(port))
    assert status == 2 and line == (
        f"bie-serve: --port {port} is in use; choose another with --port or end what uses it."
    )


def test_a_card_in_use(capsys: pytest.CaptureFixture) -> None:
    busy = serve.Device("RTX 4060", 8 * GIB, 6 * GIB, False)
    status, line = refused(capsys, busy, MISTRAL)
    assert status == 2 and "6.00 GiB are free" in line and "0.75" in line


def test_merging_keeps_what_the_user_gave() -> None:
    settings = read([MISTRAL, "--additional-config", '{"other": 1, "int4_asym": {"recent_tokens": 192}}'], "8gb")
    assert settings.window == {"recent_tokens": 192}  # as vLLM reads it: the flag replaces the file's mapping
    settings = read([MISTRAL, "--max_model_len=4k"], "8gb")
    assert settings.merged["max_model_len"] == 4000 and settings.rest == ["--max_model_len=4k"]
    with pytest.raises(PlanError, match="prefix_hits='often'"):
        read([MISTRAL, "--additional-config", '{"int4_asym": {"prefix_hits": "often"}}'], "8gb")


# -- why a server did not start -----------------------------------------------------------
def test_reasons_are_found_in_vllms_log() -> None:
    logs = {
        "Cannot find any model weights with `/x`.": [
            "(APIServer pid=1) INFO 01-01 00:00:00 [core.py:1] hello\n",
            "(Worker pid=2) ERROR 01-01 00:00:00 [a.py:1] Traceback (most recent call last):\n",
            '(Worker pid=2) ERROR 01-01 00:00:00 [a.py:1]   File "x.py", line 1, in f\n',
            "(Worker pid=2) ERROR 01-01 00:00:00 [a.py:1] RuntimeError: Cannot find any model weights with `/x`\n",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
        ],
        "--max-num-seqs: Input should be greater than or equal to 1.": [
            "Traceback (most recent call last):\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n",
            "max_num_seqs\n",
            "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=-3]\n",
        ],
        "--block-size 32 does not go with it.": [
            "Traceback (most recent call last):\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n",
            "  Value error, --block-size 32 does not go with it. [type=value_error, input_value=ArgsKwargs(())]\n",
        ],
        "a process of its engine ended without a message; it was killed, or memory ran out.": [
            "Traceback (most recent call last):\n",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
        ],
        "unrecognized arguments: --nonsense.": [
            "usage: api_server.py [-h]\n",
            "api_server.py: error: unrecognized arguments: --nonsense\n",
        ],
    }
    for reason, lines in logs.items():
        out = io.StringIO()
        log = ServerLog(out, io.StringIO())
        for line in lines:
            log.feed(line)
        assert log.reason() == reason
        assert "Traceback" not in out.getvalue() and "Error:" not in out.getvalue()


def test_a_survived_traceback_is_shown() -> None:
    out = io.StringIO()
    log = ServerLog(out, io.StringIO())
    lines = ["Traceback (most recent call last):\n", "ValueError: harmless\n", "INFO: Application startup complete.\n"]
    for line in lines:
        log.feed(line)
    assert log.ready.is_set() and out.getvalue() == "".join(lines)


def test_why_a_running_server_lost_its_engine() -> None:
    """vLLM's API server then ends with status 0; `test_faults.py` kills real ones."""
    dead = "(APIServer pid=1) ERROR 01-01 00:00:00 [async_llm.py:9] EngineDeadError: EngineCore encountered an issue\n"
    cases = {
        "its engine failed: CUDA error: out of memory.": [
            "(Worker_TP1 pid=3) ERROR 01-01 00:00:00 [a.py:1] torch.AcceleratorError: CUDA error: out of memory\n", dead
        ],
        "Worker proc VllmWorker-1 died unexpectedly; it was killed, or memory ran out.": [
            "(EngineCore pid=2) ERROR 01-01 00:00:00 [m.py:3] Worker proc VllmWorker-1 died unexpectedly "
            "(exit code: None), shutting down executor.\n",
            "(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1] RuntimeError: cancelled\n", dead
        ],
        "a process of its engine ended without a message; it was killed, or memory ran out.": [
            "(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1] RuntimeError: cancelled\n", dead
        ],
    }  # fmt: skip
    for reason, lines in cases.items():
        log = ServerLog(io.StringIO(), io.StringIO())
        for line in ["INFO: Application startup complete.\n", *lines[:-1]]:
            log.feed(line)
        assert not log.engine_ended
        log.feed(lines[-1])
        assert log.engine_ended and log.engine_reason() == reason


def run_fake_server(tmp_path: Path, child: str) -> tuple[int, str]:
    """Status and last line on stderr of `run_server` over a child that prints and ends."""
    script = (
        "import sys; from bie_vllm_plugin.serve_run import run_server; "
        f"sys.exit(run_server([sys.executable, '-c', {child!r}], {{}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def test_how_a_server_ends_decides_the_status(tmp_path: Path) -> None:
    ready, dead = "print('Application startup complete.')\n", "print('EngineDeadError: gone')\n"
    assert run_fake_server(tmp_path, ready) == (0, "")
    assert run_fake_server(tmp_path, "print('0.32.0')") == (0, "")  # --version and its like
    status, line = run_fake_server(tmp_path, ready + dead)
    assert status == 1 and line.startswith("bie-serve: the server stopped: a process of its engine ended without")
    status, line = run_fake_server(tmp_path, dead)
    assert status == 1 and line.startswith("bie-serve: the server did not start: a process of its engine ended without")
    status, line = run_fake_server(tmp_path, ready + "import os; os.kill(os.getpid(), 9)")
    assert status == 1 and "vLLM was ended by signal 9 (Killed)." in line
    assert run_fake_server(tmp_path, ready + "raise SystemExit(7)")[0] == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_a_killed_bie_serve_takes_the_server_along(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    script = (
        "import sys; from bie_vllm_plugin.serve_run import run_server; "
        f"run_server([sys.executable, '-c', {child!r}], {{}})"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    assert parent.wait(10) == -signal.SIGKILL
    assert psutil.wait_procs([server], timeout=10)[1] == [] or server.status() == psutil.STATUS_ZOMBIE


# -- a real server ----------------------------------------------------------------------------
SMOL = ("--max-model-len", "2048", "--served-model-name", "smol")


@pytest.fixture(scope="module")
def server(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Server:
    log = tmp_path_factory.mktemp("serve") / "log"
    running = Server(smollm2, log, *SMOL, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def client(server: Server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=120)


CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.engine
class TestServer:
    """In order; the last one stops the server."""

    def test_log_names_the_plan(self, server: Server) -> None:
        text = server.log.read_text()
        assert "Fits: 2,048 tokens with int4_asym" in text and "kv_cache_dtype" in text

    def test_chat(self, client) -> None:
        answer = client.chat.completions.create(model="smol", messages=CHAT, max_tokens=24, temperature=0)
        assert "Paris" in answer.choices[0].message.content

    def test_completions_with_logprobs(self, client) -> None:
        answer = client.completions.create(
            model="smol", prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert "Paris" in answer.choices[0].text
        assert len(logprobs.token_logprobs) == 4 and all(number <= 0 for number in logprobs.token_logprobs)
        assert all(len(top) >= 3 for top in logprobs.top_logprobs)

    def test_chat_logprobs(self, client) -> None:
        answer = client.chat.completions.create(
            model="smol", messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
        )
        content = answer.choices[0].logprobs.content
        assert len(content) == 4 and all(len(token.top_logprobs) == 2 for token in content)

    def test_streaming_equals_not_streaming(self, client) -> None:
        ask = {"model": "smol", "messages": CHAT, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**ask).choices[0].message.content
        chunks = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)]
        assert len(chunks) > 5 and "".join(chunks) == whole

    def test_json_schema(self, client) -> None:
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "capital": {"type": "boolean"}},
            "required": ["city", "capital"],
            "additionalProperties": False,
        }
        answer = client.chat.completions.create(
            model="smol", messages=CHAT, max_tokens=64, temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        )  # fmt: skip
        data = json.loads(answer.choices[0].message.content)
        assert data["city"] in ("Paris", "Rome") and isinstance(data["capital"], bool) and len(data) == 2

    TOOLS = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "strict": True,  # vLLM holds the arguments to the schema only then
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ]

    def test_named_tool(self, client) -> None:
        answer = client.chat.completions.create(
            model="smol", messages=CHAT, max_tokens=64, temperature=0, tools=self.TOOLS,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
        )  # fmt: skip
        call = answer.choices[0].message.tool_calls[0].function
        assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")

    def test_required_and_automatic_tool(self, client) -> None:
        ask = {"model": "smol", "messages": CHAT, "max_tokens": 96, "temperature": 0, "tools": self.TOOLS}
        answer = client.chat.completions.create(**ask, tool_choice="required")
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
        answer = client.chat.completions.create(**ask, tool_choice="auto")  # flags passed on to vLLM
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls

    def test_ctrl_c_leaves_nothing(self, server: Server) -> None:
        family = server.family()
        assert len(family) >= 2  # the API server and the engine at least
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        _, alive = psutil.wait_procs(family, timeout=1)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        with socket.socket() as trial:
            assert trial.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.engine
def test_weights_missing_is_one_sentence(smollm2: str, tmp_path: Path) -> None:
    """What only vLLM can find out is one sentence too, and no traceback."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(smollm2) / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "bie_vllm_plugin.serve", str(tmp_path), "--port", str(free_port()), "--enforce-eager"],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("bie-serve: the server did not start: Cannot find any model weights")
    Path(last.rsplit("Full log: ", 1)[1]).unlink()


@pytest.mark.engine
def test_ctrl_c_while_starting(smollm2: str, tmp_path: Path) -> None:
    running = Server(smollm2, tmp_path / "log", *SMOL)
    deadline = time.monotonic() + 60
    while not running.family() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(4)
    family = running.family()
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 130
    _, alive = psutil.wait_procs(family, timeout=1)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
