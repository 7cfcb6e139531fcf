"""Small templates with the constructs of widely used ones, and histories in which clients leave out fields.

A template consists of a frame of turns, a way to print content and a way to print calls. `decided` brings a history
into the form that docs/api.md promises to every template. Then transformers renders it.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.exceptions import TemplateError

Json = dict[str, Any]
Render = Callable[[str, list[Json]], str]

# A frame prints turns. M is the message, and BODY prints its content and its calls.
FRAMES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}BODY{{ '<|im_end|>\n' }}{% endfor %}",
    "headers": (
        "{{- bos_token -}}{%- for m in messages -%}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}"
        "BODY{{- '<|eot_id|>' -}}{%- endfor -%}"
    ),
    "bars": "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}\nBODY<|end|>\n{% endfor %}{{ eos_token }}",
    "roles_mapped": (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}"
        "{%- set role = m.role -%}{%- endif -%}{{ '<start_of_turn>' + role + '\n' }}BODY{{ '<end_of_turn>\n' }}"
        "{%- endfor -%}"
    ),
    "branches": (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] BODY [/INST]{% elif m['role'] == 'assistant' %} BODY"
        "{{ eos_token }}{% else %}[RESULT]BODY[/RESULT]{% endif %}{% endfor %}"
    ),
    "names": "{% for m in messages %}{{ m.role.upper() }}: BODY\n{% endfor %}ASSISTANT:",
    "headings": "{% for m in messages %}### {{ m.role | capitalize }}:\nBODY\n\n{% endfor %}",
    "namespace": (
        "{%- set ns = namespace(first=true, count=0) -%}{%- for m in messages -%}{%- set ns.count = ns.count + 1 -%}"
        "{%- if ns.first -%}{%- set ns.first = false -%}<s>{%- endif -%}<{{ m.role }} {{ ns.count }}>BODY</t>"
        "{%- endfor -%}"
    ),
    "sliced": (
        "{% set first = messages[0] %}{% set rest = messages[1:] %}{% for m in [first] %}Q: BODY{% endfor %}"
        "{% for m in rest %}|{{ loop.index0 }}{{ m['role'] }}: BODY{% endfor %}{{ messages[-1].role }}"
    ),
    "macro": (
        "{%- macro turn(m) -%}<|start|>{{ m.role }}<|message|>BODY<|end|>{%- endmacro -%}"
        "{%- for message in messages -%}{{ turn(message) }}{%- endfor -%}"
    ),
    "dated": (
        "{{ '# ' + strftime_now('%d %b %Y') }}\r\n{% for m in messages %}\r\n{{ m.role }}\r\nBODY\r\n"
        "{% if loop.last %}.{% else %};{% endif %}{% endfor %}"
    ),
}
CONTENTS = {
    "plain": "{{ m.content }}",
    "trimmed": "{{ m['content'] | trim }}",
    "joined": "{{ '' + m['content'] + '' }}",
    "if_some": "{% if m.content %}{{ m.content }}{% endif %}",
    "if_not_none": "{% if m.content is not none %}({{ m.content }}){% endif %}",
    "string_or_parts": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endif %}"
    ),
    "without_thoughts": (
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}"
        "{% endif %}"
    ),
    "string_or_json": "{{ m.content if m.content is string else m.content | tojson }}",
    "parts": "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
}
CALLS = (
    "",
    "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}",
    (
        "{% if m.tool_calls is defined %}{% for c in m['tool_calls'] %}{{ c['function']['name'] }}{% for k, v in "
        "c['function']['arguments'].items() %} {{ k }}={{ v }}{% endfor %};{% endfor %}{% endif %}"
    ),
    (
        '{% if m.tool_calls %}{% for c in m.tool_calls %}{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + '
        "c.function.arguments + '}' }}{% endfor %}{% endif %}"
    ),
    (
        "{% if 'tool_calls' in m and m.tool_calls is not none %}{% for c in m.tool_calls %}"
        "{% if c.function is defined %}{% set c = c.function %}{% endif %}"
        "{{ c.name }}({{ c.arguments | tojson }}){% endfor %}{% endif %}"
    ),
    (
        "{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.function.arguments is string %}"
        "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endif %}"
    ),
)
WHOLE = {
    # This template shows calls only where the content is null.
    "calls_without_content": (
        "{% for m in messages %}<{{ m.role }}>{% if m['content'] is none %}{% for c in m['tool_calls'] %}"
        "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}{% else %}{{ m['content'] }}"
        "{% endif %}{% endfor %}"
    ),
    "reasoning": (
        "{%- for m in messages -%}<{{ m.role }}>{%- if m.reasoning_content is defined -%}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif -%}{{- m.content -}}{%- endfor -%}"
    ),
}


def templates() -> dict[str, str]:
    """All templates by name."""
    made = dict(WHOLE)
    for row, (frame, around) in enumerate(FRAMES.items()):
        for column, (content, shown) in enumerate(CONTENTS.items()):
            calls = CALLS[(row + column) % len(CALLS)]
            made[f"{frame} {content}"] = around.replace("BODY", shown + calls)
    return made


def call(*arguments: Any) -> list[Json]:
    """A call with these arguments, or with none."""
    function = {"name": "look", **({"arguments": arguments[0]} if arguments else {})}
    return [{"id": "call00001", "type": "function", "function": function}]


ASK: Json = {"role": "user", "content": "u?"}
RESULT: Json = {"role": "tool", "tool_call_id": "call00001", "content": "r"}
HISTORIES: list[list[Json]] = [
    [ASK, {"role": "assistant", "content": None}, ASK],
    [ASK, {"role": "assistant", "content": None, "reasoning_content": "hm"}, ASK],
    [ASK, {"role": "assistant"}, ASK],
    [ASK, {"role": "assistant", "content": ""}, ASK],
    [ASK, {"role": "assistant", "content": "a", "reasoning_content": None, "name": None, "refusal": None}, ASK],
    [ASK, {"role": "assistant", "content": "a", "tool_calls": None}],
    [ASK, {"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}],
    [ASK, {"role": "assistant", "content": None, "tool_calls": call('{"k": "v"}')}, RESULT, ASK],
    [ASK, {"role": "assistant", "content": None, "tool_calls": call({"k": "v"})}, {**RESULT, "content": None}],
    [ASK, {"role": "assistant", "tool_calls": call(None)}, {"role": "tool", "tool_call_id": "call00001"}, ASK],
    [ASK, {"role": "assistant", "content": "", "tool_calls": call("")}, {**RESULT, "content": ""}],
    [ASK, {"role": "assistant", "content": "a", "tool_calls": call()}, RESULT, {"role": "assistant", "content": None}],
    [ASK, {"role": "assistant", "content": "a", "tool_calls": call({"k": 1}) + call("{}")}, RESULT, RESULT],
]


def decided(source: str, messages: list[Json], render: Render, *, parts: bool) -> list[Json]:
    """`messages` in the form in which the server passes them to this template."""
    nothing, as_text = shape(source, render, parts=parts)
    made = []
    for message in copy.deepcopy(messages):
        kept = {
            name: value for name, value in message.items() if value is not None and (name, value) != ("tool_calls", [])
        }
        for one in kept.get("tool_calls", []):
            function = one["function"]
            arguments = function.get("arguments") or {}
            if as_text:
                function["arguments"] = arguments if isinstance(arguments, str) else dumped(arguments)
            elif as_text is not None and isinstance(arguments, str):
                function["arguments"] = {"k": "v"} if "k" in arguments else {}
            else:
                function["arguments"] = arguments
        empty = nothing if "tool_calls" in kept else ""
        if "content" not in kept:
            kept["content"] = empty
        elif (
            kept["content"] == ""
            and nothing is None
            and "tool_calls" in kept
            and only_null(source, render, parts=parts)
        ):
            kept["content"] = None
        made.append(as_parts(kept) if parts else kept)
    return made


def dumped(arguments: Json) -> str:
    """JSON without spaces, for templates that expect arguments as text."""
    return json.dumps(arguments, separators=(",", ":"))


def as_parts(message: Json) -> Json:
    """The message, with its text as a part."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def probes(
    render: Render, source: str, content: Any, arguments: Any, *, parts: bool, shown: str = "probe"
) -> str | None:
    """The text of a chat with a call, or None if the template does not print `shown`, the call's argument."""
    turn: Json = {"role": "assistant", "content": content, "tool_calls": call(arguments)}
    chat = [ASK, turn, RESULT]
    try:
        text = render(source, [as_parts(message) for message in chat] if parts else chat)
    except (TemplateError, TypeError, ValueError, AttributeError):
        return None
    return text if shown in text else None


