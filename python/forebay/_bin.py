"""The search for the installed `forebay` binary."""

import os
import sys
import sysconfig
from pathlib import Path

NAME = "forebay"
VARIABLE = "FOREBAY_BINARY"
"""The environment variable that names a binary to use in place of the installed one."""


class BinaryNotFoundError(FileNotFoundError):
    """Raised if no folder for installed programs contains the binary; `searched` lists the folders."""

    def __init__(self, searched: list[Path]) -> None:
        self.searched = searched
        places = ", ".join(str(path.parent) for path in searched)
        super().__init__(f"the forebay binary is in none of: {places}")


def find_binary() -> Path:
    """Returns the path of this package's installed binary, or of the one that FOREBAY_BINARY names.

    The search goes through these folders, in this order:

    - the folder of the running interpreter (of a virtual environment, or of a checkout after `make build`);
    - the interpreter's scripts directory, and the user's;
    - the `bin` folder beside the package (`pip install --target`).

    Raises:
        BinaryNotFoundError: The binary is in none of these folders.
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
