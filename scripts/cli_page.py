"""Writes docs/cli.md from the help of the binary's commands: `python scripts/cli_page.py BINARY`.

With --check nothing is written, and the exit status is 1 if the page would change.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
COLUMNS = 110
HEAD = """# The command line

Made from `--help` by `make docs-cli`; a test compares the two (`tests/e2e/test_cli_page.py`). Exit status 0: the
command did its work. 1: it failed, and the last line on standard error starts with `error: `. 2: the command line is
wrong.

Models come from the Hugging Face hub. Downloads are kept in the cache layout of `huggingface_hub`, so Forebay and that
library share them. These variables are read:

| variable | meaning |
|---|---|
| `HF_TOKEN` | opens private and gated repositories; else the token that `hf auth login` left |
| `HF_ENDPOINT` | a mirror of the hub |
| `HF_HOME`, `HF_HUB_CACHE` | the folder for downloads |
| `HF_HUB_OFFLINE` | 1: no request goes over the network |
| `HF_HUB_DOWNLOAD_TIMEOUT` | seconds that a server may be silent; 20 |
| `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY` | a proxy, named by `http://`, perhaps with user and password |
| `SSL_CERT_FILE`, `SSL_CERT_DIR` | CA certificates for verifying servers, in place of the system's |
| `FOREBAY_CACHE` | the folder for files that Forebay makes of models |
| `FOREBAY_PYTHON` | the interpreter of hands, as `--python` |

"""


def help_of(binary: Path, *command: str) -> str:
    """Returns the output of `--help`, which is the same in every environment."""
    # clap would print values of environment variables after their names.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    environment |= {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    output = subprocess.run(
        [binary, *command, "--help"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if output.returncode != 0:
        raise SystemExit(f"{binary} {' '.join(command)} --help: {output.stderr}")
    return "\n".join(line.rstrip() for line in output.stdout.splitlines()) + "\n"


def subcommands(text: str) -> list[str]:
    """Returns the names below "Commands:", except `help`."""
    found = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    names = re.findall(r"^  ([a-z0-9-]+)", found[1], re.MULTILINE) if found else []
    return [name for name in names if name != "help"]


def sections(binary: Path, *command: str) -> list[str]:
    """Returns a section for a command, followed by those of its subcommands."""
    text = help_of(binary, *command)
    title = " ".join(["forebay", *command])
    found = [f"## {title}\n\n```text\n{text}```\n"]
    for name in subcommands(text):
        found += sections(binary, *command, name)
    return found


def page(binary: Path) -> str:
    """Returns the whole page."""
    return HEAD + "\n".join(sections(binary))


def main() -> int:
    """Runs the command. Returns its exit status."""
    parser = argparse.ArgumentParser(description="Write docs/cli.md.")
    parser.add_argument("binary", type=Path, metavar="BINARY")
    parser.add_argument("--check", action="store_true", help="write nothing, and tell whether it would change")
    options = parser.parse_args()
    text = page(options.binary.resolve())
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)


if __name__ == "__main__":
    sys.exit(main())