def shape(source: str, render: Render, *, parts: bool) -> tuple[str | None, bool | None]:
    """The content for a call without content, and whether arguments are passed as text (None: no calls are printed)."""
    for as_text, arguments in ((False, {"k": "probe"}), (True, '{"k":"probe"}')):
        empty = probes(render, source, "", arguments, parts=parts)
        null = probes(render, source, None, arguments, parts=parts)
        text = empty or null
        if text is None or "{'k'" in text:
            continue
        return nothing_of(empty, null), as_text
    plain = [probes(render, source, content, {}, parts=parts, shown="") for content in ("", None)]
    return nothing_of(*plain), None


def nothing_of(empty: str | None, null: str | None) -> str | None:
    """The content for a call without content. The texts are of chats with empty content and with null."""
    named = [word for word in ("None", "null") if null is not None and word in null and word not in (empty or "")]
    return "" if null is None or named else None


def only_null(source: str, render: Render, *, parts: bool) -> bool:
    """True if the template prints calls only if their content is null."""
    given: tuple[Any, ...] = ({"k": "probe"}, '{"k":"probe"}')

    def shows(content: Any) -> bool:
        return any(probes(render, source, content, arguments, parts=parts) is not None for arguments in given)

    return shows(None) and not shows("")


def cases(render: Render) -> Iterator[tuple[str, int, str]]:
    """Gives the template, the number of the history, and transformers' text."""
    for name, source in templates().items():
        parts = name.endswith(" parts")
        for number, messages in enumerate(HISTORIES):
            yield name, number, render(source, decided(source, messages, render, parts=parts))
