"""Function calls of a small model that are valid and right: written freely, and constrained by masks.

    python -m benchmarks.tool_calls  # 3 minutes, after make bench-setup PEERS=coder

Qwen2.5-Coder-0.5B on the CPU gets 40 requests, each of which one of six functions can serve, and answers greedily:

- auto: the model writes freely, and its tool calls are parsed;
- strict: the same with `strict` functions, so that a call that it begins is valid;
- required: `tool_choice: required`.

A call that the model writes into its text, in a code fence, does not count as a call, because an example looks the
same. Such calls are judged separately: the model knows them, but writes them in the wrong place.

A call is valid if there is such a function and its schema accepts the arguments. It is right if it is the wanted one,
with the same arguments. Case, white space at the ends and a full stop make no difference in texts.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks import coder, compare, records
from benchmarks.cells import markdown, table_of
from benchmarks.load import start
from benchmarks.records import Results, Run
from benchmarks.servers import SERVED_NAME, Forebay, Setting

TASKS = Path(__file__).parent / "tasks/tool_calls.jsonl"
STREAMS = 8
SETTING = Setting(model=coder.NAME, streams=STREAMS, context=4096)
MOST_TOKENS = 200
SECONDS = 600.0
WORKLOAD = "40 requests, greedy"
KEYS = ("called", "valid", "named", "right")


def function(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    """A tool of this name and these parameters."""
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text(description: str) -> dict[str, Any]:
    """The schema of a string."""
    return {"type": "string", "description": description}


def one_of(*words: str) -> dict[str, Any]:
    """The schema of an enumeration."""
    return {"type": "string", "enum": list(words)}


CURRENCY = one_of("USD", "EUR", "GBP", "JPY")
TOOLS = [
    function(
        "get_weather",
        "The weather in a city.",
        ["city", "unit"],
        city=text("Name of the city."),
        unit=one_of("celsius", "fahrenheit"),
    ),
    function(
        "convert_currency",
        "Converts an amount of money.",
        ["amount", "source", "target"],
        amount={"type": "number", "exclusiveMinimum": 0},
        source=CURRENCY,
        target=CURRENCY,
    ),
    function(
        "set_timer",
        "Starts a timer.",
        ["minutes"],
        minutes={"type": "integer", "minimum": 1},
        label=text("What it is for."),
    ),
    function("send_message", "Sends a message to a person.", ["to", "text"], to=text("The person."), text=text("It.")),
    function(
        "create_event",
        "Puts an event into the calendar.",
        ["title", "date", "minutes"],
        title=text("What it is."),
        date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "description": "As 2026-01-31."},
        minutes={"type": "integer", "minimum": 1, "description": "How long it takes."},
    ),
    function(
        "search_products",
        "Searches a shop.",
        ["query", "category"],
        query=text("What is looked for."),
        category=one_of("electronics", "clothing", "books", "kitchen"),
        max_price={"type": "number", "exclusiveMinimum": 0},
    ),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
WAYS: dict[str, dict[str, Any]] = {
    "auto": {"tools": TOOLS},
    "strict": {"tools": STRICT},
    "required": {"tools": TOOLS, "tool_choice": "required"},
}


def ask(url: str, task: dict[str, Any], way: str) -> dict[str, Any]:
    """The first choice of the answer."""
    body = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": task["ask"]}],
        "temperature": 0,
        "max_tokens": MOST_TOKENS,
        "parallel_tool_calls": False,
        **WAYS[way],
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return choice


def plain(value: Any) -> Any:
    """A value in the form for comparisons: case, outer blanks and a full stop do not matter."""
    return value.strip().rstrip(".").casefold() if isinstance(value, str) else value


def judge(task: dict[str, Any], name: str, arguments: Any) -> dict[str, bool]:
    """Whether a call is valid, and whether it is right."""
    schema = SCHEMAS.get(name)
    valid = schema is not None and Draft202012Validator(schema).is_valid(arguments)
    right = False
    if valid and name == task["name"]:
        wanted = {key: plain(value) for key, value in task["arguments"].items()}
        right = {key: plain(value) for key, value in arguments.items()} == wanted
    return {"called": True, "valid": valid, "named": name == task["name"], "right": right}


def called(task: dict[str, Any], choice: dict[str, Any]) -> dict[str, bool]:
    """Judges the call of an answer, if it has one."""
    calls = choice["message"].get("tool_calls") or []
    if not calls:
        return {}
    function = calls[0]["function"]
    try:
        return judge(task, function["name"], json.loads(function["arguments"]))
    except ValueError:
        return {"called": True}


def fenced(task: dict[str, Any], choice: dict[str, Any]) -> dict[str, bool]:
    """Judges a call in a fence of code, if the answer has one."""
    _, fence, rest = (choice["message"].get("content") or "").partition("```json\n")
    if not fence:
        return {}
    try:
        call = json.loads(rest.partition("```")[0])
        return judge(task, call["name"], call["arguments"])
    except (ValueError, KeyError, TypeError):
        return {}


@table_of("tool_calls")
def table(found: Results) -> str:
    """The number of requests that were answered with a valid call, and with the right one."""
    head = ["asked for", "calls", "valid", "the right function", "right", "in a fence", "right in a fence"]
    keys = ("requests", "called", "valid", "named", "right", "fenced_called", "fenced_right")
    rows = []
    for workload in found.workloads():
        for way in found.servers(workload):
            values = {key: found.median(workload, way, key) for key in keys}
            of = f" of {values.pop('requests'):.0f}"
            rows.append([f"`{way}`", *(f"{value:.0f}{of}" for value in values.values())])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Function calls that are valid and right, by what is asked of them.", rounds=1)
    flags.add_argument("--show", action="store_true", help="print every answer that is not right")
    chosen = flags.parse_args()
    if reason := coder.missing():
        raise SystemExit(reason)
    coder.build()
    tasks = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
    found = records.new("tool_calls", chosen.rounds)
    found.notes = {
        "Model": "Qwen2.5-Coder-0.5B-Instruct on the CPU, the weights of its GGUF file in bfloat16",
        "Valid": "there is such a function, and its schema takes the arguments",
        "In a fence": "JSON in a fence of code in the text, which no client gets as a call",
        "Right": "the function that was wanted, with the arguments that were wanted",
    }
    server = Forebay("forebay", "forebay-chat", prefix_cache=True)
    with start(server, SETTING) as running, ThreadPoolExecutor(STREAMS) as pool:
        for number, way in records.in_turn(chosen.rounds, list(WAYS)):
            answers = list(pool.map(lambda task, way=way: ask(running.url, task, way), tasks))  # type: ignore[misc]
            judged = [called(task, answer) for task, answer in zip(tasks, answers, strict=True)]
            values = {key: sum(one.get(key, False) for one in judged) for key in KEYS}
            beside = [fenced(task, answer) for task, answer in zip(tasks, answers, strict=True)]
            values |= {f"fenced_{key}": sum(one.get(key, False) for one in beside) for key in KEYS}
            values["requests"] = len(tasks)
            values["cut"] = sum(answer["finish_reason"] == "length" for answer in answers)
            found.runs.append(Run(WORKLOAD, way, number, values))
            compare.say(f"  round {number} {way}: {values}")
            for task, answer, said in zip(tasks, answers, judged, strict=True):
                if chosen.show and not said.get("right"):
                    compare.say(f"    {task['ask']} {json.dumps(answer['message'], ensure_ascii=False)}")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
