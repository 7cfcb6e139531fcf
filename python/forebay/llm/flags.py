"""Conversion of keyword arguments to flags of `forebay serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ON_BY_DEFAULT", "command_line"]

ON_BY_DEFAULT = frozenset(
    {
        "async-scheduling",
        "context-shift",
        "enable-chunked-prefill",
        "enable-log-requests",
        "enable-prefix-caching",
        "grammar",
        "jinja",
        "mmap",
        "remote-media",
        "warmup",
        "webui",
    }
)
"""Switches that are on by default, and that `--no-` turns off. All others are off by default."""

_OWN = {
    "uds": "the library has a socket of its own",
    "host": "the library has a socket of its own",
    "port": "the library has a socket of its own",
    "api-key": "nobody else can reach the library's socket",
    "api-key-file": "nobody else can reach the library's socket",
    "admin-api-key": "nobody else can reach the library's socket",
    "admin-api-key-file": "nobody else can reach the library's socket",
    "ssl-certfile": "nobody else can reach the library's socket",
    "ssl-keyfile": "nobody else can reach the library's socket",
    "parent": "the server ends with this process",
}


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Returns the command line with these flags.

    None omits a flag, True sets a switch, and a list repeats the flag. An object is written as JSON.

    >>> command_line({"max_model_len": 512, "enforce_eager": True, "enable_prefix_caching": False, "seed": None})
    ['--max-model-len=512', '--enforce-eager', '--no-enable-prefix-caching']

    Raises:
        ValueError: a flag is about the server's socket.
    """
    found: list[str] = []
    for keyword, value in flags.items():
        name = keyword.replace("_", "-")
        if name in _OWN:
            raise ValueError(f"`{keyword}`: {_OWN[name]}; `forebay serve` serves others")
        if value is None:
            continue
        if value is True:
            found.append(f"--{name}")
        elif value is False:
            found += [f"--no-{name}"] if name in ON_BY_DEFAULT else []
        elif isinstance(value, Mapping):
            found.append(f"--{name}={json.dumps(value)}")
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            found += [f"--{name}={_text(keyword, one)}" for one in value]
        else:
            found.append(f"--{name}={_text(keyword, value)}")
    return found


def _text(keyword: str, value: Any) -> str:
    if isinstance(value, str | int | float | os.PathLike):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    raise ValueError(f"`{keyword}`: {value!r} is neither a number nor a text")
