"""Clients besides OpenAI's own finish a task with three tools against a scripted device."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import server_factory
from tests.e2e.families import ToolModel
from tests.e2e.server import ROOT, Server
from tests.e2e.simulated import SIM, scripted
from tests.e2e.test_tools import ANSWER, MAIL, QUESTION, RESULTS, TOOLS, script

PYTHON = ROOT / ".venv/clients/bin/python"
SECONDS = 120
# Without this setting LiteLLM downloads prices.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false"}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-clients` installs these clients")


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logs")
    model = ToolModel(request.param, tmp_path_factory.mktemp("models") / "scripted")
    with ExitStack() as stack:
        said = scripted(folder, script(model))
        yield server_factory(folder, stack)(model, *SIM, *said, "--served-model-name", "scripted")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", ["anthropic", "langchain-openai", "litellm", "ollama"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_task_with_three_tools(server: Server, client: str, stream: bool, choice: str) -> None:
    if (client, choice) == ("ollama", "required"):
        pytest.skip("requests of this client have no such choice")
    task = {
        "client": client,
        "url": server.url,
        "model": "scripted",
        "stream": stream,
        "tools": TOOLS,
        # The script has text before its second call, so only the first turn may require a call.
        "choices": [choice, "auto", "auto"],
        "results": RESULTS,
        "question": QUESTION,
    }
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("client_task.py")],
        input=json.dumps(task),
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # LiteLLM writes to stdout too.
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["called"] == [
        ["get_weather", {"city": "Zürich", "days": 2}],
        ["get_time", {"city": "Zürich"}],
        ["send_mail", {"to": "me@example.org", "text": MAIL, "urgent": None}],
    ]
    assert answer["answer"] == ANSWER
    calls = {"anthropic": "tool_use", "ollama": "stop"}.get(client, "tool_calls")
    assert answer["reasons"] == [calls, calls, "end_turn" if client == "anthropic" else "stop"]
