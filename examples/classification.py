"""Classifies texts with a chat model, and prints the probability of each class.

python classification.py [MODEL]

The answer can only be one of the classes. A classifier or cross-encoder supports `LLM.classify` and `LLM.score`
instead: if MODEL is one, the example uses both.
"""

import math
import sys

from forebay import LLM, RequestError, SamplingParams, StructuredOutputsParams

CLASSES = ["sport", "food", "weather"]
TEXTS = ["It rains all day.", "The match ended two to one.", "Add salt to the soup."]


def by_choice(llm: LLM) -> None:
    """Prints a class for each text, and the unconstrained probability of the class's first token."""
    params = SamplingParams(
        temperature=0, max_tokens=8, logprobs=1, structured_outputs=StructuredOutputsParams(choice=CLASSES)
    )
    question = f"Answer with one word of {', '.join(CLASSES)}. What is this text about? "
    conversations = [[{"role": "user", "content": question + text}] for text in TEXTS]
    for text, output in zip(TEXTS, llm.chat(conversations, params, use_tqdm=False), strict=True):
        choice = output.outputs[0]
        assert choice.logprobs is not None
        first = choice.logprobs[0][choice.token_ids[0]]
        print(f"{text} -> {choice.text} ({math.exp(first.logprob):.2f})")


def by_classifier(llm: LLM) -> None:
    """Prints the probabilities of a classifier's labels, and the scores of pairs."""
    for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
        print(f"{text} -> {[round(one, 2) for one in output.outputs.probs]}")
    for text, pair in zip(TEXTS, llm.score("Will it be wet?", TEXTS, use_tqdm=False), strict=True):
        print(f"Will it be wet? / {text} -> {pair.outputs.score:.2f}")


def main() -> None:
    """Classifies the texts by the method that the model supports."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model) as llm:
        try:
            by_classifier(llm)
        except RequestError:
            by_choice(llm)


if __name__ == "__main__":
    main()
