"""The index of a sharded checkpoint: the file that tells which shard has a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay.weights.errors import ModelError
from forebay.weights.files import read_json

__all__ = ["INDEX", "placed", "read_index"]

INDEX = "model.safetensors.index.json"


def read_index(directory: Path) -> Mapping[str, str] | None:
    """Tensor to shard; None: the directory has no index. Raises ModelError."""
    if not (directory / INDEX).is_file():
        return None
    shards = read_json(directory / INDEX).get("weight_map") or {}
    if not isinstance(shards, Mapping):
        raise ModelError(f"{directory / INDEX} has a weight_map that is no object")
    return {str(name): shard for name, shard in shards.items() if isinstance(shard, str)}


def placed(files: Sequence[str]) -> Mapping[str, str] | None:
    """Tensor to shard, by the index beside `files`; None: there is none, or it is of other files. Raises ModelError.

    The index is the authority over a sharded checkpoint: tools leave stale tensors in shards.
    """
    shards = read_index(Path(files[0]).parent) if files else None
    if shards is None or not {Path(file).name for file in files} <= set(shards.values()):
        return None
    return shards
