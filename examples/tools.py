"""Lets a model call a function, and continues with the function's result.

python tools.py [MODEL]

The call is forced here, so that small models make it too. Without `tool_choice` the model decides.
"""

import json
import sys
from typing import Any

from forebay import LLM, SamplingParams

CITIES = {"Oslo": 4, "Rome": 19}
TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city, in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def temperature(city: str) -> str:
    """The function that the model may call."""
    return f"{CITIES[city]} degrees"


def main() -> None:
    """Prints the model's call, the result, and the model's answer."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    with LLM(model, max_model_len=2048) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, extra_args=forced)
        (output,) = llm.chat(messages, params, use_tqdm=False, tools=[TOOL])
        (call,) = output.outputs[0].tool_calls
        arguments = json.loads(call["function"]["arguments"])
        result = temperature(**arguments)
        print(f"call: {call['function']['name']}({arguments['city']}) -> {result}")
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        print(f"answer: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
