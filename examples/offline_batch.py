"""Continues a batch of prompts, and answers a batch of conversations.

    python offline_batch.py [MODEL]

`use_tqdm=False` hides the progress bars.
"""

import sys

from forebay import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
QUESTIONS = ["What is the capital of Norway?", "Name a colour."]


def main() -> None:
    """Prints each prompt with its continuation, and each question with its answer."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model, max_model_len=1024) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16)
        for output in llm.generate(PROMPTS, greedy, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(conversations, greedy, use_tqdm=False)
        for question, output in zip(QUESTIONS, answers, strict=True):
            print(f"{question!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
