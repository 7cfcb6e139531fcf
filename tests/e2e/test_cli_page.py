"""docs/cli.md compared with the commands' own help."""

import subprocess
import sys

from tests.e2e.server import BINARY, ROOT

PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_commands_say() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/cli_page.py", BINARY, "--check"], check=False)
    assert done.returncode == 0, "run `make docs-cli`"


def test_every_command_has_its_section() -> None:
    for command in ("serve", "route", "pull", "ls", "rm", "doctor", "bench serve", "sim fit", "plan"):
        assert f"\n## forebay {command}\n" in PAGE
