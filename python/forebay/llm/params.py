"""Parameters of requests: sampling, pooling, and the forms of prompts."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

from forebay.llm.errors import RequestError

__all__ = [
    "PoolingParams",
    "Prompt",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "one_each",
    "prompt_field",
    "prompt_list",
    "to_json",
]


class RequestOutputKind(Enum):
    """The content of each output of a stream of `AsyncLLM`."""

    CUMULATIVE = 0
    """All tokens so far."""
    DELTA = 1
    """The new tokens."""
    FINAL_ONLY = 2
    """One output, at the end."""


@dataclass
class StructuredOutputsParams:
    """The form of an answer. Exactly one of the first six must be given.

    >>> StructuredOutputsParams(choice=["yes", "no"]).fields()
    {'choice': ['yes', 'no']}
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in Lark or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """A structural tag, as an object or as text."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space that JSON may have between tokens."""
    disable_any_whitespace: bool | None = None
    """True: JSON without white space."""

    def fields(self) -> dict[str, Any]:
        """The object of the API."""
        return _given(self)


@dataclass
class SamplingParams:
    r"""Parameters of sampling, with the names and defaults of vLLM.

    Values are checked by the server, whose error names the parameter. Without parameters, methods sample as the model's
    authors recommend; see `LLM.get_default_sampling_params`.

    >>> SamplingParams(temperature=0, max_tokens=4, stop="\n").fields()["stop"]
    '\n'
    """

    n: int = 1
    """Choices of each prompt."""
    best_of: int | None = None
    """Choices to generate, of which the `n` most likely are returned. Not for chats."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, for each occurrence."""
    repetition_penalty: float = 1.0
    """Divides positive logits of earlier tokens, and multiplies negative ones."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """The share of probability that is kept."""
    top_k: int = 0
    """The number of candidates; 0 or -1: all."""
    min_p: float = 0.0
    """Tokens with less than this share of the largest probability are dropped."""
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text."""
    bad_words: Sequence[str] | None = None
    """Words that the answer does not have."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """The largest number of tokens to generate; None: as many as fit into the context."""
    min_tokens: int = 0
    """Tokens to generate before a stop counts."""
    logprobs: int | None = None
    """Alternatives whose log-probabilities are returned with each token's, 0 to 20."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt. Not for streams."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Without an effect: there are no such spaces."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers that are added to logits, by token id."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled."""
    thinking_token_budget: int | None = None
    """The largest number of tokens of reasoning."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the answer."""
    extra_args: Mapping[str, Any] | None = None
    """Further fields of the API, which are sent unchanged: docs/api.md lists them."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The content of each output of a stream. Has no effect without a stream."""

    def fields(self) -> dict[str, Any]:
        """The fields of the API, except for log-probabilities, whose fields depend on the route."""
        found = _given(self)
        for name in ("output_kind", "extra_args", "logprobs", "spaces_between_special_tokens"):
            found.pop(name, None)
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.fields()
        return {**found, **(self.extra_args or {})}

    def clone(self) -> SamplingParams:
        """A copy."""
        return dataclasses.replace(self)


@dataclass
class PoolingParams:
    """Parameters of vectors and scores.

    >>> PoolingParams(dimensions=64).fields()
    {'dimensions': 64}
    """

    dimensions: int | None = None
    """Keep this many of each vector's first numbers."""
    normalize: bool | None = None
    """Divide each vector by its length; None: the choice of the model's authors."""
    use_activation: bool | None = None
    """False: return the model's raw scores, without a sigmoid that its authors may use."""
    truncate_prompt_tokens: int | None = None
    """Cut longer inputs to this many tokens; -1: to the model's limit."""

    def fields(self) -> dict[str, Any]:
        """The fields of the API."""
        return _given(self)


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str
    """Blocks of the prompt are only shared with requests that have the same salt."""


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str
    """The text of the tokens. It is only copied to the output."""
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, token ids, or an object with either. An object may have `prompt_embeds`, the bytes of a safetensors file."""

_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"}


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts, as a list. A single prompt may be given without one."""
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    found: Any = [prompts] if one else prompts
    return list(found)


def prompt_field(prompt: Prompt) -> tuple[str | None, dict[str, Any]]:
    """The text of a prompt if it has one, and the fields of the API.

    Raises:
        RequestError: it is not a prompt.
    """
    if isinstance(prompt, str):
        return prompt, {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return None, {"prompt": list(prompt)}
    fields: Mapping[str, Any] = prompt
    unknown = sorted(set(fields) - _PROMPT_FIELDS)
    if unknown:
        name = unknown[0]
        reason = "images are parts of a conversation: see LLM.chat" if name == "multi_modal_data" else "not known here"
        raise RequestError(f"`{name}`: {reason}", param=name, code="invalid_value")
    text = fields.get("prompt")
    salt = {"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}
    if "prompt_embeds" in fields:
        return text, {"prompt_embeds": base64.b64encode(fields["prompt_embeds"]).decode(), **salt}
    if "prompt_token_ids" in fields:
        return text, {"prompt": list(fields["prompt_token_ids"]), **salt}
    if text is None:
        raise RequestError("`prompt`: a text or token ids are needed", param="prompt", code="invalid_value")
    return text, {"prompt": text, **salt}


def one_each(name: str, given: Any, count: int) -> Sequence[Any]:
    """A value for each of `count` prompts: `given` is one value for all, or a list with one for each."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"`{name}`: {len(given)} entries for {count} prompts")
    return given


def _given(params: Any) -> dict[str, Any]:
    """The fields that are not None, JSON-like."""
    values = ((field.name, getattr(params, field.name)) for field in dataclasses.fields(params))
    return {name: _plain(value) for name, value in values if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple | set) else value


def to_json(fields: Mapping[str, Any]) -> bytes:
    """The body of a request.

    Raises:
        RequestError: a value is nothing that JSON can hold; the error names its field.
    """
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RequestError(f"`{name}`: {error}", param=name, code="invalid_value") from error
        raise
