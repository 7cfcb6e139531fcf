"""The small JSON files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.weights.errors import ModelError

__all__ = ["read_json"]


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Reads the object in a JSON file; empty for an optional file that does not exist. Raises ModelError."""
    value = _read(path, optional=optional, missing={})
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _read(path: Path, *, optional: bool, missing: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if optional:
            return missing
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
