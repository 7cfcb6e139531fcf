"""Sparse decoding from host memory: the same tokens with few device pages, and more concurrent requests."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forebay.gpu.choose import VARIABLE
from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.reference import prompts
from tests.e2e.sampling import WIDE, narrowest
from tests.e2e.server import START_SECONDS, Server
from tests.e2e.test_breakage import TOP_K, Expected, Load, kill_under_load, requests, undisturbed
from tests.e2e.test_experts import CLEAR, clear
from tests.index_margins import margins_along

SPARSE = ("--enable-hisparse", "--debug-kv-checksum", "--hicache-ratio", "8")
SMALL = ("--max-total-tokens", "400")
"""25 pages, which a few prompts fill."""
CONVERTED = "forebay:requests_made_sparse_total"
MISSED = "vllm:hisparse_cache_misses_total"
WAITED = "forebay:rows_waited_for_copies_seconds_total"
BOTH = ["deepseek-v32", "glm-dsa"]


@pytest.fixture(scope="module", params=BOTH)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, models: Models, family: str) -> Expected:
    """Requests with the tokens of a server that keeps all pages on the device."""
    server = serve_for_module(models(family))
    found = clear(models(family), undisturbed(server, requests(models(family), 24)))
    server.kill()
    return found


def same(server: Server, expected: Expected) -> None:
    """Checks that concurrent requests get the expected tokens."""
    answers = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]


def settled(server: Server) -> None:
    """Checks that no page is lost, no copy is in progress, and no copy has failed."""
    server.wait_until_idle()
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    assert server.replicas()[0]["pages_held"] == 0
    assert server.metric("forebay:copies_failed_total") == 0


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--hot-buffer-tokens", "16"), marks=pytest.mark.slow),
        ("--hot-buffer-tokens", "16", "--page-size", "4", "--lookahead", "0"),
        pytest.param(("--device", "deferred", "--hot-buffer-tokens", "16"), marks=pytest.mark.slow),
        pytest.param(("--device", "deferred", "--lookahead", "0"), marks=pytest.mark.slow),
        pytest.param(
            ("--device", "deferred", "--attention-backend", "triton", "--hot-buffer-tokens", "16"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--kv-save", "token", "--kv-save-order", "inline"), marks=pytest.mark.slow),
        pytest.param(
            ("--kv-save", "token", "--kv-save-order", "fence", "--device", "deferred"), marks=pytest.mark.slow
        ),
        ("--kv-save", "token"),
        ("--tp-size", "2", "--hot-buffer-tokens", "16"),
        pytest.param(("--tp-size", "2", "--kv-save", "token"), marks=pytest.mark.slow),
        pytest.param(("--dp-size", "2", "--enable-dp-attention", "--hot-buffer-tokens", "16"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_tokens_do_not_depend_on_where_rows_are(
    serve: Serve,
    models: Models,
    family: str,
    expected: Expected,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Use GPU operators in their PyTorch form, which needs no GPU.
    monkeypatch.setenv(VARIABLE, "reference")
    server = serve(models(family), *SMALL, *SPARSE, *flags)
    for _ in range(2):
        same(server, expected)
    metrics = server.metrics()
    assert metrics.value(CONVERTED) > 0
    assert metrics.value(MISSED) > 0
    found = {kind: metrics.value("forebay:sparse_rows_total", found=kind) for kind in ("page", "row", "host")}
    assert min(found.values()) > 0
    # By default saves delay no row; `--kv-save-order fence` and `inline` let rows wait.
    assert (metrics.value(WAITED) > 0) == ("--kv-save-order" in flags)
    # All ranks of a replica store the same rows, and so share one host memory.
    memories = {os.stat(f"/proc/{hand}/fd/5").st_ino for hand in server.hands()}
    assert len(memories) == len(server.replicas())
    settled(server)


@pytest.mark.parametrize(("device", "kills"), [("cpu", 1), pytest.param("deferred", 1, marks=pytest.mark.slow)])
def test_deaths_of_the_hand_under_load(
    serve: Serve, models: Models, family: str, expected: Expected, device: str, kills: int
) -> None:
    # Slow copies: at each death of the hand some copies are in progress.
    slow = ("--debug-kv-copy-gbps", "0.05")
    server = serve(models(family), "--max-total-tokens", "2400", *SPARSE, *slow, "--device", device)
    killed = asyncio.run(kill_under_load(server, Load(server, models(family), expected), kills))
    assert len(killed) == kills
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    assert server.metric(CONVERTED) > 0
    server.wait_for_health()
    same(server, expected)
    settled(server)


def test_an_answer_outgrows_the_device_and_a_prompt_may_not(serve: Serve, models: Models, family: str) -> None:
    model = models(family)
    params: dict[str, Any] = {"temperature": 0, "top_k": TOP_K, "max_new_tokens": 450, "ignore_eos": True}
    asked: list[dict[str, Any]] = [
        {"input_ids": prompt, "sampling_params": params} for prompt in prompts(model, 10, 60, seed=5)
    ]
    ranked = [{**request, "return_logprob": True, "top_logprobs_num": TOP_K + 1} for request in asked]
    server = serve(model)
    answers = native_together(server, ranked)
    server.kill()
    expected = []
    for request, detailed, answer in zip(asked, ranked, answers, strict=True):
        tokens: list[int] = answer["output_ids"]
        margins = margins_along(model.reference, request["input_ids"] + tokens)
        if narrowest(detailed, answer) > WIDE and min(margins) > CLEAR:
            expected.append((request, tokens))
    assert len(expected) > 1
    server = serve(model, *SMALL, *SPARSE)
    for request, tokens in expected:
        assert len(request["input_ids"]) + len(tokens) > 400
        assert native_together(server, [request])[0]["output_ids"] == tokens
    same(server, expected)
    body = {"input_ids": [5] * 401, "sampling_params": {"max_new_tokens": 2}}
    refused = server.post("/generate", body)
    assert refused.status_code == 400
    assert "400" in refused.text or "399" in refused.text
    assert server.ask("/generate", {**body, "input_ids": [5] * 390})["meta_info"]["completion_tokens"] == 2
    settled(server)


# Relative sizes of the data in a page: rows of 40 values in 6 layers, and keys of 16 values in one index.
MAIN, INDEX = 6 * 40, 16
PAGE = 16
PROMPT, ANSWER, TOGETHER = 1150, 200, 24


def peak(server: Server) -> int:
    """The largest number of requests that run at a time when `TOGETHER` arrive at once."""
    asked: list[dict[str, Any]] = [
        {
            "input_ids": [(7 * at + 13 * number) % 1900 + 3 for at in range(PROMPT)],
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
        }
        for number in range(TOGETHER)
    ]
    most = 0
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(native_together, server, asked)
        while not served.done():
            most = max(most, int(server.metric("vllm:num_requests_running")))
        assert all(len(answer["output_ids"]) == ANSWER for answer in served.result())
    return most


def test_more_requests_run_in_the_same_bytes(serve: Serve, models: Models) -> None:
    model = models("glm-dsa-one-index")
    pages = -(-(PROMPT + ANSWER + 1) // PAGE)
    # Each request has a page of hot rows, its last two pages and one to grow; the next prompt needs pages too.
    hot = TOGETHER * 4 + pages + 20
    ratio = 12
    assert ratio * hot > TOGETHER * pages
    equal = (hot * MAIN + ratio * hot * INDEX) // (MAIN + INDEX)
    flags = ("--max-running-requests", str(TOGETHER))
    server = serve(model, "--max-total-tokens", str(equal * PAGE), *flags)
    plain = peak(server)
    assert plain in (equal // pages, equal // -(-PROMPT // PAGE))
    server.kill()
    sparse = ("--enable-hisparse", "--hicache-ratio", str(ratio), "--hot-buffer-tokens", "16")
    server = serve(model, "--max-total-tokens", str(hot * PAGE), *flags, *sparse)
    many = peak(server)
    assert many == TOGETHER >= 3 * plain
    assert server.metric("vllm:num_preemptions_total") == 0
    settled(server)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("deepseek-v32", ("--hot-buffer-tokens", "15"), "15 hot rows are not supported: use 16"),
        ("deepseek-v32", ("--hisparse-config", '{"top_k": 17}'), "a top-k of 17: the model chooses 16 positions"),
        ("deepseek-v32", ("--max-total-tokens", "64"), "4 pages of 16 tokens on the device are too few"),
        ("deepseek-v3", (), "choose positions by an index"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    serve: Serve, models: Models, name: str, flags: tuple[str, ...], words: str
) -> None:
    server = serve(models(name), "--enable-hisparse", *flags, healthy=False)
    assert server.process.wait(START_SECONDS) != 0
    assert words in server.log()
    assert "Traceback" not in server.log()
