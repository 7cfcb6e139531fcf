"""Prefill and decode replicas give the tokens of one replica, whatever is handed on, aborted or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import async_client, native_stream, native_together
from tests.e2e.conftest import FLAGS, Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import BINARY, Server
from tests.e2e.test_breakage import STREAMS, Expected, Load, requests, undisturbed
from tests.e2e.waiting import eventually, eventually_async

KILLS = 4
FIRST_LENDER = 6
"""The descriptor of a hand for the first replica's host memory."""
HOST_MEMORY = "forebay-host-kv"
PD = ("--pd-local-tokens", "0", "--debug-kv-checksum", "--max-total-tokens", "3000", "--threads", "1")
HANDED = "forebay:pd_handed_total"
ROLES = [(1, "prefill"), (0, "decode"), (2, "both"), (1, "decode"), (0, "prefill"), (2, "decode")]
"""Role changes in this order: the replica, and its new role."""


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, tiny: Model) -> Expected:
    """Requests with the tokens that a server of one replica gives them."""
    server = serve_for_module(tiny)
    found = undisturbed(server, requests(tiny, 32))
    server.kill()
    return found


def at_rest(server: Server) -> None:
    """Checks that the idle server lends, holds and copies no page."""
    server.wait_until_idle()
    for name in ("forebay:lent_pages", "forebay:copies_outstanding"):
        server.wait_for_metric(name, lambda value: value == 0)
    eventually(lambda: all(one["pages_held"] == 0 for one in server.replicas()), "the pages are free")


@pytest.mark.parametrize(
    ("split", "hand"),
    [("1:1", "rust"), ("1:1", "torch"), ("1:2", "rust"), pytest.param("2:1", "rust", marks=pytest.mark.slow)],
)
def test_tokens_are_those_of_one_replica(serve: Serve, tiny: Model, expected: Expected, split: str, hand: str) -> None:
    server = serve(tiny, "--pd", split, *PD, "--page-size", "4", "--hand", hand)
    prefill = int(split[0])
    assert len(server.hands()) == sum(map(int, split.split(":")))
    answers = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
    assert server.metric(HANDED) == len(expected)
    assert server.metric("forebay:copies_failed_total") == 0
    at_rest(server)
    replicas = server.replicas()
    assert sum(one["generated_tokens"] for one in replicas[:prefill]) == len(expected)
    computed = sum(one["prompt_tokens"] for one in replicas[prefill:])
    assert computed < 4 * len(expected), "a decode replica computes only positions that fill no page"
    # All pages of a preempted request are in a tier, except a partly filled one.
    recomputed = sum(one["recomputed_tokens"] for one in replicas)
    assert recomputed <= 3 * server.metric("vllm:num_preemptions_total")


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", ()),
        # All ranks have the same rows, and one host tier.
        ("deepseek-v3", ()),
        pytest.param("qwen3-moe", ("--enable-expert-parallel",), marks=pytest.mark.slow),
    ],
)
def test_each_rank_lends_to_its_equal(serve: Serve, models: Models, family: str, flags: tuple[str, ...]) -> None:
    model = models(family)
    alone = serve(model, "--device", "deferred", "--dtype", "float32")
    wanted = undisturbed(alone, requests(model, 12))
    alone.kill()
    server = serve(model, "--pd", "1:1", "--tp-size", "2", *PD, "--page-size", "4", "--dtype", "float32", *flags)
    assert len(server.hands()) == 4
    answers = native_together(server, [request for request, _ in wanted])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in wanted]
    assert server.metric(HANDED) == len(wanted)
    assert server.metric("forebay:copies_failed_total") == 0
    at_rest(server)
    computed = server.replicas()[1]["prompt_tokens"]
    assert computed < 4 * len(wanted), "the decode replica computes only positions that fill no page"


def test_chosen_tokens_have_the_same_log_probabilities(serve: Serve, tiny: Model, expected: Expected) -> None:
    asked = [
        {**request, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0} for request, _ in expected
    ]
    alone = serve(tiny)
    wanted = native_together(alone, asked[:8])
    alone.kill()
    server = serve(tiny, "--pd", "1:1", *PD)
    for one, other in zip(wanted, native_together(server, asked[:8]), strict=True):
        for name in ("input_token_logprobs", "output_token_logprobs"):
            ours, theirs = other["meta_info"][name], one["meta_info"][name]
            assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]
            values = [entry[0] for entry in theirs if entry[0] is not None]
            assert [entry[0] for entry in ours if entry[0] is not None] == pytest.approx(values, abs=1e-3)
    assert server.metric(HANDED) == 8
    at_rest(server)


