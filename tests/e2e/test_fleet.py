"""Three brains behind a router, with requests at the limits and beyond them.

`make test-fleet` sends 10 000 generated requests; the usual run sends fewer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.client import Json, async_client
from tests.e2e.models import TINY_CONTEXT, VOCABULARY, Model
from tests.e2e.processes import peak_memory
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, paced
from tests.e2e.test_router import KV_TOKENS, Cluster, cluster

GENERATED = int(os.environ.get("FOREBAY_FLEET_REQUESTS", "300"))
AT_ONCE = 16
ADDRESS_SPACE = 8 << 30
"""Bytes of address space: a brain that exceeds them aborts, as on a machine without more memory."""
BUDGET = 256 << 20
MOST_MEMORY = 1 << 30
"""The most bytes that a brain may use: the budget of requests in flight, and its own needs."""
JSON_LIMIT = 4 << 20
REFUSED = {400, 413, 429}
CHAT: Json = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture
def fleet(tmp_path: Path, tiny: Model) -> Iterator[Cluster]:
    """Brains with a simulated device."""
    budget = ("--max-request-bytes-in-flight", str(BUDGET))
    yield from cluster(tmp_path, tiny, *SIM, *paced(tmp_path, 2000, KV_TOKENS), *budget)


def started(fleet: Cluster) -> Server:
    """Starts three brains with limited memory, and their router."""
    fleet.add(3)
    for backend in fleet.backends:
        resource.prlimit(backend.pid, resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    return fleet.route()


def survived(fleet: Cluster, router: Server) -> None:
    """Checks that every brain lives, is ready, has kept within its memory, and holds no requests."""
    for backend in fleet.backends:
        assert backend.process.poll() is None, backend.log()
        assert backend.http.get("/health").status_code == 200
        backend.wait_until_idle()
        assert peak_memory(backend.pid) < MOST_MEMORY
    assert router.http.get("/health").status_code == 200
    answer = router.ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 2


def filled(before: str, element: str, after: str) -> bytes:
    """The largest JSON body that is allowed: `element` repeated, with commas between."""
    count = (JSON_LIMIT - len(before) - len(after)) // (len(element) + 1)
    return (before + ",".join([element] * count) + after).encode()


def encoded(body: Json) -> bytes:
    return json.dumps(body).encode()


CHAT_HEAD = json.dumps(CHAT)[:-1]
KILLERS: dict[str, tuple[str, bytes]] = {
    "stop ids for each of many prompts": (
        "/generate",
        encoded({"text": ["a"] * 2000, "sampling_params": {"stop_token_ids": [0] * 100_000, "max_new_tokens": 2}}),
    ),
    "a stop string for each of many choices": (
        "/v1/chat/completions",
        encoded({**CHAT, "n": 128, "stop": "s" * (1 << 20)}),
    ),
    "biases for each of many prompts": (
        "/v1/completions",
        encoded({"prompt": ["a"] * 4000, "logit_bias": {str(one): 1 for one in range(VOCABULARY)}, "max_tokens": 2}),
    ),
    "distinct stop ids, each compared with the others": (
        "/v1/completions",
        encoded({"prompt": ["a"] * 4096, "stop_token_ids": [*range(2000), *[1999] * 4000], "max_tokens": 2}),
    ),
    "a prompt that cannot fit": (
        "/v1/chat/completions",
        encoded({**CHAT, "messages": [{"role": "user", "content": "a" * (JSON_LIMIT - 200)}]}),
    ),
    "numbers for the template": (
        "/v1/chat/completions",
        filled(f'{CHAT_HEAD}, "chat_template_kwargs": {{"x": [', "0", "]}}"),
    ),
    "objects for the template": (
        "/v1/chat/completions",
        filled(f'{CHAT_HEAD}, "chat_template_kwargs": {{"x": [', "{}", "]}}"),
    ),
    "messages without end": ("/v1/chat/completions", filled('{"messages": [', '{"role":"user","content":""}', "]}")),
    "tool calls without end": (
        "/v1/chat/completions",
        filled('{"messages": [{"role": "assistant", "content": "a", "tool_calls": [', "{}", "]}]}"),
    ),
    "prompts without end": ("/v1/completions", filled('{"max_tokens": 2, "prompt": [', "[1]", "]}")),
    "more than JSON may be": ("/v1/completions", b'{"prompt": "' + b"a" * JSON_LIMIT + b'"}'),
    "embeddings that are none": ("/v1/completions", b'{"prompt_embeds": "' + b"A" * (8 << 20) + b'"}'),
    "ids to detokenise": ("/detokenize", filled('{"tokens": [', "1", "]}")),
    "documents without end": ("/rerank", filled('{"query": "a", "documents": [', '"b"', "]}")),
}
"""Before there were limits, each body killed a brain, or took most of its memory or all of its threads."""


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_fleet_survives_what_used_to_kill_it(fleet: Cluster, at_once: int) -> None:
    router = started(fleet)

    async def send() -> dict[str, list[int]]:
        async with async_client(router) as client:

            async def post(path: str, body: bytes) -> int:
                headers = {"content-type": "application/json"}
                return (await client.post(path, content=body, headers=headers)).status_code

            found = {}
            for name, (path, body) in KILLERS.items():
                found[name] = list(await asyncio.gather(*(post(path, body) for _ in range(at_once))))
                # Other clients are answered meanwhile.
                assert (await client.get("/health")).status_code == 200
            return found

    answers = asyncio.run(send())
    assert all(set(statuses) <= REFUSED for statuses in answers.values()), answers
    survived(fleet, router)


def generated(seed: int) -> tuple[str, Json]:
    """A request at the limits, which must be served, or refused for its total size."""
    draw = random.Random(seed)
    ids = draw.sample(range(VOCABULARY), 1024)

    def maybe(value: Any) -> Any:
        return value if draw.random() < 0.3 else None

    shared: Json = {
        "stop": maybe(["s" * 256] * 16),
        "stop_token_ids": maybe(ids),
        "logit_bias": maybe({str(token): draw.uniform(-100, 100) for token in ids}),
        "temperature": draw.choice([0, 1, 1e30]),
        "top_p": draw.choice([1e-30, 1]),
        "repetition_penalty": draw.choice([0.01, 1, 100]),
        "ignore_eos": draw.random() < 0.5,
        "min_tokens": draw.choice([0, 1]),
    }
    most = draw.choice([1, 2, 16])
    body: Json
    if draw.random() < 0.3:
        prompt = draw.choice(["a", "a " * (TINY_CONTEXT // 4), "\U0001f600" * 64])
        params = {**shared, "max_new_tokens": most, "n": draw.choice([1, 8])}
        path, body = "/generate", {"text": [prompt] * draw.choice([1, 8, 64]), "sampling_params": params}
        body |= {"return_logprob": draw.random() < 0.5, "top_logprobs_num": 20}
    elif draw.random() < 0.5:
        prompts = [draw.choices(range(VOCABULARY), k=draw.choice([1, 16]))] * draw.choice([1, 16, 128])
        path, body = "/v1/completions", {**shared, "prompt": prompts, "max_tokens": most, "n": draw.choice([1, 8])}
        body |= {"logprobs": maybe(20), "stream": draw.random() < 0.5}
    else:
        messages = [{"role": "user", "content": "a" * draw.choice([1, 512])}] * draw.choice([1, 16])
        path, body = "/v1/chat/completions", {**shared, "messages": messages, "max_tokens": most}
        body |= {"n": draw.choice([1, 128]), "stream": draw.random() < 0.5}
        if draw.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 20}
        if draw.random() < 0.3:
            body |= {"chat_template_kwargs": {"x": [0] * 4096}}
    return path, {name: value for name, value in body.items() if value is not None}


async def answered(client: httpx2.AsyncClient, seed: int) -> int:
    """Sends a request; one client in eight disconnects before the end."""
    path, body = generated(seed)
    if seed % 8 == 0:
        async with client.stream("POST", path, json=body) as response:
            return response.status_code
    response = await client.post(path, json=body)
    if response.status_code == 200 and body.get("stream"):
        assert response.text.rstrip().endswith("data: [DONE]"), response.text[-300:]
    return response.status_code


def test_a_fleet_survives_requests_at_the_limits(fleet: Cluster) -> None:
    router = started(fleet)
    seeds = iter(range(GENERATED))
    statuses: list[int] = []

    async def work(client: httpx2.AsyncClient) -> None:
        for seed in seeds:
            statuses.append(await answered(client, seed))

    async def send() -> None:
        async with async_client(router) as client:
            await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))

    asyncio.run(send())
    assert len(statuses) == GENERATED
    assert set(statuses) <= REFUSED | {200}, {status: statuses.count(status) for status in set(statuses)}
    assert statuses.count(200) > GENERATED / 2
    survived(fleet, router)
