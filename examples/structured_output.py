"""Answers in a given form: one of several words, a regular expression, a JSON schema.

python structured_output.py [MODEL]

The form is enforced during sampling. If `max_tokens` is too small, an answer is still cut off.
"""

import json
import sys

from forebay import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}
TASKS = [
    ("Is this review good or bad? 'I loved every minute.'", StructuredOutputsParams(choice=["good", "bad"])),
    ("When did Apollo 11 land? As year-month-day.", StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}")),
    ("Describe a horse as JSON.", StructuredOutputsParams(json=SCHEMA)),
]


def main() -> None:
    """Prints each task with its answer."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    conversations = [[{"role": "user", "content": task}] for task, _ in TASKS]
    params = [SamplingParams(temperature=0, max_tokens=64, structured_outputs=form) for _, form in TASKS]
    with LLM(model, max_model_len=1024) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    for (task, _), output in zip(TASKS, outputs, strict=True):
        # The model decides about white space in JSON, so it is normalised.
        print(f"{task} -> {' '.join(output.outputs[0].text.split())}")
    print("legs:", json.loads(outputs[2].outputs[0].text)["legs"])


if __name__ == "__main__":
    main()
