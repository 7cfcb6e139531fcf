"""Writes the golden frames from their descriptions. Run python -m tests.wire.write_fixtures only for a new version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from forebay.protocol import frames, masks
from forebay.protocol.columns import PLAN, RESULT

FOLDER = Path(__file__).parent
FLOAT_COLUMNS = ("slot_floats", "bias_values", "logprob_values", "pooled", "prompt_values")


NAMES = {
    frames.Kind.PLAN: {column.id: column.name for column in PLAN},
    frames.Kind.RESULT: {column.id: column.name for column in RESULT},
    frames.Kind.MASKS: dict(enumerate(masks.COLUMNS, 1)),
    frames.Kind.PLAN_AT: {1: "place"},
}


def descriptions() -> list[dict[str, Any]]:
    """The frames that `fixtures.json` describes."""
    fixtures: list[dict[str, Any]] = json.loads((FOLDER / "fixtures.json").read_text())["fixtures"]
    return fixtures


def columns(fixture: dict[str, Any]) -> dict[str, Any]:
    """The columns of a described plan or result as arrays, in the order of their ids."""
    return {
        name: np.array(values, np.float32 if name in FLOAT_COLUMNS else np.int32)
        for name, values in fixture["columns"].items()
    }


def encode(fixture: dict[str, Any]) -> bytes:
    """The frame of a description."""
    kind = frames.Kind[fixture["kind"].upper()]
    if "json" in fixture:
        return frames.encode_text(kind, fixture["json"])
    there = columns(fixture)
    known = [(id_, there[name]) for id_, name in NAMES[kind].items() if name in there]
    return frames.encode_columns(kind, fixture["step"], known)


if __name__ == "__main__":
    for described in descriptions():
        (FOLDER / described["file"]).write_bytes(encode(described))
