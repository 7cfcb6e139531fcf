"""The folder of files that Forebay created or downloaded. Each file is either complete or missing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "cache_directory"]


def cache_directory(chosen: str | Path | None = None) -> Path:
    """Returns `chosen`, or `$FOREBAY_CACHE`, or `forebay` in the user's cache folder. The folder need not exist yet."""
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    if os.environ.get("FOREBAY_CACHE"):
        return Path(os.environ["FOREBAY_CACHE"]).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write. It is moved to `path` when the block is left, and deleted if the block raises.

    Readers get either the old or the new content, even after a power failure. Of concurrent writers the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            # Otherwise the name could reach the disk before the data.
            os.fsync(file.fileno())
        # A temporary file is readable only by its owner; a cached file gets the user's default permissions.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
        _sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
