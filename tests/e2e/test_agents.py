"""Agent programs finish a task with three tools against a scripted device, each over its own API."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import families
from tests.e2e.conftest import server_factory
from tests.e2e.families import ToolModel
from tests.e2e.server import ROOT, Server
from tests.e2e.simulated import SIM, scripted

PROGRAMS = ROOT / ".venv/agents/node_modules/.bin"
SECONDS = 120
QUESTION = "Mail me the weather."
ANSWER = "I have sent it."
MAIL = "it is sunny, and sent"
# The quotes keep the command's text different from its output, which the script matches.
LOOK = "echo it is sun''ny"

pytestmark = pytest.mark.skipif(not PROGRAMS.exists(), reason="`make setup-agents` installs these programs")

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """How a program is configured for the model, and what its tools are called."""

    route: str
    command: Callable[[str], list[str]]
    calls: Callable[[str], list[Call]]
    said: tuple[str, str]
    """The outputs of the second and the third tool."""
    environment: Callable[[str, Path], dict[str, str]]


def opencode_config(url: str) -> dict[str, Any]:
    model = {"name": "scripted", "limit": {"context": 200000, "output": 4000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Forebay",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"scripted": model},
    }
    return {
        "provider": {"forebay": provider},
        "model": "forebay/scripted",
        "small_model": "forebay/scripted",
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
    }


def opencode_environment(url: str, home: Path) -> dict[str, str]:
    config = home / "opencode.json"
    config.write_text(json.dumps(opencode_config(url)))
    return {"OPENCODE_CONFIG": str(config), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def codex_command(url: str) -> list[str]:
    provider = f'model_providers.forebay={{name="Forebay",base_url="{url}/v1",wire_api="responses"}}'
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *flags, "-c", "model_provider=forebay", "-c", provider, "-m", "scripted", QUESTION]


def claude_environment(url: str, _: Path) -> dict[str, str]:
    small = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER")
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        **dict.fromkeys(small, "scripted"),
        **dict.fromkeys(quiet, "1"),
    }


AGENTS = {
    "codex": Program(
        route="/v1/responses",
        command=codex_command,
        calls=lambda file: [
            ("exec_command", {"cmd": LOOK}),
            ("get_goal", {}),
            ("exec_command", {"cmd": f"printf %s '{MAIL}' > {file}; echo it is se''nt"}),
        ],
        said=('"goal"', "it is sent"),
        environment=lambda _, home: {"CODEX_HOME": str(home)},
    ),
    "claude": Program(
        route="/v1/messages",
        command=lambda _: [
            *("claude", "-p", QUESTION, "--model", "scripted", "--output-format", "json"),
            *("--allowedTools", "Bash,Write,Read"),
        ],
        calls=lambda file: [
            ("Bash", {"command": LOOK, "description": "Looks"}),
            ("Write", {"file_path": file, "content": MAIL}),
            ("Read", {"file_path": file}),
        ],
        said=("File created successfully", f"\t{MAIL}"),
        environment=claude_environment,
    ),
    "opencode": Program(
        route="/v1/chat/completions",
        command=lambda _: ["opencode", "run", "--model", "forebay/scripted", "--format", "json", QUESTION],
        calls=lambda file: [
            ("bash", {"command": LOOK, "description": "Looks"}),
            ("write", {"filePath": file, "content": MAIL}),
            ("read", {"filePath": file}),
        ],
        said=("Wrote file", f"1: {MAIL}"),
        environment=opencode_environment,
    ),
}


def script(model: ToolModel, program: Program, file: str) -> str:
    first, *others = [model.family.calls(call) for call in program.calls(file)]
    says = ["<think>\nI look.\n</think>\n\n" + first, *others, ANSWER]
    afters = [QUESTION, "it is sunny", *program.said]
    return "".join(json.dumps({"after": after, "say": say}) + "\n" for after, say in zip(afters, says, strict=True))


def prefix(server: Server) -> tuple[float, float]:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    queried, hit = (server.metric(name) for name in names)
    return queried, hit


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_finishes_a_task_with_three_tools(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first prompt of an agent is long.
    monkeypatch.setattr(families, "CONTEXT", 1 << 18)
    program = AGENTS[name]
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    mail = work / "mail.txt"
    model = ToolModel("hermes", tmp_path / "model")
    said = scripted(tmp_path, script(model, program, str(mail)))
    folders = {name: str(home / name) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    with ExitStack() as stack:
        server = server_factory(tmp_path, stack)(model, *SIM, *said, "--served-model-name", "scripted")
        done = subprocess.run(
            [PROGRAMS / (command := program.command(server.url))[0], *command[1:]],
            cwd=work,
            env={**os.environ, "HOME": str(home), **folders, **program.environment(server.url, home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert ANSWER in done.stdout
        assert mail.read_text() == MAIL
        answered = server.metric("vllm:request_success_total", finished_reason="stop")
        assert answered >= 4
        queried, hit = prefix(server)
    # The first of four turns finds nothing in the cache. Of the other prompts, at least 95 % was cached.
    assert hit > 0.95 * 0.75 * queried, (queried, hit)
