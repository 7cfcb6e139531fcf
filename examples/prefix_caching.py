"""Asks several questions about one text. The text is computed only once.

python prefix_caching.py [MODEL]

The prefix cache is always on. `num_cached_tokens` is the number of a prompt's tokens that were found in it.
"""

import sys

from forebay import LLM, SamplingParams

TEXT = "The river rises in the hills. It turns three mills. Then it flows through the town and into the sea. " * 8
QUESTIONS = ["Where does the river rise?", "How many mills does it turn?", "Where does it end?"]


def main() -> None:
    """Prints how many tokens of each prompt were cached: none of the first, most of the others."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model, max_model_len=2048) as llm:
        for question in QUESTIONS:
            (output,) = llm.generate(f"{TEXT}\nQuestion: {question}\nAnswer:", greedy, use_tqdm=False)
            found, all_tokens = output.num_cached_tokens, len(output.prompt_token_ids or [])
            print(f"{question} {found} of {all_tokens} tokens were cached -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
