"""Forced tool calls: `tool_choice`, `strict` and `parallel_tool_calls`.

The simulated device emits a scripted text, except where the masks forbid a token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.e2e.client import Json, events, openai_client
from tests.e2e.conftest import Models, Serve
from tests.e2e.families import FAMILIES, ToolModel
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, lines, scripted

# Strings are short: the simulated device draws random characters, and ends a string only by chance.
ORDER: Json = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "colour": {"enum": ["red", "green <b>", None]},
        "sizes": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "pattern": "^[a-z ]+$", "maxLength": 6}, {"type": "null"}]},
        "express": {"type": "boolean"},
    },
    "required": ["item", "count", "colour"],
    "additionalProperties": False,
}
NOTHING: Json = {"type": "object", "properties": {}, "additionalProperties": False}
CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"place_order": ORDER, "get_time": CITY, "ping": NOTHING}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "get_time", "arguments": {"city": 5}}\n</tool_call>'
THOUGHT = "<think>\nA <tool_call> it is.\n</think>\n\n"
SAID = {
    "talk": "It is noon.",
    "think and talk": THOUGHT + "It is noon.",
    "think on": "<think>\nOne two three four five six seven eight nine ten.\n</think>\n\n" + CALL,
    "call": "I look.\n" + CALL,
    "call wrongly": WRONG,
    "call twice": CALL + "\n" + CALL,
    "call another": CALL.replace("get_time", "ping"),
    "say json": '{"answer": 7}',
}


def tool(name: str, strict: bool | None = None) -> Json:
    function: Json = {"name": name, "parameters": SCHEMAS[name]}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


TOOLS: list[Json] = [tool(name) for name in SCHEMAS]
STRICT: list[Json] = [tool(name, strict=True) for name in SCHEMAS]


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def together(chunks: list[Json], choice: int = 0) -> tuple[Json, str]:
    """The message and the finish reason of one choice of a stream."""
    message: Json = {"content": "", "reasoning": "", "tool_calls": []}
    reasons = []
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            for name in ("content", "reasoning"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if part["finish_reason"]:
                reasons.append(part["finish_reason"])
    assert len(reasons) == 1
    return message, reasons[0]


def ask(server: Server, said: str, **options: Any) -> tuple[Json, str, Json]:
    """Returns message, finish reason and usage. The whole answer and the stream must agree."""
    body: Json = {"messages": [{"role": "user", "content": f"Please {said}!"}], "seed": 7, **options}
    answer = server.ask("/v1/chat/completions", body)
    choice = answer["choices"][0]
    whole = choice["message"]
    message = {
        "content": whole["content"] or "",
        "reasoning": whole.get("reasoning") or "",
        "tool_calls": [call["function"] for call in whole.get("tool_calls", [])],
    }
    streamed = together(events(server.post("/v1/chat/completions", {**body, "stream": True}).text))
    assert streamed == (message, choice["finish_reason"])
    if "tools" in options:
        assert not any(mark in message["content"] for mark in ("<tool", "</tool", "<think>", "</think>"))
    return message, choice["finish_reason"], answer["usage"]


def check(call: Json) -> Json:
    """Parses the arguments of a call and checks them against the tool's schema."""
    arguments: Json = json.loads(call["arguments"])
    errors = list(Draft202012Validator(SCHEMAS[call["name"]]).iter_errors(arguments))
    assert not errors, (call, errors)
    return arguments


def says(folder: Path, said: dict[str, str]) -> tuple[str, ...]:
    """Flags of a simulated device that answers `Please NAME!` with the text of that name."""
    return (*SIM, *scripted(folder, lines({"after": f"Please {name}!", "say": say} for name, say in said.items())))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ToolModel:
    return ToolModel("hermes", tmp_path_factory.mktemp("models") / "hermes")


