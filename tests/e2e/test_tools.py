"""Tool calls and reasoning: OpenAI's client does a task against a simulated device with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from tests.e2e.client import Json, events, openai_client
from tests.e2e.conftest import Serve, server_factory
from tests.e2e.families import FAMILIES, ToolModel
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, lines, scripted
from tests.e2e.test_tokenizing import qwen


def tool(name: str, **properties: Any) -> Json:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS: Any = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("get_time", city={"type": "string"}),
    tool(
        "send_mail",
        to={"type": "string"},
        text={"type": "string"},
        urgent={"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    ),
]
RESULTS = {"get_weather": "18 degrees and rain", "get_time": "it is noon", "send_mail": "sent as number 7"}
MAIL = 'Zürich: "18 degrees" <b>\n\tnoon'
QUESTION = "Mail me the weather and the time in Zurich."
ANSWER = "I have sent it."


def script(model: ToolModel) -> str:
    """A script of three turns: two calls, a third call, and an answer."""
    family = model.family
    think = "<think>\nI need both.\n</think>\n\n" if family.thinks else ""
    first = family.calls(("get_weather", {"city": "Zürich", "days": 2}), ("get_time", {"city": "Zürich"}))
    second = family.calls(("send_mail", {"to": "me@example.org", "text": MAIL, "urgent": None}))
    turns: list[Json] = [
        {"after": QUESTION, "say": think + first},
        {"after": RESULTS["get_time"], "say": ("I send it." if not family.around[0] else "") + second},
        {"after": RESULTS["send_mail"], "say": ANSWER},
        {"after": "Cut it.", "say": think + first, "end": False},
        {"after": "Letter by letter.", "say": list(think + first) if not family.special else think + first},
        {"after": "Just talk.", "say": "One, two, STOP, three."},
    ]
    return lines(turns)


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ToolModel:
    return ToolModel(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def server(model: ToolModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        said = scripted(folder, script(model))
        yield server_factory(folder, stack)(model, *SIM, *said, "--sim-tokens-a-row", "3")


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server)


def ask(client: OpenAI, model: ToolModel, messages: Any, stream: bool, **options: Any) -> tuple[Json, str, Any]:
    """The message, finish reason and usage of a whole answer or of a stream."""
    common: Any = {"model": model.name, "messages": messages, "tools": TOOLS, **options}
    if not stream:
        whole = client.chat.completions.create(**common)
        message: ChatCompletionMessage = whole.choices[0].message
        assert message.model_extra is not None
        assert message.model_extra.get("reasoning") == message.model_extra.get("reasoning_content")
        return message.model_dump(exclude_none=True), whole.choices[0].finish_reason, whole.usage
    message_parts: Json = {"role": "assistant"}
    calls: list[Json] = []
    reason, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            extra = delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            for name, text in (("content", delta.content), ("reasoning", extra.get("reasoning"))):
                if text:
                    message_parts[name] = message_parts.get(name, "") + text
            for call in delta.tool_calls or []:
                assert call.function
                if call.index == len(calls):
                    assert call.id, "the first chunk of a call has its id"
                    assert call.type == "function"
                    assert call.function.name, "the first chunk of a call has the whole function name"
                    calls.append(
                        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": ""}}
                    )
                else:
                    assert call.id is None
                    assert call.function.name is None
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert len(reasons) == 1
    reason = reasons[0]
    if calls:
        message_parts["tool_calls"] = calls
    return message_parts, reason, usage


@pytest.mark.parametrize("choice", ["auto", "required", "strict"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_task_with_three_tools(client: OpenAI, model: ToolModel, stream: bool, choice: str) -> None:
    messages: list[Json] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    called: list[tuple[str, Json]] = []
    usages = []
    asked: Json = {"tool_choice": "required"} if choice == "required" else {}
    if choice == "strict":
        asked["tools"] = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    for turn in range(4):
        # Required calls are for the first turn only: the second has text before its call, and the third no call.
        once = choice == "required" and turn > 0
        message, reason, usage = ask(client, model, messages, stream, **({} if once else asked))
        usages.append(usage)
        assert not any(mark in str(message.get("content")) for mark in ("<|", "</", "<tool", "TOOL_CALLS", "<function"))
        messages.append(message)
        if reason == "stop":
            break
        assert reason == "tool_calls"
        assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            called.append((name, arguments))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULTS[name]})
    assert called == [
        ("get_weather", {"city": "Zürich", "days": 2}),
        ("get_time", {"city": "Zürich"}),
        ("send_mail", {"to": "me@example.org", "text": MAIL, "urgent": None}),
    ]
    assert messages[-1]["content"] == ANSWER
    assert ("reasoning" in messages[2]) == model.family.thinks
    if model.family.thinks:
        assert messages[2]["reasoning"] == "I need both."
        assert "content" not in messages[2]


def test_streams_and_whole_answers_agree_however_tokens_fall(client: OpenAI, model: ToolModel) -> None:
    for question in (QUESTION, "Letter by letter."):
        messages = [{"role": "user", "content": question}]
        whole, *ends = ask(client, model, messages, stream=False)
        streamed, *streamed_ends = ask(client, model, messages, stream=True)

        def nameless(message: Json) -> Json:
            calls = [call["function"] for call in message.get("tool_calls", [])]
            return {"calls": calls, **{name: message.get(name) for name in ("content", "reasoning")}}

        assert nameless(whole) == nameless(streamed)
        assert nameless(whole)["calls"]
        assert ends[0] == streamed_ends[0] == "tool_calls"


def test_a_length_is_never_hidden(client: OpenAI, model: ToolModel) -> None:
    messages = [{"role": "user", "content": "Cut it."}]
    whole, reason, usage = ask(client, model, messages, stream=False, max_tokens=25)
    assert (reason, usage.completion_tokens) == ("length", 25)
    streamed, reason, _ = ask(client, model, messages, stream=True, max_tokens=25)
    assert reason == "length"
    assert whole.get("content") == streamed.get("content")


def test_one_call_at_a_time(client: OpenAI, model: ToolModel) -> None:
    for stream in (False, True):
        message, reason, usage = ask(
            client, model, [{"role": "user", "content": QUESTION}], stream, parallel_tool_calls=False
        )
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
        assert reason == "tool_calls"
        both = ask(client, model, [{"role": "user", "content": QUESTION}], stream)[2]
        assert usage.completion_tokens < both.completion_tokens


def test_tools_that_may_not_be_called_are_not_shown(client: OpenAI, server: Server, model: ToolModel) -> None:
    body: Json = {"messages": [{"role": "user", "content": "Just talk."}]}
    bare = server.ask("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    shown = server.ask("/v1/chat/completions", {**body, "tools": TOOLS})["usage"]["prompt_tokens"]
    none = server.ask("/v1/chat/completions", {**body, "tools": TOOLS, "tool_choice": "none"})["usage"]["prompt_tokens"]
    assert shown > bare + 20
    assert none == bare


def test_stop_strings_see_visible_text_only(client: OpenAI, model: ToolModel) -> None:
    messages = [{"role": "user", "content": "Just talk."}]
    message, reason, _ = ask(client, model, messages, stream=True, stop="STOP")
    assert (message["content"], reason) == ("One, two, ", "stop")
    # Stop strings match neither a call's name, nor its arguments, nor the reasoning.
    message, reason, _ = ask(
        client, model, [{"role": "user", "content": QUESTION}], stream=True, stop=["Z", "need", "get_"]
    )
    assert len(message["tool_calls"]) == 2
    assert reason == "tool_calls"


def test_reasoning_is_left_out_or_part_of_the_text(server: Server, model: ToolModel) -> None:
    if not model.family.thinks:
        pytest.skip("this family does not reason")
    body: Json = {"messages": [{"role": "user", "content": QUESTION}], "tools": TOOLS}
    left_out = server.ask("/v1/chat/completions", {**body, "include_reasoning": False})["choices"][0]["message"]
    assert "reasoning" not in left_out
    assert len(left_out["tool_calls"]) == 2
    inside = server.ask("/v1/chat/completions", {**body, "separate_reasoning": False})["choices"][0]["message"]
    assert "I need both." in inside["content"]
    assert len(inside["tool_calls"]) == 2


def test_logprobs_come_with_the_parts(server: Server, model: ToolModel) -> None:
    body: Json = {"messages": [{"role": "user", "content": QUESTION}], "tools": TOOLS, "logprobs": True}
    whole = server.ask("/v1/chat/completions", body)
    streamed = events(server.post("/v1/chat/completions", {**body, "stream": True}).text)
    tokens = [token for chunk in streamed for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert tokens == whole["choices"][0]["logprobs"]["content"]
    assert len(tokens) == whole["usage"]["completion_tokens"]


def test_the_server_says_how_it_reads(server: Server, model: ToolModel) -> None:
    chat = server.http.get("/server_info").json()["config"]["chat"]
    assert chat["tool_call_parser"] == model.name
    assert chat["template_takes_tools"]
    assert "developer messages become system messages" in chat["adaptations"]
    assert ("calls get names of nine letters and digits" in chat["adaptations"]) == (model.name == "mistral")
    assert f"tools: {model.name}" in server.log()


def test_the_next_turn_is_found_in_the_prefix_cache(serve: Serve, tmp_path: Path) -> None:
    """With Qwen's vocabulary, the template writes a call with the same tokens as the model."""
    qwen(tmp_path / "tokenizer.json")
    model = ToolModel("hermes", tmp_path / "hermes", tmp_path / "tokenizer.json")
    call = model.family.calls(
        ("send_mail", {"to": "me", "text": MAIL, "urgent": True}), ("get_time", {"city": "Zürich"})
    )
    said = scripted(tmp_path, lines([{"after": QUESTION, "say": "I look.\n" + call}]))
    client = openai_client(serve(model, *SIM, *said))
    messages: list[Json] = [{"role": "system", "content": "Be brief. " * 400}, {"role": "user", "content": QUESTION}]
    message, reason, first = ask(client, model, messages, stream=True)
    assert reason == "tool_calls"
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in message["tool_calls"]]
    second = ask(client, model, messages, stream=True)[2]
    assert second.prompt_tokens > first.total_tokens
    assert second.prompt_tokens_details.cached_tokens >= 0.95 * second.prompt_tokens
    # All earlier tokens are cached, except those on a page that is not full.
    assert second.prompt_tokens_details.cached_tokens >= first.total_tokens - 17
