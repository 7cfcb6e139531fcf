"""The simulated device, with everything else real."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.client import native_together, openai_client
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import BINARY, Server
from tests.e2e.simulated import SIM, paced, profile

STEP_SECONDS = 0.02
MEAN_TOKENS = 20
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--device", "sim", "--sim-output-tokens", str(MEAN_TOKENS))


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server)


def chat(client: OpenAI, model: Model, **options: Any) -> Any:
    return client.chat.completions.create(model=model.name, messages=MESSAGES, **options)


def test_a_chat_is_readable_counted_and_always_the_same(client: OpenAI, server: Server, tiny: Model) -> None:
    options: Any = {"max_tokens": 50, "extra_body": {"ignore_eos": True}}
    whole = chat(client, tiny, **options)
    text = whole.choices[0].message.content
    assert re.fullmatch(r"( [a-z]+)+", text), text
    assert whole.choices[0].finish_reason == "length"
    prompt = server.ask("/tokenize", {"messages": MESSAGES})["tokens"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 50)

    chunks = list(chat(client, tiny, stream=True, stream_options={"include_usage": True}, **options))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text
    assert chunks[-1].usage.completion_tokens == 50


def test_a_chat_ends_by_itself(client: OpenAI, tiny: Model) -> None:
    answer = chat(client, tiny)
    assert answer.choices[0].finish_reason == "stop"
    assert 1 <= answer.usage.completion_tokens < 2 * MEAN_TOKENS
    longer = chat(client, tiny, extra_body={"min_tokens": 3 * MEAN_TOKENS})
    assert longer.usage.completion_tokens >= 3 * MEAN_TOKENS
    assert longer.choices[0].message.content.startswith(answer.choices[0].message.content)


def test_log_probabilities_are_answered(client: OpenAI, tiny: Model) -> None:
    answer = chat(client, tiny, logprobs=True, top_logprobs=2, max_tokens=4, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token for token in content)


def test_many_at_a_time_say_what_each_says_alone(server: Server) -> None:
    def request(i: int) -> Any:
        sampling = {"max_new_tokens": 30 + i % 7, "ignore_eos": True}
        return {"input_ids": [5 + i % 11] * (20 + i), "sampling_params": sampling}

    together = native_together(server, [request(i) for i in range(60)])
    for i in (0, 7, 59):
        alone = server.ask("/generate", request(i))
        assert together[i]["output_ids"] == alone["output_ids"]
    assert all(len(answer["output_ids"]) == 30 + i % 7 for i, answer in enumerate(together))


def test_nobody_takes_it_for_a_model(server: Server) -> None:
    simulated = server.http.get("/server_info").json()["config"]["simulated"]
    assert (simulated["profile"], simulated["output_tokens"]) == ("instant", MEAN_TOKENS)
    assert simulated["origin"]
    assert "SIMULATED" in server.log()
    assert server.hand() is None


def test_a_profile_paces_the_stream_and_sizes_the_pool(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    server = serve(tiny, *SIM, *paced(tmp_path, STEP_SECONDS * 1e6), "--record-steps", str(steps))
    assert server.http.get("/server_info").json()["facts"]["page_count"] == 4096 // 16
    tokens = 12
    started = time.monotonic()
    options: Any = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    chat(openai_client(server), tiny, **options)
    assert time.monotonic() - started >= (tokens - 1) * STEP_SECONDS

    assert server.terminate() == 0
    recorded = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [step["step"] for step in recorded] == list(range(1, len(recorded) + 1))
    assert sum(step["decode_rows"] for step in recorded) >= tokens - 1
    assert {step["device_us"] for step in recorded} == {20000}
    fitted = tmp_path / "fitted.toml"
    about = ("--device-name", "d", "--model", "m", "--kv-tokens", "4096", "-o", str(fitted))
    subprocess.run([BINARY, "sim", "fit", steps, *about], check=True, capture_output=True, timeout=60)
    shown = subprocess.run(
        [BINARY, "sim", "profiles", fitted], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "step_us = 20000.0" in shown
    assert "R2" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "sim", "--sim-profile", "h300"), "h200-qwen3-0.6b"),
        (("--sim-profile", "instant"), "--device sim"),
    ],
)
def test_wrong_flags_are_refused(serve: Serve, tiny: Model, flags: tuple[str, ...], message: str) -> None:
    server = serve(tiny, *flags, healthy=False)
    assert server.process.wait(60) == 1
    assert message in server.log()


def test_a_plan_says_how_many(tmp_path: Path) -> None:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    lines = [
        {"timestamp": 25 * i, "input_length": 600, "output_length": 40, "hash_ids": [i % 3, i]} for i in range(300)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    device = profile(tmp_path, step_us=2000, token_us=300)
    goal = ("--slo", "ttft:400", "--slo", "tpot:100", "--output-file", str(result))
    command: list[str | Path] = [BINARY, "plan", "--trace", trace, "--sim-profile", device, *goal]
    table = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    plan = json.loads(result.read_text())
    assert f"Enough: {plan['answer']} replica" in table
    by_number = {tried["replicas"]: tried for tried in plan["tried"]}
    enough = by_number[plan["answer"]]
    assert enough["met"]
    assert enough["ttft_ms"]["p99"] <= 400
    assert enough["completed"] == len(lines)
    assert not by_number[plan["answer"] - 1]["met"]
    short = subprocess.run([*command, "--max-replicas", "1"], check=False, capture_output=True, text=True, timeout=60)
    assert short.returncode == 1
    assert "1 replica" in short.stderr