@pytest.fixture(scope="module")
def server(model: ToolModel, serve_for_module: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return serve_for_module(model, *says(tmp_path_factory.mktemp("script"), SAID))


@pytest.fixture(scope="module")
def opened(model: ToolModel, serve_for_module: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The same model with a template that opens the reasoning itself."""
    folder = tmp_path_factory.mktemp("opened")
    template = folder / "template.jinja"
    template.write_text(
        model.family.template.replace(
            "<|im_start|>assistant\n{%- endif -%}", "<|im_start|>assistant\n<think>\n{%- endif -%}"
        )
    )
    said = {name: say.removeprefix("<think>\n") for name, say in SAID.items()}
    return serve_for_module(model, *says(folder, said), "--chat-template", str(template))


DIALECTS = [
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax_m2",
    "gemma4",
    "functiongemma",
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_family_calls_with_valid_arguments(serve: Serve, model: ToolModel, dialect: str) -> None:
    server = serve(model, "--device", "sim", "--tool-call-parser", dialect)
    for seed in range(4):
        for choice, names in (("required", set(SCHEMAS)), (named("place_order"), {"place_order"})):
            message, reason, _ = ask(
                server,
                f"do {seed}",
                tools=TOOLS,
                tool_choice=choice,
                max_tokens=3000,
                parallel_tool_calls=seed % 2 == 0,
            )
            assert reason == ("tool_calls" if choice == "required" else "stop")
            assert message["content"] == ""
            assert message["tool_calls"]
            assert len(message["tool_calls"]) == 1 or (choice == "required" and seed % 2 == 0)
            assert {call["name"] for call in message["tool_calls"]} <= names
            for call in message["tool_calls"]:
                check(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_that_are_tokens_are_forced_as_such(serve: Serve, tmp_path: Any, family: str) -> None:
    model = ToolModel(family, tmp_path / family)
    server = serve(model, "--device", "sim")
    for choice in ("required", named("place_order")):
        message, _, _ = ask(server, "order", tools=TOOLS, tool_choice=choice, max_tokens=3000)
        check(message["tool_calls"][0])


def test_required_calls_whatever_the_model_wants_to_say(server: Server) -> None:
    for word in ("required", "any"):
        message, reason, _ = ask(server, "talk", tools=TOOLS, tool_choice=word, max_tokens=3000)
        assert (reason, message["content"]) == ("tool_calls", "")
        check(message["tool_calls"][0])
    # A scripted answer that satisfies the constraint is not changed.
    message, reason, _ = ask(server, "call twice", tools=TOOLS, tool_choice="required")
    assert [check(call) for call in message["tool_calls"]] == [{"city": "Oslo"}] * 2


@pytest.mark.parametrize("fixture", ["server", "opened"])
def test_forced_calls_come_behind_the_reasoning(request: pytest.FixtureRequest, fixture: str) -> None:
    server: Server = request.getfixturevalue(fixture)
    message, reason, usage = ask(server, "think and talk", tools=TOOLS, tool_choice="required", max_tokens=3000)
    # A call mark inside the reasoning starts no call.
    assert message["reasoning"] == "A <tool_call> it is."
    assert (reason, message["content"]) == ("tool_calls", "")
    check(message["tool_calls"][0])
    assert 3 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_a_named_function_is_called_once_and_nothing_was_chosen(server: Server) -> None:
    flat = {"type": "function", "name": "get_time"}
    for choice in (named("get_time"), flat):
        message, reason, _ = ask(server, "call twice", tools=TOOLS, tool_choice=choice)
        assert [check(call) for call in message["tool_calls"]] == [{"city": "Oslo"}]
        assert reason == "stop"
    message, reason, _ = ask(server, "talk", tools=TOOLS, tool_choice=named("ping"), max_tokens=100)
    assert [call["name"] for call in message["tool_calls"]] == ["ping"]
    assert check(message["tool_calls"][0]) == {}


def test_allowed_tools_are_the_only_ones(server: Server) -> None:
    def allowed(mode: str, *names: str) -> Json:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}

    body: Json = {"messages": [{"role": "user", "content": "Please call!"}], "tools": TOOLS}
    tokens = [
        server.ask("/v1/chat/completions", {**body, "tool_choice": choice})["usage"]["prompt_tokens"]
        for choice in ("auto", allowed("auto", "ping"))
    ]
    assert tokens[0] == tokens[1], "a list of allowed tools changes the prompt, and so misses the prefix cache"
    message, reason, _ = ask(server, "call", tools=TOOLS, tool_choice=allowed("auto", "get_time"))
    assert (message["content"], reason) == ("I look.", "tool_calls")
    message, reason, _ = ask(server, "talk", tools=TOOLS, tool_choice=allowed("auto", "ping"))
    assert (message["content"], reason) == ("It is noon.", "stop")
    message, _, _ = ask(server, "call", tools=TOOLS, tool_choice=allowed("auto", "ping"), max_tokens=200)
    assert {call["name"] for call in message["tool_calls"]} == {"ping"}
    message, _, _ = ask(server, "talk", tools=TOOLS, tool_choice=allowed("required", "ping"), max_tokens=200)
    assert {call["name"] for call in message["tool_calls"]} == {"ping"}


def test_strict_tools_keep_their_schema_and_leave_text_alone(server: Server) -> None:
    loose, _, _ = ask(server, "call wrongly", tools=TOOLS)
    assert json.loads(loose["tool_calls"][0]["arguments"]) == {"city": 5}
    message, reason, _ = ask(server, "call wrongly", tools=STRICT, max_tokens=1000)
    assert reason == "tool_calls"
    assert isinstance(check(message["tool_calls"][0])["city"], str)
    message, reason, _ = ask(server, "think and talk", tools=STRICT)
    assert (message["content"], reason) == ("It is noon.", "stop")
    message, reason, _ = ask(server, "call", tools=STRICT)
    assert (message["content"], reason) == ("I look.", "tool_calls")
    assert check(message["tool_calls"][0]) == {"city": "Oslo"}
    # Tools that are not strict keep unconstrained arguments beside a strict one.
    mixed = [tool("get_time"), tool("ping", strict=True)]
    message, _, _ = ask(server, "call wrongly", tools=mixed)
    assert json.loads(message["tool_calls"][0]["arguments"]) == {"city": 5}
    message, _, _ = ask(server, "call another", tools=mixed)
    assert check(message["tool_calls"][0]) == {}


def test_one_call_only(server: Server) -> None:
    for options in ({}, {"tools": STRICT}, {"tool_choice": "required"}):
        asked: Json = {"tools": TOOLS, **options}
        both, _, _ = ask(server, "call twice", **asked)
        assert len(both["tool_calls"]) == 2
        one, reason, _ = ask(server, "call twice", **asked, parallel_tool_calls=False)
        assert len(one["tool_calls"]) == 1
        assert reason == "tool_calls"


def test_a_length_in_a_call_is_told(server: Server) -> None:
    for choice in ("required", named("get_time")):
        message, reason, usage = ask(server, "call twice", tools=TOOLS, tool_choice=choice, max_tokens=26)
        assert (reason, usage["completion_tokens"]) == ("length", 26)
        assert message["tool_calls"] == [{"name": "get_time", "arguments": '{"city": "Osl'}]


def test_content_of_a_form_or_calls(server: Server) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "integer"}}},
        },
    }
    message, reason, _ = ask(server, "say json", tools=TOOLS, response_format=form)
    assert (json.loads(message["content"]), reason) == ({"answer": 7}, "stop")
    message, reason, _ = ask(server, "call twice", tools=TOOLS, response_format=form)
    assert (len(message["tool_calls"]), reason) == (2, "tool_calls")
    body: Json = {"messages": [{"role": "user", "content": "Please talk!"}], "tools": TOOLS, "max_tokens": 500}
    forced = server.post("/v1/chat/completions", {**body, "response_format": form, "tool_choice": named("ping")})
    assert forced.headers["x-forebay-ignored"] == "response_format.json_schema.schema"
    assert forced.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "ping"


def test_choices_log_probabilities_and_stop_strings_go_along(server: Server) -> None:
    body: Json = {
        "messages": [{"role": "user", "content": "Please talk!"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 3000,
        "n": 3,
        "logprobs": True,
        "stop": ["{", "name"],
        "seed": 1,
    }
    answer = server.ask("/v1/chat/completions", body)
    tokens = 0
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        check(choice["message"]["tool_calls"][0]["function"])
        tokens += len(choice["logprobs"]["content"])
    assert tokens == answer["usage"]["completion_tokens"]
    chunks = events(server.post("/v1/chat/completions", {**body, "stream": True}).text)
    for choice in answer["choices"]:
        message, reason = together(chunks, choice["index"])
        assert reason == "tool_calls"
        assert message["tool_calls"] == [call["function"] for call in choice["message"]["tool_calls"]]


def test_the_openai_client_finds_the_arguments_it_asked_for(server: Server, model: ToolModel) -> None:
    import openai
    from pydantic import BaseModel

    class get_time(BaseModel):
        city: str

    parsed = openai_client(server).chat.completions.parse(
        model=model.name,
        messages=[{"role": "user", "content": "Please call twice!"}],
        tools=[openai.pydantic_function_tool(get_time)],
        tool_choice="required",
    )
    calls = parsed.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.parsed_arguments == get_time(city="Oslo")


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_not_be_forced_names_its_place(server: Server, stream: bool) -> None:
    bad = json.loads(json.dumps(STRICT))
    bad[1]["function"]["parameters"]["properties"]["city"]["not"] = {"const": "Rome"}
    body: Json = {"messages": [{"role": "user", "content": "Please talk!"}], "stream": stream}
    loose = json.loads(json.dumps(bad))
    for one in loose:
        one["function"]["strict"] = False
    path = "tools[2].function.parameters.properties.city.not"
    skipped = {"type": "web_search"}
    for more, param in (
        ({"tools": [skipped, *bad]}, path),
        ({"tools": TOOLS, "tool_choice": named("nothing")}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        response = server.post("/v1/chat/completions", {**body, **more})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    # For a tool that is not strict, the unsupported keyword of its schema is ignored, and a header names it.
    forced = server.post("/v1/chat/completions", {**body, "tools": [skipped, *loose], "tool_choice": "required"})
    assert forced.status_code == 200, forced.text
    assert path in forced.headers["x-forebay-ignored"].split(", ")
    # Without `tool_choice` no schema is enforced, so nothing is refused.
    assert server.post("/v1/chat/completions", {**body, "tools": [skipped, *loose]}).status_code == 200


def test_a_model_whose_calls_are_not_known_says_so(serve: Serve, model: ToolModel, tiny: Model) -> None:
    body: Json = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required"}
    unknown = serve(model, "--device", "sim", "--tool-call-parser", "none").post("/v1/chat/completions", body)
    error = unknown.json()["error"]
    assert (unknown.status_code, error["param"]) == (400, "tool_choice")
    assert "--tool-call-parser" in error["message"]
    untold = serve(tiny, "--device", "sim").post("/v1/chat/completions", body)
    # If the template renders no tools, they are added in a system message.
    assert (untold.status_code, untold.headers["x-forebay-tools"]) == (200, "generic")
    off = serve(model, "--device", "sim", "--no-grammar").post("/v1/chat/completions", body)
    assert (off.status_code, off.json()["error"]["param"]) == (400, "tool_choice")
    bare = serve(model, "--device", "sim", "--tool-call-parser", "llama3_json")
    form = {**body, "tool_choice": "auto", "response_format": {"type": "json_object"}}
    refused = bare.post("/v1/chat/completions", form)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("fixture", ["server", "opened"])
def test_a_budget_ends_the_reasoning(request: pytest.FixtureRequest, fixture: str) -> None:
    server: Server = request.getfixturevalue(fixture)
    _, _, free = ask(server, "think on", tools=TOOLS, tool_choice="required", max_tokens=3000)
    for budget in (0, 1, 5):
        for name in ("thinking_budget", "thinking_token_budget"):
            message, _, usage = ask(
                server, "think on", tools=TOOLS, tool_choice="required", max_tokens=3000, **{name: budget}
            )
            assert usage["completion_tokens_details"] == {"reasoning_tokens": budget}
            check(message["tool_calls"][0])
    assert free["completion_tokens_details"]["reasoning_tokens"] > 10
    # The budget also holds without forced calls, and under another parameter name.
    message, _, usage = ask(server, "think on", reasoning={"max_tokens": 4}, max_tokens=60)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    structured, _, usage = ask(server, "think on", thinking_budget=3, regex="[0-9]{2}", max_tokens=60)
    assert (len(structured["content"]), usage["completion_tokens_details"]["reasoning_tokens"]) == (2, 3)


def test_a_prompt_that_speaks_of_marks_has_not_begun_to_reason(server: Server) -> None:
    """A mark in the user's text must not count as reasoning: masks would wait for an end that never comes."""
    body: Json = {
        "messages": [{"role": "user", "content": "What is <think>? Please talk!"}],
        "tools": TOOLS,
        "tool_choice": named("ping"),
        "max_tokens": 200,
    }
    calls = server.ask("/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]
    assert check(calls[0]["function"]) == {}


def test_the_default_model_calls_when_it_has_to(serve: Serve, models: Models, tmp_path: Any) -> None:
    """The model was not trained on tools, and rarely calls one unless it is forced."""
    template = tmp_path / "template.jinja"
    template.write_text(FAMILIES["hermes"].template)
    server = serve(models("smollm2"), "--chat-template", str(template), "--reasoning-parser", "none")
    body: Json = {
        "messages": [{"role": "user", "content": "What time is it in Oslo?"}],
        "tools": [tool("get_time"), tool("ping")],
        "parallel_tool_calls": False,
        "max_tokens": 150,
    }
    for seed in range(8):
        forced = {"tool_choice": "required", "temperature": 1.5, "seed": seed}
        choice = server.ask("/v1/chat/completions", {**body, **forced})["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        check(choice["message"]["tool_calls"][0]["function"])
        assert choice["message"]["content"] is None
