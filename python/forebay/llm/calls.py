"""Conversion of prompts to API requests, and of responses to results."""

from __future__ import annotations

import base64
import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from forebay.llm.client import Call
from forebay.llm.errors import RequestError
from forebay.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from forebay.llm.params import PoolingParams, Prompt, SamplingParams, prompt_field

__all__ = ["Calls", "Messages", "read_answer", "unnamed_tokens"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
SCORE = "/score"
_ID = "token_id:"
ALL_TOKENS = (1 << 31) - 1
"""A `max_tokens` above every context length: the server reduces it to the room that is left in the context."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation, in the form of OpenAI's API."""

T = TypeVar("T")


class Calls:
    """Creates calls, with consecutive request ids."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def completion(
        self, prompt: Prompt, params: SamplingParams, priority: int = 0, request_id: str | None = None
    ) -> Call[RequestOutput]:
        """Creates a call that continues a prompt."""
        output = RequestOutput(request_id or self._next(), prompt=prompt if isinstance(prompt, str) else None)

        def fields() -> dict[str, Any]:
            output.prompt, prompt_fields = prompt_field(prompt)
            # Without `max_tokens` the route generates 16 tokens, as OpenAI's does.
            prompt_fields["max_tokens"] = ALL_TOKENS
            return prompt_fields | _sampling(params, params.logprobs, None) | _priority(priority)

        return _generation(COMPLETIONS, fields, output, params)

    def chat(
        self, messages: Messages, params: SamplingParams, more: Mapping[str, Any], request_id: str | None = None
    ) -> Call[RequestOutput]:
        """Creates a call that continues a conversation."""
        output = RequestOutput(request_id or self._next())
        logprobs = None if params.logprobs is None else True

        def fields() -> dict[str, Any]:
            return {"messages": list(messages), **_sampling(params, logprobs, params.logprobs), **more}

        return _generation(CHAT, fields, output, params)

    def embedding(self, prompt: Prompt, params: PoolingParams) -> Call[EmbeddingRequestOutput]:
        """Creates a call that returns the embedding of an input."""
        return self._pooled(
            EMBEDDINGS, prompt, params, EmbeddingRequestOutput, lambda data: EmbeddingOutput(_floats(data["embedding"]))
        )

    def pooling(self, prompt: Prompt, params: PoolingParams, task: str | None) -> Call[PoolingRequestOutput]:
        """Creates a call that returns a pooling model's output for an input."""
        return self._pooled(
            POOLING, prompt, params, PoolingRequestOutput, lambda data: PoolingOutput(_floats(data["data"])), task
        )

    def classification(self, prompt: Prompt, params: PoolingParams) -> Call[ClassificationRequestOutput]:
        """Creates a call that returns the probabilities of a model's labels."""

        def read(data: Any) -> ClassificationOutput:
            return ClassificationOutput(_floats(data["data"]))

        return self._pooled(POOLING, prompt, params, ClassificationRequestOutput, read, "classify")

    def score(self, pair: tuple[str, str], params: PoolingParams) -> Call[ScoringRequestOutput]:
        """Creates a call that returns the score of a pair of texts."""
        number = self._next()

        def fields() -> dict[str, Any]:
            return {"text_1": pair[0], "text_2": pair[1], **params.fields()}

        def read(answer: Any) -> ScoringRequestOutput:
            score = ScoringOutput(answer["data"][0]["score"])
            return ScoringRequestOutput(number, score, num_prompt_tokens=answer["usage"]["prompt_tokens"])

        def failed(error: RequestError) -> ScoringRequestOutput:
            return ScoringRequestOutput(number, ScoringOutput(float("nan")), error=error)

        return Call(SCORE, fields, read, failed)

    def _pooled(
        self,
        path: str,
        prompt: Prompt,
        params: PoolingParams,
        kind: Callable[..., T],
        read_data: Callable[[Any], Any],
        task: str | None = None,
    ) -> Call[T]:
        number = self._next()
        ids = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else None

        def fields() -> dict[str, Any]:
            found = prompt_field(prompt)[1]
            if "prompt_embeds" in found:
                reason = "`prompt_embeds`: a vector is made of a text or of token ids"
                raise RequestError(reason, param="prompt_embeds", code="invalid_value")
            found = {"input": found.pop("prompt"), "encoding_format": "base64", **found, **params.fields()}
            return found if task is None else found | {"task": task}

        def read(answer: Any) -> T:
            tokens = answer["usage"]["prompt_tokens"]
            return kind(number, read_data(answer["data"][0]), prompt_token_ids=ids, num_prompt_tokens=tokens)

        def failed(error: RequestError) -> T:
            empty: Any = {"embedding": "", "data": ""}
            return kind(number, read_data(empty), prompt_token_ids=ids, error=error)

        return Call(path, fields, read, failed)

    def _next(self) -> str:
        return str(next(self._numbers))


def _generation(
    path: str, fields: Callable[[], dict[str, Any]], output: RequestOutput, params: SamplingParams
) -> Call[RequestOutput]:
    """Creates a call that fills `output`; a stream fills it chunk by chunk."""

    def read(answer: Any) -> RequestOutput:
        read_answer(output, answer, params)
        return output

    def failed(error: RequestError) -> RequestOutput:
        output.error, output.finished = error, True
        return output

    return Call(path, fields, read, failed, weight=max(params.n, params.best_of or 0, 1))


def _sampling(params: SamplingParams, logprobs: int | bool | None, top: int | None) -> dict[str, Any]:
    found = {"return_token_ids": True, **params.fields()}
    if logprobs is not None:
        found |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
    return found if top is None else found | {"top_logprobs": top}


def _priority(priority: int) -> dict[str, int]:
    return {"priority": priority} if priority else {}


def read_answer(output: RequestOutput, answer: Any, params: SamplingParams) -> None:
    """Adds a response, or the next chunk of a stream, to `output`."""
    output.prompt_token_ids = answer.get("prompt_token_ids", output.prompt_token_ids)
    if usage := answer.get("usage"):
        output.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    _read_prompt_logprobs(output, answer)
    for choice in answer["choices"]:
        _read_prompt_logprobs(output, choice)
        output.prompt_token_ids = choice.get("prompt_token_ids", output.prompt_token_ids)
        while len(output.outputs) <= choice["index"]:
            output.outputs.append(CompletionOutput(len(output.outputs)))
        _read_choice(output.outputs[choice["index"]], choice)
        if params.logprobs is not None and choice.get("logprobs"):
            _read_logprobs(output.outputs[choice["index"]], choice["logprobs"], params.logprobs)
    output.finished = len(output.outputs) == params.n and all(one.finished() for one in output.outputs)


def _read_choice(found: CompletionOutput, choice: Any) -> None:
    message = choice.get("message") or choice.get("delta") or {}
    found.text += choice.get("text") or message.get("content") or ""
    if reasoning := message.get("reasoning"):
        found.reasoning = (found.reasoning or "") + reasoning
    for call in message.get("tool_calls") or []:
        _read_call(found.tool_calls, call)
    found.token_ids += choice.get("token_ids") or []
    found.finish_reason = choice.get("finish_reason") or found.finish_reason
    found.stop_reason = choice.get("stop_reason", found.stop_reason)


def _read_call(calls: list[dict[str, Any]], call: Any) -> None:
    """Adds a whole tool call, or the next chunk of a call's arguments, to `calls`."""
    at = call.get("index", len(calls))
    while len(calls) <= at:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    calls[at]["id"] = call.get("id") or calls[at]["id"]
    for name, text in call["function"].items():
        calls[at]["function"][name] += text or ""


def _read_logprobs(found: CompletionOutput, logprobs: Any, count: int) -> None:
    entries = list(_chat_logprobs(logprobs) if "content" in logprobs else _completion_logprobs(logprobs))
    found.logprobs = found.logprobs or []
    for sampled, alternatives in entries:
        # The most likely tokens come first. A sampled token that is not one of them comes last.
        ranked = [
            (token, Logprob(value, rank if rank <= count else None, text))
            for rank, (token, value, text) in enumerate(alternatives, 1)
        ]
        by_token = dict(ranked)
        by_token.setdefault(sampled[0], Logprob(sampled[1], None, sampled[2]))
        found.logprobs.append(by_token)
        found.cumulative_logprob = (found.cumulative_logprob or 0.0) + sampled[1]


_Token = tuple[int, float, "str | None"]


def _completion_logprobs(logprobs: Any) -> Iterable[tuple[_Token, list[_Token]]]:
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        yield (_token(token), value, None), [(_token(other), number, None) for other, number in (top or {}).items()]


def _chat_logprobs(logprobs: Any) -> Iterable[tuple[_Token, list[_Token]]]:
    def one(entry: Any) -> _Token:
        text = bytes(entry.get("bytes") or []).decode(errors="replace")
        return _token(entry["token"]), entry["logprob"], text

    for entry in logprobs["content"] or []:
        yield one(entry), [one(other) for other in entry["top_logprobs"]]


def _token(text: str) -> int:
    return int(text.removeprefix(_ID))


def _read_prompt_logprobs(output: RequestOutput, answer: Any) -> None:
    found = answer.get("prompt_logprobs")
    if found is not None:
        output.prompt_logprobs = [
            entry and {int(token): Logprob(**one) for token, one in entry.items()} for entry in found
        ]


def unnamed_tokens(outputs: Iterable[RequestOutput]) -> dict[int, list[Logprob]]:
    """Returns the log-probabilities without a token text, by token id."""
    found: dict[int, list[Logprob]] = {}
    for output in outputs:
        for choice in output.outputs:
            for position in choice.logprobs or []:
                for token, one in position.items():
                    if one.decoded_token is None:
                        found.setdefault(token, []).append(one)
    return found


def _floats(data: str | list[float]) -> list[float]:
    """Decodes numbers in the server's formats: little-endian float32 in base64, or a list."""
    if not isinstance(data, str):
        return data
    numbers = array("f", base64.b64decode(data))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
