"""A task with tools, done by a client that the tests' environment does not have.

The interpreter of `make setup-clients` runs it. It reads
{"client", "url", "model", "stream", "tools", "choices", "results", "question"},
where "choices" has the `tool_choice` of each turn,
and writes {"called", "answer", "reasons"}, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def with_langchain(task: dict[str, Any]) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

    bare: Any = ChatOpenAI(model=task["model"], base_url=task["url"] + "/v1", api_key="none", max_retries=0)
    messages: list[Any] = [HumanMessage(task["question"])]
    called: list[Any] = []
    reasons: list[str] = []
    for choice in task["choices"]:
        model = bare.bind_tools(task["tools"], tool_choice=choice)
        if task["stream"]:
            answer = None
            for chunk in model.stream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(messages)
        assert answer is not None
        messages.append(answer)
        reasons.append(answer.response_metadata["finish_reason"])
        assert not answer.invalid_tool_calls, answer.invalid_tool_calls
        if not answer.tool_calls:
            return {"called": called, "answer": answer.content, "reasons": reasons}
        for call in answer.tool_calls:
            called.append([call["name"], call["args"]])
            messages.append(ToolMessage(task["results"][call["name"]], tool_call_id=call["id"]))
    raise AssertionError("the task has no end")


def with_litellm(task: dict[str, Any]) -> dict[str, Any]:
    import litellm  # type: ignore[import-not-found]

    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    called: list[Any] = []
    reasons: list[str] = []
    for tool_choice in task["choices"]:
        answer: Any = litellm.completion(
            model="openai/" + task["model"],
            api_base=task["url"] + "/v1",
            api_key="none",
            messages=messages,
            tools=task["tools"],
            tool_choice=tool_choice,
            stream=task["stream"],
            num_retries=0,
        )
        if task["stream"]:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        choice = answer.choices[0]
        messages.append(choice.message.model_dump())
        reasons.append(choice.finish_reason)
        if not choice.message.tool_calls:
            return {"called": called, "answer": choice.message.content, "reasons": reasons}
        for call in choice.message.tool_calls:
            called.append([call.function.name, json.loads(call.function.arguments)])
            result = task["results"][call.function.name]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("the task has no end")


def with_anthropic(task: dict[str, Any]) -> dict[str, Any]:
    import anthropic  # type: ignore[import-not-found]

    client: Any = anthropic.Anthropic(base_url=task["url"], api_key="none", max_retries=0)
    functions = [tool["function"] for tool in task["tools"]]
    tools = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in functions
    ]
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    called: list[Any] = []
    reasons: list[str] = []
    hits: list[float] = []
    for choice in task["choices"]:
        kind = {"auto": "auto", "required": "any"}[choice]
        common: Any = {
            "model": task["model"],
            "max_tokens": 500,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={len(messages)}"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": messages,
            "tools": tools,
            "tool_choice": {"type": kind},
        }
        counted = {name: value for name, value in common.items() if name != "max_tokens"}
        count = client.messages.count_tokens(**counted).input_tokens
        if task["stream"]:
            with client.messages.stream(**common) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**common)
        usage = answer.usage
        assert count == usage.input_tokens + usage.cache_read_input_tokens
        hits.append(usage.cache_read_input_tokens / count)
        reasons.append(answer.stop_reason)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            text = "".join(block.text for block in answer.content if block.type == "text")
            return {"called": called, "answer": text, "reasons": reasons, "hits": hits}
        results = []
        for call in calls:
            called.append([call.name, call.input])
            result = task["results"][call.name]
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "user", "content": results})
    raise AssertionError("the task has no end")


def with_ollama(task: dict[str, Any]) -> dict[str, Any]:
    import ollama  # type: ignore[import-not-found]

    client: Any = ollama.Client(host=task["url"])
    assert task["model"] in [model.model for model in client.list().models]
    assert "tools" in client.show(task["model"]).capabilities
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    called: list[Any] = []
    reasons: list[str] = []
    for _ in task["choices"]:
        common: Any = {"model": task["model"] + ":latest", "messages": messages, "tools": task["tools"]}
        if task["stream"]:
            message: dict[str, Any] = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
            for part in client.chat(**common, stream=True):
                message["content"] += part.message.content or ""
                message["thinking"] += part.message.thinking or ""
                message["tool_calls"] += [call.model_dump() for call in part.message.tool_calls or []]
                last = part
        else:
            last = client.chat(**common)
            message = last.message.model_dump()
        assert last.done
        assert last.prompt_eval_count > 0
        assert last.eval_duration > 0
        reasons.append(last.done_reason)
        messages.append(message)
        calls = message["tool_calls"] or []
        if not calls:
            return {"called": called, "answer": message["content"], "reasons": reasons}
        for call in calls:
            function = call["function"]
            called.append([function["name"], function["arguments"]])
            result = task["results"][function["name"]]
            messages.append({"role": "tool", "tool_name": function["name"], "content": result})
    raise AssertionError("the task has no end")


CLIENTS = {
    "anthropic": with_anthropic,
    "langchain-openai": with_langchain,
    "litellm": with_litellm,
    "ollama": with_ollama,
}

if __name__ == "__main__":
    given = json.load(sys.stdin)
    done = CLIENTS[given["client"]](given)
    json.dump(done, sys.stdout)
