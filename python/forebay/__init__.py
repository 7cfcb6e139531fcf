"""Forebay, an LLM serving engine.

`LLM` and `AsyncLLM` are the engine as a library: docs/python.md. They are imported on first use, because hands import
this package too and do not need them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.llm import (
        LLM,
        AsyncLLM,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        EngineDeadError,
        ForebayError,
        Logprob,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        RequestError,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        ScoringOutput,
        ScoringRequestOutput,
        StartError,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "ForebayError",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StartError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forebay import llm

    return getattr(llm, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
