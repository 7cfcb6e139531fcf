"""Reads the matrices of an adapter's files, according to the manifest that the brain created."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from forebay.weights.errors import ModelError
from forebay.weights.manifest import Place

__all__ = ["ChangedError", "Matrices", "read_adapter"]


class ChangedError(ModelError):
    """The content of the files has changed since the brain read them."""


class Matrices(NamedTuple):
    """The low-rank matrices of one module."""

    name: str
    """The module, such as `model.layers.0.self_attn.q_proj`."""
    a: torch.Tensor  # [rank, inputs], in the file's type, or float32 for GGUF blocks
    b: torch.Tensor  # float32 [outputs, rank], multiplied by the adapter's scale


def read_adapter(manifest: Mapping[str, Any]) -> Iterator[Matrices]:
    """Yields an adapter's matrices. Raises `ModelError`, or `ChangedError` after the last matrix.

    After an error, all matrices must be dropped: the digest is only checked once all bytes have been read.
    """
    files = [str(path) for path in manifest["files"]]
    for path in files:
        # The path may name another kind of file by now. Reading from a pipe would block.
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ModelError(f"{path} is not a regular file")
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}") from error
    digest = hashlib.blake2b(digest_size=16)
    for module in manifest["modules"]:
        name, scale = module["name"], module["scale"]
        digest.update(name.encode())
        digest.update(struct.pack("<f", scale))
        read = []
        for half in ("a", "b"):
            place = Place.of(files, module[half])
            data = place.stored()
            digest.update(f" {place.format} {place.bytes} {place.part.pairs or 0} ".encode())
            digest.update(data.reshape(-1).data)
            read.append(place.of_stored(data))
        yield Matrices(name, read[0], read[1].float() * scale)
    if digest.hexdigest() != manifest["digest"]:
        raise ChangedError(f"{', '.join(files)}: the content has changed")