def test_choices_and_forms_of_answers_are_those_of_one_replica(serve: Serve, tiny: Model) -> None:
    bodies: list[dict[str, Any]] = [
        {"n": 3, "temperature": 1.0, "seed": 7, "ignore_eos": True},
        {"regex": "[a-c]{20}", "temperature": 0},
        {"regex": "(yes|no)(, (yes|no)){5}", "temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.3, "ignore_eos": True},
        {"temperature": 0, "stop": ["e"]},
    ]

    def texts(server: Server) -> list[list[tuple[str, str]]]:
        found = []
        for body in bodies:
            asked = {"prompt": "The work and its licence " * 6, "max_tokens": 40, **body}
            answer = server.ask("/v1/completions", {"model": tiny.name, **asked})
            found.append([(choice["text"], choice["finish_reason"]) for choice in answer["choices"]])
        return found

    alone = serve(tiny)
    wanted = texts(alone)
    alone.kill()
    server = serve(tiny, "--pd", "1:2", *PD)
    assert texts(server) == wanted
    assert server.metric(HANDED) >= len(bodies)
    at_rest(server)


def test_a_decode_replica_serves_what_is_short_or_cached(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--pd", "1:1", "--pd-local-tokens", "100", "--max-total-tokens", "3000")
    body = {"model": tiny.name, "max_tokens": 5, "temperature": 0}
    server.ask("/v1/completions", {**body, "prompt": list(range(3, 93))})
    assert server.metric("forebay:pd_local_total", reason="short") == 1
    server.ask("/v1/completions", {**body, "prompt": list(range(3, 303))})
    assert (server.metric(HANDED), server.metric("forebay:pd_local_total", reason="short")) == (1, 1)
    server.ask("/v1/completions", {**body, "prompt": list(range(3, 353))})
    assert (server.metric(HANDED), server.metric("forebay:pd_local_total", reason="short")) == (1, 2)
    at_rest(server)


def test_clients_that_leave_take_nothing_along(serve: Serve, tiny: Model, expected: Expected) -> None:
    # Slow copies: many clients leave while their copies are in progress.
    server = serve(tiny, "--pd", "1:1", *PD, "--debug-kv-copy-gbps", "0.02")

    class Gone(Exception):
        pass

    async def leave_at(request: dict[str, Any], count: int) -> None:
        def progress(got: int) -> None:
            if got >= count:
                raise Gone

        async with async_client(server) as client:
            with pytest.raises(Gone):
                await native_stream(client, request, progress)

    async def all_leave() -> None:
        await asyncio.gather(*(leave_at(request, 1 + at % 4) for at, (request, _) in enumerate(expected)))

    asyncio.run(all_leave())
    at_rest(server)
    answers = native_together(server, [request for request, _ in expected[:8]])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected[:8]]
    at_rest(server)


@pytest.mark.parametrize("hand", ["rust", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_next_turn_computes_what_is_new(serve: Serve, tiny: Model, hand: str) -> None:
    server = serve(tiny, "--pd", "1:1", *PD, "--page-size", "4", "--hand", hand)
    said = [3 + at * 7 % 200 for at in range(150)]
    computed = declined = 0
    for turn in range(3):
        sampling = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
        answer = server.ask("/generate", {"input_ids": said, "sampling_params": sampling})
        # The last token of the previous turn was never computed.
        known = len(said) - 12 - 1 if turn else 0
        # A copy is declined if its measured cost exceeds the cost of computing, as may happen on a busy machine.
        before, declined = declined, int(server.metric("forebay:restores_declined_total"))
        cached = known if declined == before else computed
        assert answer["meta_info"]["cached_tokens"] == cached // 4 * 4, f"turn {turn}"
        computed = len(said)
        at_rest(server)
        said += answer["output_ids"] + [5 + at * 11 % 200 + turn for at in range(12)]
    assert server.metric(HANDED) == 3
    assert server.metric("forebay:copies_failed_total") == 0
    assert declined < 2
    alone = serve(tiny, "--page-size", "4")
    again = alone.ask("/generate", {"input_ids": said[: -12 - 30], "sampling_params": sampling})
    assert again["output_ids"] == answer["output_ids"]


async def change_roles_under_load(server: Server, load: Load) -> None:
    """Changes the roles of the replicas repeatedly while all streams run."""
    running = asyncio.create_task(load.run(STREAMS))
    try:
        await eventually_async(lambda: running.done() or len(load.live) == STREAMS, "all streams run")
        for replica, role in ROLES:
            moves = asyncio.create_task(load.everyone_moves())
            await asyncio.wait([running, moves], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await moves
            assert server.ask(f"/replicas/{replica}/role", {"role": role})["role"] == role
        load.finish()
        await running
    finally:
        running.cancel()


def test_roles_that_change_under_load_lose_nothing(serve: Serve, tiny: Model, expected: Expected) -> None:
    server = serve(tiny, "--pd", "1:2", *PD, "--debug-kv-copy-gbps", "0.2")
    assert [one["role"] for one in server.replicas()] == ["prefill", "decode", "decode"]
    load = Load(server, tiny, expected)
    asyncio.run(change_roles_under_load(server, load))
    assert load.finished >= STREAMS
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    assert server.metric(HANDED) > 0
    at_rest(server)
    roles = dict(ROLES)
    assert [one["role"] for one in server.replicas()] == [roles[at] for at in range(3)]
    assert server.metric("forebay:replica_role", engine="0", role=roles[0]) == 1


def replica_of(hand: int) -> int:
    """The replica of a hand: the one of two whose memory is not lent to it."""
    lent = [Path(f"/proc/{hand}/fd/{FIRST_LENDER + replica}") for replica in range(2)]
    (own,) = [at for at, path in enumerate(lent) if not path.is_symlink() or HOST_MEMORY not in str(path.readlink())]
    return own


async def kill_under_load(server: Server, load: Load, victim: int) -> None:
    """Kills the hand of one replica repeatedly while all streams run."""
    running = asyncio.create_task(load.run(STREAMS))
    try:
        await eventually_async(lambda: running.done() or len(load.live) == STREAMS, "all streams run")
        ranks = len(server.hands()) // 2
        for number in range(1, KILLS + 1):
            moves = asyncio.create_task(load.everyone_moves())
            await asyncio.wait([running, moves], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await moves
            own = sorted(hand for hand in server.hands() if replica_of(hand) == victim)
            assert len(own) == ranks
            os.kill(own[number % ranks], signal.SIGKILL)
            await eventually_async(
                lambda n=number: (  # type: ignore[misc]
                    server.metric("forebay:hand_deaths_total") == n
                    and [one["status"] for one in server.replicas()] == ["ready"] * 2
                ),
                "the death is counted, and both replicas are ready",
            )
        load.finish()
        await running
    finally:
        running.cancel()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--hand", "rust"), id="rust"),
        pytest.param(("--hand", "torch"), id="torch", marks=pytest.mark.slow),
        pytest.param(("--tp-size", "2"), id="ranks", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_deaths_under_load(serve: Serve, tiny: Model, expected: Expected, victim: int, flags: tuple[str, str]) -> None:
    server = serve(tiny, "--pd", "1:1", *PD, "--debug-kv-copy-gbps", "0.2", *flags)
    load = Load(server, tiny, expected)
    asyncio.run(kill_under_load(server, load, victim))
    assert load.finished >= STREAMS
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    assert server.metric(HANDED) > 0
    at_rest(server)


@pytest.mark.parametrize(
    ("family", "flags", "why"),
    [
        ("llama", ("--dp-size", "3"), "--pd 1:1 is 2 replicas, and --dp-size says 3: leave it off"),
        ("qwen3-moe", ("--ep-size", "2"), "--pd: replicas that share experts step together, and lend no pages yet"),
        ("llama", ("--hicache-write-policy", "write_back"), "--hicache-write-policy has to be write_through"),
        ("llama", ("--disable-radix-cache",), "--pd: --disable-radix-cache leaves no blocks to lend"),
    ],
)
def test_what_cannot_be_lent_is_refused_in_a_sentence(
    models: Models, family: str, flags: tuple[str, ...], why: str
) -> None:
    command = [BINARY, "serve", models(family).path, *FLAGS, "--pd", "1:1", *flags, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert why in ended.stderr
