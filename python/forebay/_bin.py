"""The search for the installed `forebay` binary."""

import os
import sys
import sysconfig
from pathlib import Path

NAME = "forebay"
VARIABLE = "FOREBAY_BINARY"
"""The variable with the path of a binary to use in place of the installed one."""


class BinaryNotFoundError(FileNotFoundError):
    """No installer's folder has the binary; `searched` lists the folders."""

    def __init__(self, searched: list[Path]) -> None:
        self.searched = searched
        places = ", ".join(str(path.parent) for path in searched)
        super().__init__(f"the forebay binary is in none of: {places}")


def find_binary() -> Path:
    """Returns the path of this package's installed binary, or of the one that FOREBAY_BINARY names.

    The search goes through these folders, in this order:

    - that of the running interpreter: a virtual environment, or a checkout after `make build`;
    - the interpreter's scripts directory, and the user's;
    - the one beside the package (`pip install --target`).

    Raises:
        BinaryNotFoundError: it is in none of these places.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    directories = [
        Path(sys.executable).parent,
        Path(sysconfig.get_path("scripts")),
        Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))),
        Path(__file__).parent.parent / "bin",
    ]
    candidates = list(dict.fromkeys(directory / NAME for directory in directories))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise BinaryNotFoundError(candidates)
