"""`python -m forebay.installed`: prints the installed packages for serving, in one line of JSON.

`forebay doctor` runs it. It imports no large package.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata

__all__ = ["PACKAGES", "installed", "main"]

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "gguf")


def installed() -> dict[str, str | None]:
    """Returns the version of each package; None if it is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def main() -> None:
    """Runs the command."""
    print(json.dumps(installed()))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
