"""The errors of the library. The text of each is one line for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["EngineDeadError", "ForebayError", "RequestError", "StartError"]


class ForebayError(Exception):
    """An error of the library."""

    outputs: list[Any] | None = None
    """The results of the batch that the error ended, in order. Those of failed requests have an `error`."""


class StartError(ForebayError, RuntimeError):
    """The server did not start. The text is the reason, as `forebay serve` gives it."""


class EngineDeadError(ForebayError, RuntimeError):
    """The server has ended, or was closed."""


class RequestError(ForebayError, ValueError):
    """A request was refused, or it failed."""

    def __init__(
        self, message: str, *, status: int | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        """The reason alone. The error of a batch also counts the requests in its text."""
        self.status = status
        """The HTTP status; None if the request was not sent, or its stream broke off."""
        self.param = param
        """The name of the wrong parameter, with its path."""
        self.code = code
        """The kind of the error, such as `invalid_value`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _request_error, (self.args[0], self.message, self.status, self.param, self.code, self.outputs)

    @classmethod
    def from_body(cls, body: object, status: int | None = None) -> RequestError:
        """The error of an answer's body, in OpenAI's shape."""
        error = body.get("error", body) if isinstance(body, Mapping) else body
        if not isinstance(error, Mapping):
            return cls(f"the server answered with status {status}: {str(error)[:200]}", status=status)
        message = str(error.get("message", f"the server answered with status {status}"))
        return cls(message, status=status, param=error.get("param"), code=error.get("code"))

    @classmethod
    def of_batch(cls, errors: Mapping[int, RequestError], count: int, outputs: list[Any]) -> RequestError:
        """One error for a batch of `count` requests, with the fields of the first error."""
        first = min(errors)
        error = errors[first]
        text = error.message
        if count > 1:
            text = f"{len(errors)} of {count} requests failed, the first is number {first}: {text}"
        return _request_error(text, error.message, error.status, error.param, error.code, outputs)


def _request_error(
    text: str, message: str, status: int | None, param: str | None, code: str | None, outputs: list[Any] | None
) -> RequestError:
    error = RequestError(text, status=status, param=param, code=code)
    error.message, error.outputs = message, outputs
    return error
