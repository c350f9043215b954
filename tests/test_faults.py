# SPDX-License-Identifier: Apache-2.0
"""Faults of clients and of processes, through a real server: the next answer is right and no page is lost.

"Right" is what a fresh engine without prefix cache says. The server has strict prefix hits, so that
probes, which hit pages that faulty requests may have spoilt, have one answer.
"""
from __future__ import annotations

import concurrent.futures
import http.client
import json
import socket
import time

import psutil
import pytest
from engine import assert_same, generate, llm, run_engines, started, tokens
from live_server import Server
from tiny_models import add_tokenizer, tiny_model

pytestmark = pytest.mark.engine

MAX_LEN, CHUNK = 2048, 64
PAGES = 140
"""Of 64 INT4 or 8 window tokens: one request of MAX_LEN, or four short ones."""
FLAGS = (
    "--max-model-len", str(MAX_LEN), "--dtype", "float32", "--max-num-batched-tokens", str(CHUNK),
    "--max-num-seqs", "12", "--num-gpu-blocks-override", str(PAGES), "--served-model-name", "tiny",
    "--additional-config", json.dumps({"int4_asym": {"prefix_hits": "strict"}}),
)  # fmt: skip
PROBES = [tokens(n, seed=n, vocab=259) for n in (40, 150, 700)]
CROWD = [tokens(150 - 10 * i, seed=100 + i, vocab=259) for i in range(10)]
"""9 to 22 pages each, so that most are let in, and about 30 each when GROWN: then a third of them fit."""
GROWN = 130
LONGEST = tokens(MAX_LEN - 1, seed=7, vocab=259)
ASK = {"model": "tiny", "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return add_tokenizer(tiny_model(tmp_path_factory.mktemp("faults"), "gqa"))


@pytest.fixture(scope="module")
def fresh(model) -> dict[str, list[dict]]:
    """What an engine that nothing has happened to says."""
    engine = llm(model, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK, max_num_seqs=12)
    steps = [generate(PROBES, n=24, one_by_one=True), generate(CROWD, n=GROWN), generate([LONGEST], n=1)]
    (results,) = started(run_engines([{"llm": engine, "steps": steps}]))
    return dict(zip(("probes", "crowd", "longest"), results, strict=True))


def start(model: str, log, *flags: str, cores: str = "nobind") -> Server:  # noqa: ANN001
    """A server that is still starting."""
    return Server(
        model, log, *FLAGS, *flags, OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND=cores, HF_HUB_OFFLINE="1"
    )


def result_of(status: int, answer: dict) -> dict:
    """An answer of the server as `engine.py` compares them."""
    assert status == 200, answer
    logprobs = answer["choices"][0]["logprobs"]
    return {"tokens": [int(t.removeprefix("token_id:")) for t in logprobs["tokens"]],
            "logprobs": logprobs["token_logprobs"]}  # fmt: skip


def ask(server: Server, prompt: list[int], n: int) -> dict:
    return result_of(*server.post(**ASK, prompt=prompt, max_tokens=n))


def check_answers(server: Server, fresh: dict, *, identical: bool = True) -> None:
    """Every probe is answered as by a fresh engine, and then nothing is held."""
    answers = [ask(server, prompt, 24) for prompt in PROBES]
    if identical:
        assert [a["tokens"] for a in answers] == [a["tokens"] for a in fresh["probes"]]
    assert_same(answers, fresh["probes"], shared=1.0 if identical else 0.8)
    gauges = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    assert eventually(lambda: [server.metric(name) for name in gauges] == [0, 0, 0]), server.log.read_text()[-2000:]


def eventually(happened, seconds: float = 20) -> bool:  # noqa: ANN001
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def starting(model, tmp_path_factory):
    running = start(model, tmp_path_factory.mktemp("faults") / "log")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def server(starting, fresh):
    """It starts while the fresh engine runs; whichever test of the class a worker gets first waits for it."""
    del fresh
    starting.wait_ready()
    return starting


class TestServer:
    """In order; the last one kills its engine."""

    def test_before_any_fault(self, server, fresh):
        check_answers(server, fresh)

    def test_more_requests_than_pages(self, server, fresh):
        for _ in range(4):  # on a busy host the first requests may be through before the last arrive
            with concurrent.futures.ThreadPoolExecutor(len(CROWD)) as pool:
                answers = list(pool.map(lambda prompt: ask(server, prompt, GROWN), CROWD))
            assert_same(answers, fresh["crowd"], shared=0.8)
            if server.metric("vllm:num_preemptions_total") > 0:
                break
        assert server.metric("vllm:num_preemptions_total") > 0
        check_answers(server, fresh)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [([], "at least one prompt"), ("", "non-empty"), ([*LONGEST, 5], "max_tokens"), ([*LONGEST, 5, 5], "2048")],
        ids=["no tokens", "no text", "exactly the limit", "one above"],
    )
    def test_prompts_that_no_answer_fits(self, server, prompt, message):
        """vLLM refuses a prompt of exactly --max-model-len too: nothing could follow it."""
        status, answer = server.post(**ASK, prompt=prompt, max_tokens=1)
        assert status == 400 and message in answer["error"]["message"]

    def test_the_longest_prompt(self, server, fresh):
        assert_same([ask(server, LONGEST, 1)], fresh["longest"])
        check_answers(server, fresh)

    @pytest.mark.parametrize("streamed", [True, False])
    def test_hanging_up_in_a_prefill_chunk(self, server, fresh, streamed):
        for attempt in range(3):  # on a busy machine the hang-up may come when the prompt is done
            before = server.metric("vllm:prompt_tokens_total")
            prompt = tokens(2000, seed=11 + streamed + 2 * attempt, vocab=259)
            connection, _ = server.send(**ASK, prompt=prompt, max_tokens=40, stream=streamed)
            seen = eventually(lambda: server.metric("vllm:num_requests_running") == 1, seconds=5)
            connection.close()
            check_answers(server, fresh)
            # vLLM counts a prompt when its last chunk is done.
            if seen and server.metric("vllm:prompt_tokens_total") - before == sum(map(len, PROBES)):
                return
        pytest.fail("three hung-up prompts were prefilled to their end")

    def test_hanging_up_while_decoding(self, server, fresh):
        before = server.metric("vllm:generation_tokens_total")
        connection, events = server.send(**ASK, prompt=CROWD[0], max_tokens=1500, stream=True)
        heard = [next(events) for _ in range(20)]
        connection.close()
        told = [result_of(200, event)["tokens"][0] for event in heard]
        assert told == fresh["crowd"][0]["tokens"][:20]
        check_answers(server, fresh)
        assert 20 <= server.metric("vllm:generation_tokens_total") - before < 1500  # else all 1,500, and the probes

    def test_killed_engine(self, server, fresh):
        kill(server, fresh, "VLLM::EngineCore", "a process of its engine ended without a message")


