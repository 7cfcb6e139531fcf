"""A task with tools, done by a client that is not installed beside the tests.

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


if __name__ == "__main__":
    given = json.load(sys.stdin)
    done = {"langchain-openai": with_langchain, "litellm": with_litellm}[given["client"]](given)
    json.dump(done, sys.stdout)
