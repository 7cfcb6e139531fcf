"""Several replicas in one brain give the same tokens, evenly spread, also after deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.simulated import SIM
from tests.e2e.test_breakage import KILLS, STREAMS, Load, requests, undisturbed
from tests.e2e.waiting import eventually, eventually_async

REPLICAS = 4


@pytest.fixture(scope="module")
def sim_server(serve_for_module: Serve, tiny: Model) -> Server:
    """Replicas that are shared by all tests that change nothing."""
    return serve_for_module(tiny, "--dp-size", str(REPLICAS), *SIM)


def deaths(server: Server) -> float:
    """The deaths of all hands."""
    return server.metric("forebay:hand_deaths_total")


@pytest.mark.parametrize("method", ["prefix_aware", "shortest_queue", "total_tokens", "round_robin"])
def test_four_replicas_give_the_tokens_of_one(serve: Serve, tiny: Model, method: str) -> None:
    alone = serve(tiny)
    expected = undisturbed(alone, requests(tiny, 40))
    alone.kill()
    server = serve(tiny, "--dp-size", str(REPLICAS), "--load-balance-method", method)
    assert len(server.hands()) == REPLICAS
    answers = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
    server.wait_until_idle()
    replicas = server.replicas()
    assert all(replica["requests"] == 0 for replica in replicas)
    # A queued request that moves is dispatched again, twice at most.
    assert len(expected) <= sum(replica["dispatched"] for replica in replicas) <= 3 * len(expected)
    assert all(replica["dispatched"] > 0 for replica in replicas)


async def kill_one_by_one(server: Server, load: Load) -> None:
    """Kills the hands in turn while all streams run."""
    running = asyncio.create_task(load.run(STREAMS))
    try:
        await eventually_async(lambda: running.done() or len(load.live) == STREAMS, "all streams run")
        for number in range(1, KILLS + 1):
            moves = asyncio.create_task(load.everyone_moves())
            await asyncio.wait([running, moves], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await moves
            hands = server.hands()
            os.kill(hands[number % len(hands)], signal.SIGKILL)
            await eventually_async(lambda n=number: deaths(server) == n, "the death is counted")  # type: ignore[misc]
        load.finish()
        await running
    finally:
        running.cancel()


def test_deaths_of_one_of_four_hands_under_load(serve: Serve, tiny: Model) -> None:
    """No stream fails or changes its tokens, and in the end all replicas serve requests again."""
    server = serve(tiny, "--dp-size", str(REPLICAS))
    expected = undisturbed(server, requests(tiny, 96))
    load = Load(server, tiny, expected)
    asyncio.run(kill_one_by_one(server, load))
    assert load.finished >= STREAMS
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    eventually(lambda: [one["status"] for one in server.replicas()] == ["ready"] * REPLICAS, "all replicas are ready")
    before = [replica["dispatched"] for replica in server.replicas()]
    again = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in again] == [tokens for _, tokens in expected]
    server.wait_until_idle()
    replicas = server.replicas()
    assert all(replica["requests"] == 0 for replica in replicas)
    assert all(replica["dispatched"] > count for replica, count in zip(replicas, before, strict=True))


def chat(**more: Any) -> dict[str, Any]:
    """A short chat."""
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, **more}


def dispatched(server: Server) -> list[int]:
    return [replica["dispatched"] for replica in server.replicas()]


def test_clients_say_where_they_want_to_go(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--dp-size", str(REPLICAS), *SIM)
    path = "/v1/chat/completions"
    for body, headers in (
        (chat(routed_dp_rank=2), {}),
        (chat(data_parallel_rank=2), {}),
        (chat(), {"x-data-parallel-rank": "2"}),
        (chat(routed_dp_rank=2), {"x-data-parallel-rank": "1"}),
    ):
        server.ask(path, body, headers=headers)
    assert dispatched(server) == [0, 0, 4, 0]
    before = dispatched(server)
    for headers in ({"x-routing-key": "me"}, {"x-smg-routing-key": "me"}):
        server.ask(path, chat(), headers=headers)
    server.ask("/generate", {"text": "a", "routing_key": "me", "sampling_params": {"max_new_tokens": 2}})
    gained = [now - then for now, then in zip(dispatched(server), before, strict=True)]
    assert sorted(gained) == [0, 0, 0, 3]


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        (chat(routed_dp_rank=4), {}, "routed_dp_rank"),
        (chat(routed_dp_rank=-1), {}, "routed_dp_rank"),
        (chat(routing_key=""), {}, "routing_key"),
        (chat(), {"x-data-parallel-rank": "four"}, "x-data-parallel-rank"),
        (chat(), {"x-data-parallel-rank": "4"}, "x-data-parallel-rank"),
        (chat(), {"x-routing-key": "k" * 513}, "x-routing-key"),
    ],
)
def test_what_makes_no_sense_is_refused(
    sim_server: Server, body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    response = sim_server.post("/v1/chat/completions", body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]


def test_a_drained_replica_gets_nothing(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--dp-size", "2", *SIM)
    assert server.ask("/replicas/0/drain", None) == {"replica": 0, "drained": True, "taking": 1}
    for _ in range(4):
        server.ask("/v1/chat/completions", chat())
    assert dispatched(server) == [0, 4]
    assert server.ask("/replicas/0/resume", None) == {"replica": 0, "drained": False, "taking": 2}
    server.ask("/v1/chat/completions", chat(routed_dp_rank=0))
    assert dispatched(server) == [1, 4]
    refused = server.post("/replicas/2/drain", None)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replica")


def test_equal_requests_never_pile_up(serve: Serve, tiny: Model) -> None:
    # A moved request would be dispatched twice.
    server = serve(tiny, "--dp-size", str(REPLICAS), *SIM, "--sim-output-tokens", "40", "--disable-queue-moves")
    with ThreadPoolExecutor(20) as clients:
        list(clients.map(lambda _: server.ask("/v1/chat/completions", chat(max_tokens=20)), range(200)))
    assert all(replica["requests_peak"] <= 20 / REPLICAS for replica in server.replicas())
    assert sum(dispatched(server)) == 200


def test_processors_are_kept(serve: Serve, tiny: Model) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    first, last = allowed[0], allowed[-1]
    server = serve(tiny, "--dp-size", "2", "--cpu-affinity", f"brain={first}|{first}|{last}")
    assert os.sched_getaffinity(server.pid) == {first}
    assert sorted(next(iter(os.sched_getaffinity(hand))) for hand in server.hands()) == sorted([first, last])
