"""Streams of the Python library, in the caller's event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from forebay import (
    AsyncLLM,
    EngineDeadError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StartError,
    StructuredOutputsParams,
)
from tests.e2e.models import Model
from tests.e2e.processes import children, is_hand
from tests.e2e.test_llm import texts
from tests.e2e.waiting import eventually_async

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def flags(tiny: Model) -> dict[str, Any]:
    return {"model": str(tiny.path), "dtype": "float32", "threads": 1}


def with_llm(flags: dict[str, Any], story: Callable[[AsyncLLM], Coroutine[Any, Any, T]]) -> T:
    """Runs a story in an event loop of its own."""

    async def run() -> T:
        async with AsyncLLM(**flags) as llm:
            return await asyncio.wait_for(story(llm), 120)

    return asyncio.run(run())


async def collected(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def kind(output_kind: RequestOutputKind, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "output_kind": output_kind, **more})


@pytest.mark.parametrize("chat", [False, True])
def test_the_kinds_of_outputs_tell_the_same(flags: dict[str, Any], chat: bool) -> None:
    async def story(llm: AsyncLLM) -> None:
        def ask(params: SamplingParams) -> AsyncIterator[RequestOutput]:
            if chat:
                return llm.chat([{"role": "user", "content": "hello"}], params)
            return llm.generate("hello", params)

        (whole,) = await collected(ask(kind(RequestOutputKind.FINAL_ONLY, n=2, logprobs=1)))
        cumulative = await collected(ask(kind(RequestOutputKind.CUMULATIVE, n=2, logprobs=1)))
        deltas = await collected(ask(kind(RequestOutputKind.DELTA, n=2, logprobs=1)))
        assert [one.token_ids for one in cumulative[-1].outputs] == [one.token_ids for one in whole.outputs]
        assert [one.text for one in cumulative[-1].outputs] == [one.text for one in whole.outputs]
        assert [one.logprobs for one in cumulative[-1].outputs] == [one.logprobs for one in whole.outputs]
        assert cumulative[-1].prompt_token_ids == whole.prompt_token_ids
        assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
        assert cumulative[-1].num_cached_tokens is not None
        # Later outputs do not change earlier ones.
        counts = [sum(len(one.token_ids) for one in output.outputs) for output in cumulative]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 16
        for index in (0, 1):
            own = [one for output in deltas for one in output.outputs if one.index == index]
            assert [token for one in own for token in one.token_ids] == whole.outputs[index].token_ids
            assert "".join(one.text for one in own) == whole.outputs[index].text
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]

    with_llm(flags, story)


def test_many_streams_at_a_time(flags: dict[str, Any]) -> None:
    async def story(llm: AsyncLLM) -> None:
        prompts = texts(30)
        alone = [(await collected(llm.generate(text, GREEDY)))[-1].outputs for text in prompts[:3]]
        together = await asyncio.gather(*(collected(llm.generate(text, GREEDY, f"my-{text}")) for text in prompts))
        assert [stream[-1].outputs for stream in together[:3]] == alone
        assert [stream[-1].request_id for stream in together] == [f"my-{text}" for text in prompts]
        assert all(output.finished == (output is stream[-1]) for stream in together for output in stream)

    with_llm(flags, story)


@pytest.mark.parametrize("way", ["left", "cancelled"])
def test_a_stream_that_nobody_reads_is_stopped(flags: dict[str, Any], way: str) -> None:
    async def story(llm: AsyncLLM) -> None:
        endless = SamplingParams(max_tokens=None, ignore_eos=True)

        async def read() -> None:
            stream = llm.generate("x", endless)
            async for _ in stream:
                begun.set()
                if way == "left":
                    await stream.aclose()
                    return

        begun = asyncio.Event()
        task = asyncio.ensure_future(read())
        await begun.wait()
        if way == "cancelled":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client = await llm._client()
        requests = 1
        while requests:
            info = await client.ask("GET", "/server_info")
            requests = info["internal_states"][0]["requests"]
        # The gate no longer counts the call.
        await eventually_async(lambda: client._gate.held == 0, "the gate holds no call")

    with_llm(flags, story)


def test_calls_in_a_stream(flags: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]

    async def story(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=60, seed=3, extra_args={"tool_choice": "required"})
        outputs = await collected(llm.chat([{"role": "user", "content": "hi"}], params, tools=tools))
        (call, *_) = outputs[-1].outputs[0].tool_calls
        assert call["function"] == {"name": "now", "arguments": call["function"]["arguments"]}
        assert call["id"]
        params.output_kind = RequestOutputKind.DELTA
        deltas = await collected(llm.chat([{"role": "user", "content": "hi"}], params, tools=tools))
        pieces = [one for output in deltas for choice in output.outputs for one in choice.tool_calls[:1]]
        assert "".join(piece["function"]["name"] for piece in pieces) == "now"

    with_llm(flags, story)


def test_errors(flags: dict[str, Any]) -> None:
    async def story(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=r"^`temperature`"):
            await collected(llm.generate("x", SamplingParams(temperature=-1)))
        form = StructuredOutputsParams(regex="(")
        with pytest.raises(RequestError) as caught:
            await collected(llm.generate("x", SamplingParams(structured_outputs=form)))
        assert caught.value.param == "structured_outputs.regex"
        with pytest.raises(RequestError, match="makes no vectors"):
            await llm.embed("x")

    with_llm(flags, story)


def test_a_server_that_dies_ends_its_streams(flags: dict[str, Any]) -> None:
    async def story(llm: AsyncLLM) -> None:
        (hand,) = [pid for pid in children(llm._server.process.pid) if is_hand(pid)]
        # A stopped hand generates no token.
        os.kill(hand, signal.SIGSTOP)
        stream = asyncio.ensure_future(collected(llm.generate("x", GREEDY)))
        client = await llm._client()
        requests = 0
        while not requests:
            info = await client.ask("GET", "/server_info")
            requests = info["internal_states"][0]["requests"]
        llm._server.process.kill()
        os.kill(hand, signal.SIGCONT)
        with pytest.raises(EngineDeadError, match="signal 9"):
            await stream

    with_llm(flags, story)


def test_a_refused_model(flags: dict[str, Any]) -> None:
    async def enter() -> None:
        async with AsyncLLM("./nowhere"):
            pass

    with pytest.raises(StartError, match="is not available"):
        asyncio.run(enter())

    async def first_request() -> None:
        llm = AsyncLLM("./nowhere")
        with pytest.raises(StartError, match="is not available"):
            await collected(llm.generate("x"))
        llm.shutdown()

    asyncio.run(first_request())


def test_one_library_in_two_event_loops(flags: dict[str, Any]) -> None:
    llm = AsyncLLM(**flags)
    first = asyncio.run(collected(llm.generate("x", GREEDY)))
    second = asyncio.run(collected(llm.generate("x", GREEDY)))
    llm.shutdown()
    assert first[-1].outputs == second[-1].outputs
