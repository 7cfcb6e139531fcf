"""Several ranks in a replica give the tokens of one rank, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import lying_rank
from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.processes import alive
from tests.e2e.server import Server
from tests.e2e.test_breakage import STREAMS, Load, requests, undisturbed
from tests.e2e.test_tiers import RESTORED, SMALL, TIER, balanced
from tests.e2e.waiting import eventually, eventually_async

START_SECONDS = 120
KILLS = int(os.environ.get("FOREBAY_KILLS", "2"))


def same_tokens(serve: Serve, model: Model, *flags: str, count: int = 24) -> Server:
    """A server with these flags, once its tokens equal those of one rank with PyTorch's operators."""
    alone = serve(model, "--device", "deferred", "--dtype", "float32")
    expected = undisturbed(alone, requests(model, count))
    alone.kill()
    server = serve(model, "--dtype", "float32", *flags)
    answers = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
    return server


def test_two_ranks_give_the_tokens_of_one(serve: Serve, tiny: Model) -> None:
    # Each step has a chunk of a prompt, and more requests arrive than run at a time.
    server = same_tokens(serve, tiny, "--tp-size", "2", "--chunked-prefill-size", "64", "--max-running-requests", "12")
    assert len(server.hands()) == 2
    info = server.http.get("/server_info").json()["config"]
    assert (info["tp_size"], info["ep_size"], info["dp_size"]) == (2, 1, 1)


def test_replicas_of_two_ranks(serve: Serve, tiny: Model) -> None:
    server = same_tokens(serve, tiny, "--tensor-parallel-size", "2", "--dp-size", "2", count=12)
    assert len(server.hands()) == 4
    assert all(replica["dispatched"] > 0 for replica in server.replicas())


def test_experts_by_rank(serve: Serve, models: Models) -> None:
    server = same_tokens(serve, models("qwen3-moe"), "--tp-size", "2", "--enable-expert-parallel", count=12)
    assert server.http.get("/server_info").json()["config"]["ep_size"] == 2


def deaths(server: Server) -> float:
    return server.metric("forebay:hand_deaths_total")


async def end_ranks(server: Server, load: Load, numbers: Sequence[int], seconds: float, replicas: int = 1) -> None:
    """Sends a signal to one rank after another; after each signal all ranks end within `seconds`.

    Each of the `replicas` counts the death.
    """
    running = asyncio.create_task(load.run(STREAMS))
    try:
        await eventually_async(lambda: running.done() or len(load.live) == STREAMS, "all streams run")
        for count in range(1, KILLS + 1):
            moves = asyncio.create_task(load.everyone_moves())
            await asyncio.wait([running, moves], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await moves
            group = server.hands()
            assert len(group) == 2
            sent = time.monotonic()
            os.kill(group[count % 2], numbers[count % len(numbers)])
            await eventually_async(lambda pids=group: not any(map(alive, pids)), "all ranks have ended")  # type: ignore[misc]
            assert time.monotonic() - sent < seconds
            await eventually_async(lambda n=count: deaths(server) == n * replicas, "the death is counted")  # type: ignore[misc]
        load.finish()
        await running
    finally:
        running.cancel()


@pytest.mark.parametrize(
    ("numbers", "watchdog"),
    [
        pytest.param([signal.SIGKILL], 300, id="killed"),
        pytest.param([signal.SIGSTOP], 2, id="stopped", marks=pytest.mark.slow),
        pytest.param(lying_rank.SIGNALS, 300, id="lying deaths"),
    ],
)
def test_a_rank_s_end_is_that_of_all_and_nobody_notices(
    serve: Serve, tiny: Model, numbers: Sequence[int], watchdog: int, tmp_path: Path
) -> None:
    flags = ["--tp-size", "2", "--dtype", "float32", "--watchdog-timeout", str(watchdog)]
    lies = numbers is lying_rank.SIGNALS
    if lies:
        flags += ["--python", str(lying_rank.program(tmp_path))]
    server = serve(tiny, *flags)
    expected = undisturbed(server, requests(tiny, 32))
    load = Load(server, tiny, expected)
    # A long limit for busy machines; ranks usually end within a second.
    asyncio.run(end_ranks(server, load, numbers, 20.0))
    assert load.finished >= STREAMS
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    server.wait_until_idle()
    if lies:
        # `log` returns the end of the file, which has the last deaths.
        told = [line for line in server.log().splitlines() if "the hand died" in line]
        assert told
        assert all("ranks 0 and 1 disagree in step" in line or "malformed frame" in line for line in told)
    pids = server.hands()
    server.kill()
    eventually(lambda: not any(map(alive, pids)), "no rank outlives the brain")


RANKS = ("--tp-size", "2", "--dtype", "float32")


def test_tokens_do_not_depend_on_the_tier_of_ranks(serve: Serve, tiny: Model) -> None:
    server = same_tokens(serve, tiny, *RANKS, *SMALL, *TIER)
    expected = undisturbed(server, requests(tiny, 24))
    for _ in range(2):
        # More requests than there are pages for, so that some are preempted.
        answers = native_together(server, [request for request, _ in expected], held=True)
        assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric(RESTORED) > 0
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
    facts = server.http.get("/server_info").json()["facts"]
    assert facts["host_page_count"] == 8 * facts["page_count"]
    assert facts["kv_bytes"] == facts["page_count"] * facts["page_bytes"], "the bytes of all ranks are counted"
    balanced(server)


def test_blocks_outlive_the_ranks(serve: Serve, tiny: Model) -> None:
    # Slow copies: at each death of a rank some copies are in progress.
    slow = ("--debug-kv-copy-gbps", "0.02")
    server = serve(tiny, *RANKS, "--max-total-tokens", "3000", *TIER, *slow)
    expected = undisturbed(server, requests(tiny, 24))
    load = Load(server, tiny, expected)
    asyncio.run(end_ranks(server, load, [signal.SIGKILL], 20.0))
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    assert server.metric(RESTORED) > 0
    server.wait_for_health()
    again = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in again] == [tokens for _, tokens in expected]
    balanced(server)


