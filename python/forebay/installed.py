"""`python -m forebay.installed`: prints the installed packages for serving, in one line of JSON.

`forebay doctor` runs it. It imports nothing large.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = ["PACKAGES", "installed", "main"]

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "gguf")


def installed() -> dict[str, str | bool | None]:
    """Versions by package, None for a missing one; and true if the CPU's compiled kernels are there."""
    spec = find_spec("forebay.kernels")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    kernels = folder is not None and any(folder.glob("libforebay_kernels.*"))
    versions = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "kernels": kernels, **versions}


def main() -> None:
    """The command."""
    print(json.dumps(installed()))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
