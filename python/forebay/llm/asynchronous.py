"""`AsyncLLM`: streaming requests in the caller's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from forebay.llm.calls import Calls, Messages, read_answer
from forebay.llm.client import Call, Client
from forebay.llm.engine import Facts, failures, name_tokens, new_client, wait_until_ready
from forebay.llm.errors import RequestError
from forebay.llm.flags import command_line
from forebay.llm.offline import chat_fields
from forebay.llm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from forebay.llm.params import PoolingParams, Prompt, RequestOutputKind, SamplingParams, to_json
from forebay.llm.server import Server
from forebay.llm.weights import pause, resume, update_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AsyncLLM"]

T = TypeVar("T")
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class AsyncLLM:
    """A model for concurrent requests of one prompt each, with streaming.

    The server is started immediately; the first request waits until it is ready. It is stopped when this object is
    collected, at the end of an `async with` block, or when the interpreter exits. `flags` are those of `forebay serve`,
    as for `LLM`.

    >>> import asyncio
    >>> from forebay import AsyncLLM, SamplingParams
    >>> async def main():
    ...     async with AsyncLLM("smollm2", max_model_len=512) as llm:
    ...         async for output in llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=6)):
    ...             text = output.outputs[0].text
    ...         return text
    >>> asyncio.run(main())
    ' 4, 5,'

    If the caller stops reading a stream early, or cancels a request, the server aborts the request.

    Raises:
        ValueError: a flag is about the server's socket.
    """

    def __init__(self, model: str | os.PathLike[str], **flags: Any) -> None:
        self.model = os.fspath(model)
        self._server = Server([f"--model-path={self.model}", *command_line(flags)])
        self._facts: Facts | None = None
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = WeakKeyDictionary()
        self._calls = Calls()
        self._texts: dict[int, str] = {}

    async def ready(self) -> None:
        """Waits until the server is ready. Raises StartError."""
        if self._facts is None:
            self._facts = await wait_until_ready(self._server, self.model)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt, and yields outputs while tokens are generated.

        The sampling parameter `output_kind` selects whether each output has all tokens so far or only the new ones, or
        whether there is a single output at the end.

        Raises:
            StartError: the server did not start.
            RequestError: the request was refused, or failed while it was running.
            EngineDeadError: the server exited.
        """
        params = await self._sampling(sampling_params)
        call = self._calls.completion(prompt, params, priority, request_id)
        async with aclosing(self._generated(call, params)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a conversation, and yields outputs like `generate`. The arguments are those of `LLM.chat`."""
        params = await self._sampling(sampling_params)
        more = chat_fields(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        call = self._calls.chat(messages, params, more, request_id)
        async with aclosing(self._generated(call, params)) as outputs:
            async for output in outputs:
                yield output

    async def embed(self, prompt: Prompt, pooling_params: PoolingParams | None = None) -> EmbeddingRequestOutput:
        """Returns the embedding of an input, as `LLM.embed` does."""
        return await self._one(self._calls.embedding(prompt, pooling_params or PoolingParams()))

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, *, pooling_task: str | None = None
    ) -> PoolingRequestOutput:
        """Returns the output of a pooling model, as `LLM.encode` does."""
        return await self._one(self._calls.pooling(prompt, pooling_params or PoolingParams(), pooling_task))

    async def classify(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None
    ) -> ClassificationRequestOutput:
        """Returns the probabilities of a classifier's labels."""
        return await self._one(self._calls.classification(prompt, pooling_params or PoolingParams()))

    async def score(
        self, data_1: str, data_2: str, pooling_params: PoolingParams | None = None
    ) -> ScoringRequestOutput:
        """Returns the score of a pair of texts."""
        return await self._one(self._calls.score((data_1, data_2), pooling_params or PoolingParams()))

    async def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the model's authors recommend."""
        return await self._sampling(None)

    async def update_weights(
        self,
        weights: Mapping[str, Tensor] | str | os.PathLike[str],
        *,
        version: str | None = None,
        abort: bool = False,
    ) -> int:
        """Replaces the weights, as `LLM.update_weights` does."""
        return await update_weights(await self._client(), weights, version, abort)

    async def pause(self, mode: str = "keep") -> int:
        """Stops computation until `resume`, as `LLM.pause` does."""
        return await pause(await self._client(), mode)

    async def resume(self) -> None:
        """Continues after `pause`."""
        await resume(await self._client())

    def shutdown(self) -> None:
        """Stops the server. Running requests fail."""
        self._server.stop()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.ready()
        except BaseException:
            self.shutdown()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        if client := self._clients.pop(loop, None):
            client.close()
        await loop.run_in_executor(None, self.shutdown)

    async def _client(self) -> Client:
        """Returns the client of the running event loop."""
        await self.ready()
        assert self._facts is not None
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = new_client(self._server, self._facts)
        return self._clients[loop]

    async def _sampling(self, given: SamplingParams | None) -> SamplingParams:
        await self.ready()
        assert self._facts is not None
        return self._facts.sampling() if given is None else given

    async def _one(self, call: Call[T]) -> T:
        client = await self._client()
        (output,) = await client.every([call], lambda number: None)
        if errors := failures([output]):
            raise RequestError.of_batch(errors, 1, [output])
        return output

    async def _generated(
        self, call: Call[RequestOutput], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        client = await self._client()
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            output = await self._one(call)
            await name_tokens(client, [output], self._texts)
            yield output
            return
        body = to_json(call.fields() | STREAM)
        whole: RequestOutput | None = None
        last: RequestOutput | None = None
        async with aclosing(client.events(call.path, body, call.weight)) as events:
            async for event in events:
                whole = call.read(event)
                if params.output_kind is RequestOutputKind.DELTA:
                    output = replace(whole, outputs=[])
                    read_answer(output, event, params)
                    output.finished = whole.finished
                else:
                    output = _copy(whole)
                if last is None and whole.finished:
                    # The chunk with the usage follows.
                    last = output
                    continue
                if last is not None:
                    last.num_cached_tokens = whole.num_cached_tokens
                    continue
                if event["choices"]:
                    await name_tokens(client, [output], self._texts)
                    yield output
        if last is not None:
            await name_tokens(client, [last], self._texts)
            yield last


def _copy(output: RequestOutput) -> RequestOutput:
    """Returns a copy that later tokens do not change."""
    choices = [
        replace(
            choice,
            token_ids=list(choice.token_ids),
            logprobs=None if choice.logprobs is None else list(choice.logprobs),
            tool_calls=[{**call, "function": dict(call["function"])} for call in choice.tool_calls],
        )
        for choice in output.outputs
    ]
    return replace(output, outputs=choices)
