"""Numbers of a model's `config.json`, each of which is checked once, where it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forebay.weights.errors import ModelError, UnsupportedModelError

__all__ = ["MOST", "MOST_EXPERTS", "MOST_HEADS", "MOST_LAYERS", "MOST_POSITIONS", "one_line", "real", "size", "size_or"]

MOST = 1 << 22
"""The largest size without a bound of its own. All are far above known models, and products of them fit 64 bits."""
MOST_HEADS = 1 << 16
"""The largest number of heads, and of elements of a head."""
MOST_LAYERS, MOST_EXPERTS = 1 << 12, 1 << 18
"""The largest numbers of layers and experts. Names are made for each before a file is read."""
MOST_POSITIONS = (1 << 31) - 1
_SHOWN = 40
"""Characters of a wrong value in an error."""
_NO_CONFIG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def size(d: Mapping[str, Any], key: str, *others: str, least: int = 1, most: int = MOST) -> int:
    """A number that a config must have, under one of several names. Raises UnsupportedModelError."""
    for name in (key, *others):
        if d.get(name) is not None:
            return _checked(d[name], name, least, most)
    raise UnsupportedModelError(f"the model's config has no {key!r}")


def size_or(d: Mapping[str, Any], key: str, default: int, *, least: int = 1, most: int = MOST) -> int:
    """A number that a config may have; `default` if it is absent, null or 0. Raises UnsupportedModelError."""
    return _checked(d[key], key, least, most) if d.get(key) else default


def real(d: Mapping[str, Any], key: str, default: float) -> float:
    """A number above 0 with a fraction that a config may have. Raises UnsupportedModelError."""
    value = d.get(key)
    if not value:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UnsupportedModelError(f"the model's config has {key} {_shown(value)}, which is no number above 0")
    return float(value)


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Makes a ModelError of a fault that no check names: a list where a number is expected, and the like."""
    try:
        yield
    except ModelError:
        raise
    except _NO_CONFIG as error:
        fault = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{what} that makes no sense: {fault}") from error


def _checked(value: Any, name: str, least: int, most: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise UnsupportedModelError(
        f"the model's config has {name} {_shown(value)}: it has to be a whole number from {least} to {most}"
    )


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, int) or value.bit_length() < 1 << 10 else "with a thousand bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
