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
    """The tokens that each output of an `AsyncLLM` stream contains."""

    CUMULATIVE = 0
    """All tokens so far."""
    DELTA = 1
    """The new tokens."""
    FINAL_ONLY = 2
    """All tokens, in one output at the end."""


@dataclass
class StructuredOutputsParams:
    """The required form of the generated text. Exactly one of the first six fields must be given.

    >>> StructuredOutputsParams(choice=["yes", "no"]).fields()
    {'choice': ['yes', 'no']}
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression."""
    choice: Sequence[str] | None = None
    """Texts, one of which is generated."""
    grammar: str | None = None
    """A grammar in Lark or GBNF."""
    json_object: bool | None = None
    """True requires a JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """A structural tag, as an object or as text."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space that is allowed between JSON tokens."""
    disable_any_whitespace: bool | None = None
    """True forbids white space in JSON."""

    def fields(self) -> dict[str, Any]:
        """Returns the object for the API."""
        return _given(self)


@dataclass
class SamplingParams:
    r"""Parameters of sampling, with the names and defaults of vLLM.

    Values are checked by the server, whose error names the parameter. If no parameters are given, methods use those
    that the model's authors recommend; see `LLM.get_default_sampling_params`.

    >>> SamplingParams(temperature=0, max_tokens=4, stop="\n").fields()["stop"]
    '\n'
    """

    n: int = 1
    """The number of choices per prompt."""
    best_of: int | None = None
    """The number of choices to generate, of which the `n` most likely are returned. Not for chats."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens that were already generated, once for each occurrence."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that occurred before, and multiplies negative ones."""
    temperature: float = 1.0
    """The sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """The cumulative probability of the most likely tokens that are kept."""
    top_k: int = 0
    """The number of most likely tokens that are kept; 0 or -1: all."""
    min_p: float = 0.0
    """Tokens with less than this fraction of the largest probability are dropped."""
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: str | Sequence[str] | None = None
    """Strings that stop generation."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that stop generation."""
    bad_words: Sequence[str] | None = None
    """Words that are never generated."""
    include_stop_str_in_output: bool = False
    """Whether the stop string is kept in the text."""
    ignore_eos: bool = False
    """Whether generation continues after an end-of-sequence token."""
    max_tokens: int | None = 16
    """The largest number of tokens to generate; None: as many as fit into the context."""
    min_tokens: int = 0
    """The number of tokens to generate before a stop condition counts."""
    logprobs: int | None = None
    """The number of alternatives whose log-probabilities are returned for each token, 0 to 20."""
    prompt_logprobs: int | None = None
    """The number of alternatives whose log-probabilities are returned for each prompt token. Not for streams."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    spaces_between_special_tokens: bool = True
    """Has no effect: special tokens are never separated by spaces."""
    logit_bias: Mapping[int, float] | None = None
    """Values that are added to logits, by token id."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled."""
    thinking_token_budget: int | None = None
    """The largest number of reasoning tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """The required form of the generated text."""
    extra_args: Mapping[str, Any] | None = None
    """Additional fields of the API, which are sent unchanged: docs/api.md lists them."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The tokens that each output of a stream contains. Only used for streams."""

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the API, except those for log-probabilities, which depend on the route."""
        found = _given(self)
        for name in ("output_kind", "extra_args", "logprobs", "spaces_between_special_tokens"):
            found.pop(name, None)
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.fields()
        return {**found, **(self.extra_args or {})}

    def clone(self) -> SamplingParams:
        """Returns a copy."""
        return dataclasses.replace(self)


@dataclass
class PoolingParams:
    """Parameters of pooling requests, whose results are vectors or scores.

    >>> PoolingParams(dimensions=64).fields()
    {'dimensions': 64}
    """

    dimensions: int | None = None
    """The number of leading elements of each vector to keep; None: all."""
    normalize: bool | None = None
    """Whether each vector is divided by its norm; None: the setting of the model's authors."""
    use_activation: bool | None = None
    """False returns raw scores, without the activation function that the model's configuration may name."""
    truncate_prompt_tokens: int | None = None
    """The number of tokens to which longer inputs are cut; -1: the model's limit."""

    def fields(self) -> dict[str, Any]:
        """Returns the parameters that are not None, by their names in the API."""
        return _given(self)


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str
    """The prompt's cached blocks are shared only with requests that have the same salt."""


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str
    """The text of the tokens. It is only copied to the result."""
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, token ids, or an object with either. An object may have `prompt_embeds`, bytes of a safetensors file."""

_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"}


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns the prompts as a list, even if a single prompt is given."""
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    found: Any = [prompts] if one else prompts
    return list(found)


def prompt_field(prompt: Prompt) -> tuple[str | None, dict[str, Any]]:
    """Returns the text of a prompt, if there is one, and the fields of the API.

    Raises:
        RequestError: the object is not a prompt.
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
    """Returns a list of `count` values, one per prompt. `given` is one value for all prompts, or such a list."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"`{name}`: {len(given)} entries for {count} prompts")
    return given


def _given(params: Any) -> dict[str, Any]:
    """Returns the fields that are not None, as types that JSON supports."""
    values = ((field.name, getattr(params, field.name)) for field in dataclasses.fields(params))
    return {name: _plain(value) for name, value in values if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple | set) else value


def to_json(fields: Mapping[str, Any]) -> bytes:
    """Encodes the body of a request.

    Raises:
        RequestError: JSON can't represent a value; the error names its field.
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
