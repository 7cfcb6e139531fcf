"""The errors of the library. The message of each is one line for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["EngineDeadError", "ForebayError", "RequestError", "StartError"]


class ForebayError(Exception):
    """The base class of the library's errors."""

    outputs: list[Any] | None = None
    """The results of the failed batch that are available, in order. Those of failed requests have an `error`."""


class StartError(ForebayError, RuntimeError):
    """The server did not start. The message is the reason, as `forebay serve` reports it."""


class EngineDeadError(ForebayError, RuntimeError):
    """The server has exited, or was closed."""


class RequestError(ForebayError, ValueError):
    """A request was refused, or it failed."""

    def __init__(
        self, message: str, *, status: int | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        """The reason of the failure. `str(error)` also contains the number of failed requests if there was a batch."""
        self.status = status
        """The HTTP status; None if the request was not sent, or failed in the middle of a stream."""
        self.param = param
        """The path of the wrong parameter."""
        self.code = code
        """The kind of the error, such as `invalid_value`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _request_error, (self.args[0], self.message, self.status, self.param, self.code, self.outputs)

    @classmethod
    def from_body(cls, body: object, status: int | None = None) -> RequestError:
        """Creates the error from the body of a response, in OpenAI's form."""
        error = body.get("error", body) if isinstance(body, Mapping) else body
        if not isinstance(error, Mapping):
            return cls(f"the server answered with status {status}: {str(error)[:200]}", status=status)
        message = str(error.get("message", f"the server answered with status {status}"))
        return cls(message, status=status, param=error.get("param"), code=error.get("code"))

    @classmethod
    def of_batch(cls, errors: Mapping[int, RequestError], count: int, outputs: list[Any]) -> RequestError:
        """Creates one error for a batch of `count` requests, with the fields of the first error."""
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