def test_a_copy_that_fails_on_one_rank_costs_time_only(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, *RANKS, *SMALL, *TIER)
    prompt = tiny.encode(Path("LICENSE").read_text())[:200]
    body: dict[str, Any] = {"model": tiny.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = server.ask("/v1/completions", body)
    for salt in range(4):
        server.ask("/v1/completions", {**body, "prompt": [(7 * at + salt) % 100 + 3 for at in range(190)]})
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    ranks = server.hands()
    memories = [os.stat(f"/proc/{rank}/fd/5").st_ino for rank in ranks]
    assert len(set(memories)) == 2, "each rank has its own memory"
    memory = os.open(f"/proc/{ranks[1]}/fd/5", os.O_RDWR)
    os.pwrite(memory, b"\x5c" * os.fstat(memory).st_size, 0)
    os.close(memory)
    second = server.ask("/v1/completions", body)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert server.metric("forebay:copies_failed_total") > 0
    assert deaths(server) == 0
    server.wait_until_idle()
    assert server.replicas()[0]["pages_held"] == 0
    # Blocks that are saved again are restored. On a busy machine it may be faster to compute them at first.
    cached = 0
    for _ in range(12):
        for salt in range(4):
            server.ask("/v1/completions", {**body, "prompt": [(7 * at + salt) % 100 + 3 for at in range(190)]})
        server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
        again = server.ask("/v1/completions", body)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached == 192:
            break
    assert cached == 192


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tp-size", "3"), "query heads"),
        (("--tp-size", "2", "--enable-expert-parallel"), "expert"),
        (("--tp-size", "2", "--quantization", "w8a8_int8"), "quantization"),
        (("--tp-size", "2", "--ep-size", "3"), "--ep-size 3"),
        (("--nnodes", "2"), "forebay worker --join"),
    ],
)
def test_what_can_t_be_divided_is_said_at_start(serve: Serve, tiny: Model, flags: tuple[str, ...], told: str) -> None:
    server = serve(tiny, *flags, healthy=False)
    assert server.process.wait(START_SECONDS) != 0
    assert told in server.log()


def test_ranks_have_processors_of_their_own(serve: Serve, tiny: Model) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    server = serve(tiny, "--tp-size", "2", "--cpu-affinity", f"{first};{last}")
    assert sorted(next(iter(os.sched_getaffinity(hand))) for hand in server.hands()) == sorted([first, last])


def test_simulated_ranks(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", "--tp-size", "8", "--dp-size", "2")
    assert server.hands() == []
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})["usage"]["completion_tokens"] == 3
