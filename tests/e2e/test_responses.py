"""The Responses API: OpenAI's client does a task, continues stored responses, and cancels them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.e2e.client import Json, openai_client
from tests.e2e.conftest import Serve, server_factory
from tests.e2e.families import ToolModel
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, lines, paced, scripted
from tests.e2e.test_tools import ANSWER, MAIL, QUESTION, RESULTS, TOOLS, script
from tests.e2e.waiting import eventually

FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
PATCH = '*** Begin Patch\n*** Add File: "a" b.txt\n+first\\line\n*** End Patch'
EDIT: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
NAMESPACE: Any = {
    "type": "namespace",
    "name": "github__",
    "description": "Issues.",
    "tools": [{**FUNCTIONS[0], "name": "list"}],
}
FAMILY_NAMES = ["hermes", "qwen3_coder", "mistral"]


def written(model: ToolModel) -> str:
    edit = {"after": "Edit it.", "say": "I edit.\n" * (not model.family.around[0])}
    edit["say"] += model.family.calls(("apply_patch", {"input": PATCH}))
    named = {"after": "Which issues?", "say": model.family.calls(("github__list", {"state": "open"}))}
    slow = {"after": "Be slow.", "say": "One word after another. " * 40}
    return script(model) + lines((edit, named, slow))


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ToolModel:
    return ToolModel(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def server(model: ToolModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        said = scripted(folder, written(model))
        keys = ("--api-key", "one", "--api-key", "two")
        flags = ("--sim-tokens-a-row", "3", "--response-store-bytes", "400000")
        yield server_factory(folder, stack)(model, *SIM, *said, *keys, *flags)


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server, api_key="one")


# The client reads any event as the most similar type, so each event is validated here.
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Read:
    """Builds a response from nothing but the events of its stream."""

    def __init__(self, events: Any) -> None:
        self.kinds: list[str] = []
        self.items: list[Json] = []
        self.final: Any = None
        numbers = []
        texts: dict[int, str] = {}
        for event in events:
            self.kinds.append(event.type)
            numbers.append(event.sequence_number)
            body = event.to_dict()
            EVENT.validate_python(body)
            index = body.get("output_index")
            match event.type.removeprefix("response."):
                case "output_item.added":
                    assert index == len(self.items)
                    self.items.append(body["item"])
                    texts[index] = ""
                case kind if kind.endswith(".delta"):
                    texts[index] += body["delta"]
                    assert body["item_id"] == self.items[index]["id"]
                case "output_text.done" | "reasoning_text.done":
                    assert texts[index] == body["text"]
                case "function_call_arguments.done":
                    assert texts[index] == body["arguments"]
                case "custom_tool_call_input.done":
                    assert texts[index] == body["input"]
                case "output_item.done":
                    assert body["item"]["id"] == self.items[index]["id"]
                    self.items[index] = body["item"]
                case "completed" | "incomplete" | "failed":
                    self.final = event.response
        assert numbers == list(range(len(numbers)))
        assert self.kinds[:2] == ["response.created", "response.in_progress"]
        assert self.final is not None
        assert self.kinds[-1] == f"response.{self.final.status}"
        assert [item.to_dict() for item in self.final.output] == self.items


def ask(client: OpenAI, model: ToolModel, stream: bool, **options: Any) -> Any:
    common: Any = {"model": model.name, "tools": FUNCTIONS, **options}
    if not stream:
        return client.responses.create(**common)
    return Read(client.responses.create(**common, stream=True)).final


def bare(item: Any) -> Json:
    """An item without the ids, which differ in each response."""
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kept", [False, True], ids=["items", "kept"])
def test_a_task_with_three_tools(client: OpenAI, model: ToolModel, stream: bool, kept: bool) -> None:
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    called: list[Any] = []
    options: Json = {}
    before = 0
    for _ in range(3):
        answer = ask(client, model, stream, input=said, store=kept, include=["reasoning.encrypted_content"], **options)
        assert answer.status == "completed"
        assert answer.error is None
        usage = answer.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert (usage.output_tokens_details.reasoning_tokens > 0) == any(i.type == "reasoning" for i in answer.output)
        if called:
            # A partly filled page is not cached, and this template drops earlier reasoning from the history.
            assert usage.input_tokens_details.cached_tokens > 0.95 * before - 16
        before = usage.input_tokens
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        results = []
        for call in calls:
            called.append([call.name, json.loads(call.arguments)])
            results.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]})
        if kept:
            said, options = results, {"previous_response_id": answer.id}
        else:
            # As Codex does it: encrypted reasoning goes back as it came.
            back = [item.to_dict() for item in answer.output]
            said += [
                {k: v for k, v in item.items() if k not in ("id", "content")} if item["type"] == "reasoning" else item
                for item in back
            ]
            said += results
    assert called == [
        ["get_weather", {"city": "Zürich", "days": 2}],
        ["get_time", {"city": "Zürich"}],
        ["send_mail", {"to": "me@example.org", "text": MAIL, "urgent": None}],
    ]
    assert answer.output_text == ANSWER
    if kept:
        assert client.responses.retrieve(answer.id).output_text == ANSWER
        items = client.responses.input_items.list(answer.id).data
        assert [item.type for item in items] == ["function_call_output"]


def test_streams_say_what_whole_answers_do(client: OpenAI, model: ToolModel) -> None:
    for question in [QUESTION, "Edit it.", "Just talk.", "Letter by letter.", "Which issues?"]:
        tools = [
            *FUNCTIONS,
            EDIT,
            NAMESPACE,
        ]
        both = [ask(client, model, stream, input=question, tools=tools) for stream in (False, True)]
        whole, streamed = [[bare(item) for item in answer.output] for answer in both]
        assert whole == streamed
        assert whole


def test_a_custom_tool_gets_text(client: OpenAI, model: ToolModel) -> None:
    answer = ask(client, model, True, input="Edit it.", tools=[EDIT])
    call = answer.output[-1]
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "apply_patch", PATCH, "completed")
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Just talk."}
    after = ask(client, model, False, input=[result], tools=[EDIT], previous_response_id=answer.id)
    assert after.output_text.startswith("One, two")


NOTES = """start: "*** Notes" LF note~1..3 "*** End"
note: ("+" | "-") /[a-z"\\\\ ]{1,8}/ LF -> note
%import common.LF
"""
NOTE = re.compile(r'\*\*\* Notes\n([+-][a-z"\\\\ ]{1,8}\n){1,3}\*\*\* End')


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_custom_tool_s_grammar_holds(client: OpenAI, model: ToolModel, syntax: str) -> None:
    definition = NOTES if syntax == "lark" else NOTE.pattern.replace("\\n", "\n")
    tool = {**EDIT, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    finished = 0
    for number, question in enumerate(["Edit it.", "Just talk.", "Be slow.", *map(str, range(17))]):
        options: Any = {"tool_choice": "required", "max_output_tokens": 300, "temperature": 1.0}
        answer = ask(client, model, number % 2 == 0, input=question, tools=[tool], **options)
        for call in answer.output:
            if call.status == "completed" and call.type == "custom_tool_call":
                assert NOTE.fullmatch(call.input), call.input
                finished += 1
    assert finished >= 10, finished
    # When the model decides whether to call a tool, the grammar holds too.
    free = ask(client, model, False, input="Edit it.", tools=[tool], max_output_tokens=300)
    call = free.output[-1]
    assert call.type == "custom_tool_call"
    assert call.status != "completed" or NOTE.fullmatch(call.input), call.input


def test_a_grammar_that_cannot_hold_is_said(client: OpenAI, model: ToolModel) -> None:
    recursive = 'start: "a" | "(" start ")"'
    tool: Any = {**EDIT, "format": {"type": "grammar", "syntax": "lark", "definition": recursive}}
    with pytest.raises(BadRequestError) as refused:
        ask(client, model, False, input="Edit it.", tools=[tool])
    assert refused.value.param == "tools[0].format.definition"


def test_families_without_such_a_form_say_so(serve: Serve, tmp_path: Path) -> None:
    model = ToolModel("hermes", tmp_path / "hermes")
    script = scripted(tmp_path, lines([{"say": f"[apply_patch(input={PATCH!r})]"}]))
    client = openai_client(serve(model, *SIM, *script, "--tool-call-parser", "pythonic"))
    tool: Any = {**EDIT, "format": {"type": "grammar", "syntax": "lark", "definition": NOTES}}
    raw = client.responses.with_raw_response.create(model=model.name, input="Edit it.", tools=[tool])
    assert "tools[0].format.definition" in raw.headers["x-forebay-ignored"]
    call = raw.parse().output[-1]
    assert (call.type, call.input) == ("custom_tool_call", PATCH)  # type: ignore[union-attr]


def test_tools_in_a_namespace_keep_their_names(client: OpenAI, model: ToolModel) -> None:
    tools = [NAMESPACE]
    answer = ask(client, model, False, input="Which issues?", tools=tools)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, call.to_dict()["namespace"]) == ("list", "github__")


def test_an_answer_that_is_cut_says_so(client: OpenAI, model: ToolModel) -> None:
    for stream in (False, True):
        answer = ask(client, model, stream, input="Be slow.", max_output_tokens=5)
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[-1].status == "incomplete"


def test_kept_responses_belong_to_their_key(client: OpenAI, model: ToolModel, server: Server) -> None:
    answer = ask(client, model, False, input="Just talk.")
    other = openai_client(server, api_key="two")
    for there in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(NotFoundError, match="is kept"):
            there(answer.id)
    with pytest.raises(NotFoundError) as gone:
        ask(other, model, False, input="And?", previous_response_id=answer.id)
    assert gone.value.param == "previous_response_id"
    assert gone.value.code == "response_not_found"
    assert client.responses.retrieve(answer.id).id == answer.id
    with pytest.raises(BadRequestError, match="background"):
        client.responses.cancel(answer.id)
    client.responses.delete(answer.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(answer.id)
    unkept = ask(client, model, False, input="Just talk.", store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(unkept.id)


def test_the_oldest_go_and_a_header_says_so(client: OpenAI, model: ToolModel) -> None:
    first = ask(client, model, False, input="Just talk.")
    told = 0
    for _ in range(40):
        raw = client.responses.with_raw_response.create(model=model.name, input="Just talk. " + "x" * 20_000)
        told += int(raw.headers.get("x-forebay-responses-evicted", 0))
    assert told >= 15
    with pytest.raises(NotFoundError, match="oldest"):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(raw.parse().id).status == "completed"


def until_it_ends(client: OpenAI, name: str) -> Any:
    def ended() -> Any:
        answer = client.responses.retrieve(name)
        return None if answer.status in ("queued", "in_progress") else answer

    return eventually(ended, "the response ends")


def test_a_response_in_the_background(client: OpenAI, model: ToolModel) -> None:
    begun = ask(client, model, False, input=QUESTION, background=True)
    assert begun.status == "queued"
    assert begun.output == []
    ended = until_it_ends(client, begun.id)
    assert ended.status == "completed"
    same = ask(client, model, False, input=QUESTION)
    assert [bare(item) for item in ended.output] == [bare(item) for item in same.output]
    with pytest.raises(BadRequestError, match="no stream"):
        client.responses.create(model=model.name, input=QUESTION, background=True, stream=True)
    with pytest.raises(BadRequestError, match="store"):
        ask(client, model, False, input=QUESTION, background=True, store=False)


def test_a_response_in_the_background_is_stopped(model: ToolModel, serve: Serve, tmp_path: Path) -> None:
    slow = paced(tmp_path, step_us=50_000)
    server = serve(model, *SIM, *scripted(tmp_path, written(model)), *slow)
    client = openai_client(server)
    begun = ask(client, model, False, input="Be slow.", background=True)
    with pytest.raises(BadRequestError, match="not ended"):
        ask(client, model, False, input="And?", previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(BadRequestError, match="not answered"):
        ask(client, model, False, input="And?", previous_response_id=begun.id)
    deleted = ask(client, model, False, input="Be slow.", background=True)
    client.responses.delete(deleted.id)
    server.wait_for_metric("vllm:num_requests_running", lambda running: running == 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": "a", "tools": [{"name": "a"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"input": "a", "tools": [{**EDIT, "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, body: Json, param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.post("/responses", body=body, cast_to=object)
    assert refused.value.param == param


def test_what_nobody_here_knows_is_skipped_and_named(client: OpenAI, model: ToolModel) -> None:
    said: Any = [{"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": "Just talk."}]
    raw = client.responses.with_raw_response.create(
        model=model.name, input=said, tools=[{"type": "web_search"}], truncation="auto"
    )
    ignored = raw.headers["x-forebay-ignored"]
    assert {"input[0].type=web_search_call", "tools[0].type=web_search", "truncation"} <= set(ignored.split(", "))
    assert raw.parse().output_text.startswith("One, two")


def test_what_a_response_repeats_is_within_the_budget(model: ToolModel, serve: Serve, tmp_path: Path) -> None:
    device = (*SIM, *scripted(tmp_path, written(model)), *paced(tmp_path, step_us=200_000, kv_tokens=1 << 16))
    server = serve(model, *device, "--max-request-bytes-in-flight", "8000000")
    body: Json = {"input": "Be slow.", "background": True, "max_output_tokens": 100}
    small = [server.http.post("/v1/responses", json=body).status_code for _ in range(20)]
    assert small == [200] * 20
    large = {**body, "metadata": {"note": "x" * 400_000}}
    codes = [server.http.post("/v1/responses", json=large).status_code for _ in range(20)]
    assert codes[0] == 200
    assert codes[-1] == 429
