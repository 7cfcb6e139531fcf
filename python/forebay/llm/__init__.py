"""The engine as a library: it starts a private server and connects to its Unix socket in a private folder.

The server is the same program as `forebay serve`. `LLM` or `AsyncLLM` starts it; it exits with the interpreter at the
latest. This package imports only the standard library.
"""

from forebay.llm.asynchronous import AsyncLLM
from forebay.llm.errors import EngineDeadError, ForebayError, RequestError, StartError
from forebay.llm.offline import LLM
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
from forebay.llm.params import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)

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
