"""Clients: server-sent events, and many concurrent requests to `/generate`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from openai import AsyncOpenAI, OpenAI

from tests.e2e.server import Server

SECONDS = 300
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

Json = dict[str, Any]


def openai_client(server: Server, api_key: str = "none") -> OpenAI:
    """OpenAI's client without retries, which would hide errors."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=SECONDS)


def openai_async_client(server: Server) -> AsyncOpenAI:
    """OpenAI's client without retries, for many requests at a time."""
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)


def async_client(server: Server) -> httpx2.AsyncClient:
    """A client for many requests at a time."""
    return httpx2.AsyncClient(base_url=server.url, timeout=SECONDS, limits=LIMITS, trust_env=False)


def events(text: str) -> list[Json]:
    """The objects of a whole stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text[-500:]
    return [json.loads(line) for line in lines[:-1]]


async def stream_events(client: httpx2.AsyncClient, path: str, body: Json) -> AsyncIterator[Json]:
    """The objects of a stream, yielded as they arrive; the stream must end with [DONE]."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
        done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                assert not done
                yield json.loads(line.removeprefix("data: "))
        assert done, "the stream ended without [DONE]"


async def native_stream(
    client: httpx2.AsyncClient, request: Json, progress: Callable[[int], None] = lambda count: None
) -> Json:
    """The last chunk of a `/generate` stream. Every chunk must continue the previous one, in tokens and in text.

    `progress` is called with the number of tokens so far.
    """
    last: Json = {"output_ids": [], "text": ""}
    async for chunk in stream_events(client, "/generate", {**request, "stream": True}):
        assert "error" not in chunk, chunk
        assert chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        assert chunk["text"].startswith(last["text"])
        last = chunk
        progress(len(chunk["output_ids"]))
    assert last["meta_info"]["finish_reason"], last
    return last


async def _together(server: Server, requests: Sequence[Json]) -> list[Json]:
    async with async_client(server) as client:
        return list(await asyncio.gather(*(native_stream(client, request) for request in requests)))


def native_together(server: Server, requests: Sequence[Json], *, held: bool = False) -> list[Json]:
    """The last chunks of concurrent streams. With `held`, no step is computed until all requests have arrived."""
    if not held:
        return asyncio.run(_together(server, requests))
    with ThreadPoolExecutor(1) as thread:
        with server.held(len(requests)):
            answers = thread.submit(asyncio.run, _together(server, requests))
        return answers.result()


def native_one_by_one(server: Server, requests: Sequence[Json]) -> list[Json]:
    """The answers to requests for `/generate`, sent one after the other."""
    return [server.ask("/generate", request) for request in requests]


def cut(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Cuts `values` into pieces of `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
