"""Embeddings and images reach hands on other machines: the same tokens as from a local hand, also after kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import httpx2
import pytest

from tests.e2e.client import Json, stream_events
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.test_images import FAMILIES, chat, part, picture, png, text
from tests.e2e.test_outposts import Gate, Worker
from tests.e2e.test_prompt_embeds import embeddings
from tests.e2e.waiting import eventually, eventually_async

TOKENS = 800
"""Tokens of each stream: enough that a kill interrupts it."""
SHOWN = 200
"""Tokens of each stream of models with slower steps."""


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with ExitStack() as stack:
        yield Gate(tmp_path_factory.mktemp("gate"), stack)


def bodies(model: Model) -> list[Json]:
    """Prompts as embeddings, some of them long, and two as tokens."""
    more: Json = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    prompts = [[5 + (at * 7 + length) % 200 for at in range(length)] for length in (3, 40, 300, 301, 17, 64)]
    embedded = [{"prompt_embeds": embeddings(model, prompt), **more} for prompt in prompts]
    return [*embedded, *({"prompt": prompt, **more} for prompt in prompts[:2])]


async def streams(server: Server, path: str, asked: Sequence[Json], told: list[int] | None = None) -> list[list[int]]:
    """The tokens of concurrent streams, which must all finish normally; `told` counts the tokens received so far."""

    async def one(client: httpx2.AsyncClient, body: Json) -> list[int]:
        found: list[int] = []
        async for event in stream_events(client, path, body):
            for choice in event.get("choices", []):
                ids = choice.get("token_ids") or []
                found += ids
                if told is not None:
                    told[0] += len(ids)
        assert len(found) == body["max_tokens"]
        return found

    async with httpx2.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
        return await asyncio.gather(*(one(client, body) for body in asked))


async def disturbed(server: Server, path: str, asked: Sequence[Json], kill: int) -> list[list[int]]:
    """Like `streams`, but kills the process `kill` once the streams have received some tokens."""
    told = [0]
    running = asyncio.create_task(streams(server, path, asked, told))
    await eventually_async(lambda: told[0] > 4 * len(asked) or running.done(), "tokens arrive")
    assert not running.done(), "the streams are too short to be disturbed"
    os.kill(kill, signal.SIGKILL)
    return await running


def only_hand(worker: Worker) -> int:
    eventually(worker.hands, "the hand runs", 60)
    (hand,) = worker.hands()
    return hand


def test_embeddings_reach_hands_elsewhere_and_follow_to_the_next(serve: Serve, tiny: Model, gate: Gate) -> None:
    asked = bodies(tiny)
    local = serve(tiny)
    wanted = asyncio.run(streams(local, "/v1/completions", asked))
    local.kill()
    server = serve(tiny, *gate.flags(), "--hand-restarts", "50", healthy=False)
    worker = gate.worker("--name", "first")
    server.wait_for_health()
    assert asyncio.run(streams(server, "/v1/completions", asked)) == wanted
    assert server.metric("forebay:hand_deaths_total") == 0

    # Kill the hand alone: its outpost still has the payloads.
    hand = only_hand(worker)
    assert asyncio.run(disturbed(server, "/v1/completions", asked, hand)) == wanted
    assert server.metric("forebay:hand_deaths_total") == 1
    # Kill the worker: the payloads are sent to another one.
    server.wait_for_health()
    only_hand(worker)
    gate.worker("--name", "second")
    assert asyncio.run(disturbed(server, "/v1/completions", asked, worker.process.pid)) == wanted
    assert server.metric("forebay:hand_deaths_total") == 2
    eventually(lambda: server.metric("forebay:arena_used_bytes") == 0, "all room of the arena is free")


def test_embeddings_follow_their_request_to_another_replica(serve: Serve, tiny: Model, gate: Gate) -> None:
    asked = bodies(tiny)
    local = serve(tiny)
    wanted = asyncio.run(streams(local, "/v1/completions", asked))
    local.kill()
    server = serve(tiny, *gate.flags(), "--dp-size", "2", "--load-balance-method", "round_robin", healthy=False)
    first, second = gate.worker("--name", "first"), gate.worker("--name", "second")
    server.wait_for_health()
    eventually(lambda: first.hands() and second.hands(), "both hands run", 60)
    eventually(lambda: all(server.metric("forebay:replica_up", engine=at) == 1 for at in "01"), "both are up", 60)
    assert asyncio.run(disturbed(server, "/v1/completions", asked, first.process.pid)) == wanted
    assert server.metric("forebay:hand_deaths_total") == 1
    eventually(lambda: server.metric("forebay:arena_used_bytes") == 0, "all room of the arena is free")


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_seen_elsewhere_and_again_after_a_death(
    serve: Serve, models: Models, gate: Gate, family: str
) -> None:
    model = models(family)
    flags = ("--image-budget", "50", "--chunked-prefill-size", "16")
    more: Json = {"max_tokens": SHOWN, "stream": True}
    asked = [
        chat(part(png(picture(80, 6, 6))), text("a"), part(png(picture(81, 5, 5))), **more),
        chat(text("which"), part(png(picture(82, 9, 9))), **more),
        chat(text("none"), **more),
    ]
    local = serve(model, *flags)
    wanted = asyncio.run(streams(local, "/v1/chat/completions", asked))
    local.kill()
    server = serve(model, *gate.flags(), *flags, "--hand-restarts", "50", healthy=False)
    worker = gate.worker()
    server.wait_for_health()
    assert asyncio.run(streams(server, "/v1/chat/completions", asked)) == wanted
    again = [chat(text("now"), part(png(picture(90 + at, 4, 7))), text("a"), **more) for at in range(3)]
    undisturbed = asyncio.run(streams(server, "/v1/chat/completions", again))
    hand = only_hand(worker)
    assert asyncio.run(disturbed(server, "/v1/chat/completions", again, hand)) == undisturbed
    server.wait_for_health()
    only_hand(worker)
    gate.worker()
    assert asyncio.run(disturbed(server, "/v1/chat/completions", asked, worker.process.pid)) == wanted
    assert server.metric("forebay:hand_deaths_total") == 2
    eventually(lambda: server.metric("forebay:arena_used_bytes") == 0, "all room of the arena is free")
