"""Chat templates that take all memory or time: the server does not start, or only the chat that triggers it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Models, Serve
from tests.e2e.processes import children, command_line
from tests.e2e.server import BINARY
from tests.e2e.simulated import SIM

DOUBLED = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(34) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
PADDED = "{{ '%9999999999d'|format(1) }}"
NESTED = (
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(5) %}"
    "{% set n.x = [n.x] %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("bomb", [DOUBLED, PADDED, NESTED])
def test_a_template_that_takes_everything_ends_the_start_with_a_sentence(
    models: Models, tmp_path: Path, bomb: str
) -> None:
    template = tmp_path / "bomb.jinja"
    template.write_text(bomb)
    command = [BINARY, "serve", models("smollm2").path, *SIM, "--chat-template", template, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "the chat template is too expensive for this chat" in ended.stderr


def test_a_template_that_waits_for_a_word_costs_that_chat(serve: Serve, models: Models, tmp_path: Path) -> None:
    template = tmp_path / "waits.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'word' %}" + DOUBLED + "{% endif %}{% endfor %}"
    )
    server = serve(models("smollm2"), *SIM, "--chat-template", str(template))
    chat = "/v1/chat/completions"
    for _ in range(2):
        refused = server.post(chat, {"messages": [{"role": "user", "content": "word"}], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "chat_template_too_expensive")
        server.ask(chat, {"messages": [{"role": "user", "content": "other"}], "max_tokens": 1})
    renders = [pid for pid in children(server.pid) if command_line(pid)[1:] == ["render"]]
    assert 1 <= len(renders) <= 3
    for pid in renders:
        assert b"PATH=" not in Path(f"/proc/{pid}/environ").read_bytes()
