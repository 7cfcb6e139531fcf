"""The finish reasons of 24 cases: each content with each kind of end, whole and as a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.client import Json, events
from tests.e2e.conftest import Serve
from tests.e2e.families import ToolModel
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, lines, scripted
from tests.e2e.test_tools import TOOLS

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAID = {
    "nothing": "",
    "text": "It is noon.",
    "reasoning": "<think>\nLet me see.\n</think>\n\n",
    "a call begun": '<tool_call>\n{"name": "get_time", "arguments": {"city": "Os',
    "a call": CALL,
    "text after a call": CALL + "\nI asked.",
}
ENDS = ("end of sequence", "stop token", "stop string", "length")
STOP_TOKEN = 77
# These contents end with `tool_calls` and all others with `stop`, except that `length` is always reported.
CALLED = {"a call", "text after a call"}
CASES = [(said, end) for said in SAID for end in ENDS]


def expected(said: str, end: str) -> str:
    if end == "length":
        return "length"
    return "tool_calls" if said in CALLED else "stop"


def question(said: str, end: str) -> str:
    return f"Say {said}, ended by {end}."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ToolModel:
    return ToolModel("hermes", tmp_path_factory.mktemp("models") / "hermes")


@pytest.fixture(scope="module")
def server(model: ToolModel, serve_for_module: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    turns: list[Json] = []
    for said, end in CASES:
        say: list[Any] = [SAID[said]]
        if end == "stop token":
            say.append(STOP_TOKEN)
        elif end == "stop string":
            say.append(" STOP here")
        turns.append({"after": question(said, end), "say": say, "end": end in ("end of sequence", "stop string")})
    return serve_for_module(model, *SIM, *scripted(tmp_path_factory.mktemp("script"), lines(turns)))


@pytest.mark.parametrize(("said", "end"), CASES)
def test_why_an_answer_ended(server: Server, model: ToolModel, said: str, end: str) -> None:
    body: Json = {"messages": [{"role": "user", "content": question(said, end)}], "tools": TOOLS}
    if end == "stop token":
        body["stop_token_ids"] = [STOP_TOKEN]
    elif end == "stop string":
        body["stop"] = "STOP"
    elif end == "length":
        # The scripted device continues after its text with random tokens.
        body["max_tokens"] = max(len(model.encode(SAID[said])), 1)
    whole = server.ask("/v1/chat/completions", body)["choices"][0]
    assert whole["finish_reason"] == expected(said, end)

    chunks = [
        chunk["choices"][0] for chunk in events(server.post("/v1/chat/completions", {**body, "stream": True}).text)
    ]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [expected(said, end)]
    streamed = {name: "".join(chunk["delta"].get(name) or "" for chunk in chunks) for name in ("content", "reasoning")}
    message = whole["message"]
    assert streamed == {name: message.get(name) or "" for name in ("content", "reasoning")}
    arguments = "".join(
        call["function"]["arguments"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])
    )
    calls = message.get("tool_calls", [])
    assert arguments == "".join(call["function"]["arguments"] for call in calls)
    assert bool(calls) == ("call" in said)
    for text in streamed.values():
        assert not any(mark in text for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>", "STOP"))
    if end == "stop string" and said != "a call begun":
        assert whole["stop_reason"] == whole["matched_stop"] == "STOP"
    if end == "stop token":
        assert whole["stop_reason"] == whole["matched_stop"] == STOP_TOKEN
    if said in CALLED:
        assert json.loads(arguments) == {"city": "Oslo"}
