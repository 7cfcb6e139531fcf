"""`python -m forebay` runs the `forebay` binary in place of this process, with the same arguments."""

import os
import sys

from forebay._bin import BinaryNotFoundError, find_binary


def main() -> None:
    """Replaces this process by the binary."""
    try:
        binary = find_binary()
    except BinaryNotFoundError as error:
        sys.exit(f"error: {error}")
    os.execv(binary, [str(binary), *sys.argv[1:]])


if __name__ == "__main__":
    main()