def kill(server: Server, fresh: dict, name: str, reason: str) -> None:
    """kill -9 a process in the middle of a stream: clients hear of it, the server ends, nothing is left."""
    family = server.family()
    (victim,) = [process for process in family if name in " ".join(process.cmdline()[:4])]
    connection, events = server.send(**ASK, prompt=CROWD[0], max_tokens=1500, stream=True)
    heard = [next(events) for _ in range(5)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.post, **ASK, prompt=CROWD[1], max_tokens=1500)
        assert eventually(lambda: server.metric("vllm:num_requests_running") == 2)
        victim.kill()
        try:
            heard += list(events)
        except (OSError, http.client.HTTPException):
            heard.append("cut off")
        try:
            status, answer = whole.result(timeout=60)
            assert status >= 500 and "error" in answer, (status, answer)
        except (OSError, http.client.HTTPException):
            pass  # hung up on, which is no answer either
    connection.close()
    told = [event for event in heard if isinstance(event, dict) and "choices" in event]
    assert told == heard[: len(told)] and all(e["choices"][0]["finish_reason"] is None for e in told)
    rest = heard[len(told) :]  # an error, or the connection's end without [DONE]
    assert rest in ([], ["cut off"]) or rest[0]["error"]["code"] == 500, rest
    parts = [result_of(200, event) for event in told]
    said = {key: [x for part in parts for x in part[key]] for key in ("tokens", "logprobs")}
    n = min(len(said["tokens"]), len(fresh["crowd"][0]["tokens"]))
    assert_same(
        [{key: said[key][:n] for key in said}], [{key: fresh["crowd"][0][key][:n] for key in said}], shared=0.8
    )
    assert server.process.wait(60) == 1
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("bie-serve: the server stopped: ") and reason in last, last
    _, alive = psutil.wait_procs(family, timeout=1)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    with socket.socket() as trial:
        assert trial.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason", "ranks"),
    [
        ("VLLM::EngineCore", "ended without a message", 1),
        ("VLLM::Worker_TP1", "VllmWorker-1 died unexpectedly", 2),
        ("vllm.entrypoints.openai.api_server", "vLLM was ended by signal 9 (Killed)", 1),
    ],
    ids=["engine", "worker of two", "API server"],
)
def test_restart_after_kill(model, fresh, tmp_path, name, reason, ranks):
    """The same command line again, after -9, answers rightly."""
    flags, cores = ("--tensor-parallel-size", str(ranks)), "0|1" if ranks == 2 else "nobind"
    for run in ("first", "second"):
        server = start(model, tmp_path / run, *flags, cores=cores)
        try:
            server.wait_ready()
            check_answers(server, fresh, identical=ranks == 1)
            if run == "first":
                kill(server, fresh, name, reason)
        finally:
            server.stop()
