"""Write crates/text/tests/data/templates/*.json: chat templates, inputs, and the text that transformers renders.

The templates in `templates/` are written for this test in the style of widely used model families. SmolLM2's template
is the model's own. Each written file holds one template and its cases. A case has either `expected`, the text, or
`error`, which means that rendering must fail. `expressions.json` holds small templates, which locate a difference.
`histories.py` has templates, and histories in which clients leave out fields.

Run from the repository root: python -m tests.text.make_template_cases
"""

import copy
import datetime
import json
import pathlib
from typing import Any
from unittest import mock

from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

from tests.text import histories

HERE = pathlib.Path(__file__).parent
OUT = HERE.parents[1] / "crates/text/tests/data/templates"
NOW = datetime.datetime(2025, 3, 4, 5, 6, 7)
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

Json = dict[str, Any]


class FixedDatetime(datetime.datetime):
    """A clock with a fixed time, for strftime_now."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "FixedDatetime":
        return cls(NOW.year, NOW.month, NOW.day, NOW.hour, NOW.minute, NOW.second)


WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now> & "later" at a place, it\'s 30° at most — 天气',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "line one\nline two\ttab"},
                "days": {"type": "array", "items": {"type": "integer", "minimum": 0}, "default": []},
                "scale": {"type": "number", "default": 1e-07, "maximum": 1e22, "examples": [0.1, 5.0, -2]},
                "unit": {"enum": ["c", "f", None], "strict": True, "nested": {}},
            },
            "required": ["place"],
        },
    },
}
CALL: Json = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": [1, 2], "scale": 1.0}},
        }
    ],
}
USER: Json = {"role": "user", "content": "Hello, <b>you</b> & {{ not_a_template }} {% if %}"}
SYSTEM: Json = {"role": "system", "content": "  Be brief.\n"}
ANSWER: Json = {"role": "assistant", "content": " Hi! 🙂 "}
THOUGHT: Json = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}
REASONED: Json = {"role": "assistant", "content": "Five.", "reasoning": "two and three"}
RESULT: Json = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"t": 21.5}'}
PARTS: Json = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}

CONVERSATIONS: dict[str, list[Json]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And\n\nnow?\n"}],
    "thought": [USER, THOUGHT, {"role": "user", "content": ""}, REASONED, USER],
    "tools": [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER, USER],
    "bad_order": [ANSWER, USER],
    "strange_role": [{"role": "wizard", "content": "x"}],
    "empty": [],
}


def requests() -> list[Json]:
    """Every conversation, with each option of a request."""
    plain = [
        {"messages": messages, "add_generation_prompt": flag}
        for messages in CONVERSATIONS.values()
        for flag in (True, False)
    ]
    tools = [
        {"messages": CONVERSATIONS[name], "tools": [WEATHER, WEATHER], "add_generation_prompt": True}
        for name in ("user", "tools")
    ]
    kwargs = [
        {"messages": CONVERSATIONS["thought"], "add_generation_prompt": True, "kwargs": {"enable_thinking": flag}}
        for flag in (True, False)
    ]
    kwargs.append(
        {"messages": CONVERSATIONS["system"], "kwargs": {"date_string": "1 May 2024", "bos_token": "<other>"}}
    )
    continued = [
        {"messages": [USER, {"role": "assistant", "content": text}], "continue_final_message": True}
        for text in ("The answer", "The answer is ", " two\n\n")
    ]
    documents = [{"messages": [USER], "documents": [{"title": "T", "text": "body"}]}]
    return plain + tools + kwargs + continued + documents


def render(source: str, request: Json) -> str:
    """The text of `request`, as `apply_chat_template` renders it."""
    request = copy.deepcopy(request)
    variables = {**SPECIAL_TOKENS, **request.pop("kwargs", {})}
    rendered: Any = chat_template_utils.render_jinja_template(
        [request.pop("messages")], chat_template=source, **request, **variables
    )
    ((text,), _) = rendered
    return str(text)


def case(source: str, request: Json) -> Json:
    """`request` with its result."""
    given = copy.deepcopy(request)
    nothing, _ = histories.shape(source, lambda text, messages: render(text, {"messages": messages}), parts=False)
    for message in given["messages"]:
        # A template that does not take null gets empty content instead.
        message["content"] = nothing if message["content"] is None else message["content"]
    try:
        return {**request, "expected": render(source, given)}
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raised = type(error) is TemplateError
        return {**request, "error": True, **({"message": str(error)} if raised else {})}


def write(name: str, content: Json) -> None:
    """One file of test data."""
    content = {"special_tokens": SPECIAL_TOKENS, "now": NOW.isoformat(), **content}
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (OUT / f"{name}.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write all files."""
    OUT.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(chat_template_utils, "datetime", FixedDatetime):
        for path in sorted((HERE / "templates").glob("*.jinja")):
            source = path.read_text(encoding="utf-8")
            cases = [case(source, request) for request in requests()]
            # Only a template that reads parts gets parts. For all others the contents are joined first.
            if path.stem == "gemma":
                cases.append(case(source, {"messages": [PARTS], "add_generation_prompt": True}))
            if sum("expected" in done for done in cases) < len(cases) // 2:
                raise ValueError(f"{path.name} refuses nearly everything, which tests nothing")
            write(path.stem, {"source": source, "cases": cases})
        variables = {"tool": WEATHER, "text": " it's\x1c a\tTEST\n", "none_value": None, "numbers": [3, 1, 2]}
        given: Json = {"messages": CONVERSATIONS["tools"], "kwargs": variables}
        for name, sources in json.loads((HERE / "expressions.json").read_text(encoding="utf-8")).items():
            done = [{"source": source, **case(source, given)} for source in sources]
            expressions = [{key: one[key] for key in one if key not in given} for one in done]
            write(name, {**given, "expressions": expressions})
        rendered = histories.cases(lambda source, messages: render(source, {"messages": messages}))
        expected = [{"template": name, "history": number, "expected": text} for name, number, text in rendered]
        write("histories", {"templates": histories.templates(), "histories": histories.HISTORIES, "cases": expected})


if __name__ == "__main__":
    main()
