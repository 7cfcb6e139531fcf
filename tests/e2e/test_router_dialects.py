"""`forebay route` and the APIs of agents: streams survive a brain's death, conversations continue where stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from tests.e2e.client import Json, openai_client
from tests.e2e.conftest import FLAGS
from tests.e2e.families import ToolModel
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, paced, scripted
from tests.e2e.test_responses import FUNCTIONS, Read, bare
from tests.e2e.test_router import KV_TOKENS, Cluster, loads
from tests.e2e.test_tools import ANSWER, QUESTION, RESULTS, TOOLS, script


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Cluster]:
    """Two brains with scripted answers, which take 30 ms per token."""
    model = ToolModel("hermes", tmp_path / "hermes")
    flags = (*SIM, *paced(tmp_path, 30_000, KV_TOKENS), *scripted(tmp_path, script(model)))
    with ExitStack() as stack:
        fleet = Cluster(tmp_path, stack, (model.path, *FLAGS, "--served-model-name", "scripted", *flags))
        fleet.add(2)
        yield fleet


def busy(router: Server) -> int:
    """The index of the backend that has a request."""
    return next(index for index, load in enumerate(loads(router)) if load["own"])


def asked(path: str) -> Json:
    if path == "/v1/responses":
        return {"input": QUESTION, "tools": FUNCTIONS, "stream": True}
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in functions]
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "max_tokens": 500, "tools": tools, "stream": True}


def streamed(router: Server, path: str, after: Callable[[int], None] = lambda _: None) -> list[Json]:
    """The events of a stream; `after` is called with the number of events so far."""
    found: list[Json] = []
    with router.http.stream("POST", path, json=asked(path)) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                after(len(found))
    return found


def said(events: list[Json]) -> list[Json]:
    """The content of a stream, without the ids of the response, and with the pieces of a text joined."""
    made: list[Json] = []
    for event in events:
        kind = event["type"]
        if "delta" not in kind:
            made.append({"type": kind})
            continue
        text = event["delta"] if isinstance(event["delta"], str) else json.dumps(event["delta"])
        if isinstance(event["delta"], dict):
            text = "".join(str(value) for name, value in event["delta"].items() if name not in ("type", "signature"))
        if made and made[-1].get("kind") == kind:
            made[-1]["text"] += text
        else:
            made.append({"kind": kind, "text": text})
    return made


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("at", [4, 12])
def test_streams_survive_their_brain(fleet: Cluster, path: str, at: int) -> None:
    router = fleet.route()
    expected = streamed(router, path)

    def kill(count: int) -> None:
        if count == at:
            fleet.kill(busy(router))

    events = streamed(router, path, kill)
    assert said(events) == said(expected)
    if path == "/v1/responses":
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))
        final = events[-1]["response"]
        assert events[-1]["type"] == "response.completed"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert final["output"] == done


def turns(client: Any, count: int) -> list[Any]:
    """The responses of a stored conversation."""
    made = [client.responses.create(model="scripted", input=QUESTION, tools=FUNCTIONS)]
    while len(made) < count:
        last = made[-1]
        calls = [item for item in last.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
        ]
        options: Any = {"input": results, "tools": FUNCTIONS, "previous_response_id": last.id}
        made.append(client.responses.create(model="scripted", **options))
    return made


def test_conversations_go_on_where_they_are_kept(fleet: Cluster) -> None:
    router = fleet.route("--policy", "round_robin")
    client = openai_client(router)
    both = [turns(client, 3) for _ in range(2)]
    for conversation in both:
        assert conversation[-1].output_text == ANSWER
        assert [bare(item) for item in client.responses.retrieve(conversation[1].id).output] == [
            bare(item) for item in conversation[1].output
        ]
    # Another router has handled none of these responses, but finds them.
    other = openai_client(fleet.route())
    for conversation in both:
        assert other.responses.retrieve(conversation[0].id).id == conversation[0].id
        follow: Any = {"input": "Just talk.", "previous_response_id": conversation[-1].id, "stream": True}
        assert "One, two" in Read(other.responses.create(model="scripted", **follow)).final.output_text
    other.responses.delete(both[0][0].id)
    for there in (client, other):
        with pytest.raises(NotFoundError, match="is kept"):
            there.responses.retrieve(both[0][0].id)


def test_what_a_dead_brain_kept_is_gone(fleet: Cluster) -> None:
    client = openai_client(fleet.route())
    answer = client.responses.create(model="scripted", input="Just talk.")
    home = next(
        index
        for index, backend in enumerate(fleet.backends)
        if backend.http.get(f"/v1/responses/{answer.id}").status_code == 200
    )
    fleet.kill(home)
    with pytest.raises(NotFoundError) as gone:
        client.responses.create(model="scripted", input="And?", previous_response_id=answer.id)
    assert gone.value.code == "response_not_found"
    fleet.revive(home)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(answer.id)
