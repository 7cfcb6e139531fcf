"""The results of requests, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forebay.llm.errors import RequestError

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TokenLogprobs",
]


@dataclass
class Logprob:
    """The log-probability of a token, computed from the unmodified logits."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token. None for a sampled token that is not among the requested alternatives."""
    decoded_token: str | None = None
    """The token's text; U+FFFD replaces an incomplete character."""


TokenLogprobs = dict[int, Logprob]
"""The alternatives at one position, by token id, including the actual token of that position."""


@dataclass
class CompletionOutput:
    """One generated choice."""

    index: int
    text: str = ""
    """The content. Reasoning and tool calls are separate."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """The sum of the tokens' log-probabilities, if they were requested."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if they were requested."""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`; None while the choice is incomplete."""
    stop_reason: int | str | None = None
    """The stop string or stop token; None for end-of-sequence."""
    reasoning: str | None = None
    """The reasoning before the content, in a chat with a reasoning model."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls, in a chat, in the form of OpenAI's API."""

    def finished(self) -> bool:
        """True if the choice is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The result of a prompt or a conversation."""

    request_id: str
    prompt: str | None = None
    """The prompt's text; None if the prompt was given as token ids, or is a conversation."""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per token of the prompt (None for the first), if they were requested."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The `n` choices."""
    finished: bool = False
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were found in the prefix cache."""
    error: RequestError | None = None
    """The reason why the request failed; None if it did not fail."""


@dataclass
class PoolingOutput:
    """The model's output for an input."""

    data: list[float]


@dataclass
class EmbeddingOutput:
    """The embedding of an input."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of elements of the vector."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """Probabilities of a model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


T = TypeVar("T")


@dataclass
class _PooledOutput(Generic[T]):
    request_id: str
    outputs: T
    prompt_token_ids: list[int] | None = None
    """The input's token ids, if it was given as token ids."""
    num_prompt_tokens: int | None = None
    """The number of tokens of the input, special tokens included."""
    finished: bool = True
    error: RequestError | None = None
    """The reason why the request failed; None if it did not fail."""


class PoolingRequestOutput(_PooledOutput[PoolingOutput]):
    """The output of `LLM.encode` for an input."""


class EmbeddingRequestOutput(_PooledOutput[EmbeddingOutput]):
    """The output of `LLM.embed` for an input."""


class ClassificationRequestOutput(_PooledOutput[ClassificationOutput]):
    """The output of `LLM.classify` for an input."""


class ScoringRequestOutput(_PooledOutput[ScoringOutput]):
    """The output of `LLM.score` for a pair."""
