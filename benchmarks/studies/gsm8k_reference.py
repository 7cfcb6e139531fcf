r"""Few-shot GSM8K on transformers, one question at a time: `forebay eval gsm8k` must agree with it, answer by answer.

    forebay serve smollm2 --dtype float32
    forebay eval gsm8k --data-path test.jsonl --train-path train.jsonl --raw-result-file ours.jsonl
    python -m benchmarks.studies.gsm8k_reference --data-path test.jsonl --train-path train.jsonl \
        --output theirs.jsonl --compare ours.jsonl

The second model is made by `python -m benchmarks.coder`; both sides then read the same files in bfloat16 and compute
in float32:

    forebay serve benchmarks/.models/qwen2.5-coder-0.5b --dtype float32
    forebay eval gsm8k ...  # as above
    python -m benchmarks.studies.gsm8k_reference --model qwen2.5-coder-0.5b ...  # as above

`--num-questions` may be smaller here than there: the first of ours are compared. `--record` puts the comparison into
benchmarks/results/gsm8k.json, `python -m benchmarks.tables` from there into docs/performance.

Prompts, stop strings and the reading of answers are implemented again here, from their description, so that the two
compared sides share no code.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks import coder, models
from benchmarks.studies import gsm8k_results
from tests.e2e.models import SmolLM2

STOP = ("Question", "Assistant:", "<|separator|>")
LARGEST = 2**64 - 1
"""The value in place of a number that is too large for any right answer."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A question and its answer, with the names that `forebay eval gsm8k --raw-result-file` gives them."""

    index: int
    prompt: str
    text: str
    predicted: int | None
    label: int
    correct: bool
    tokens: int
    latency: float
    """Seconds until the answer."""
    margin: float
    """The least difference, over the tokens of the answer, between the best and the second best logit. Near 0 the order
    of additions decides, and no engine is right or wrong."""
    error: None = None


def read_jsonl(path: Path) -> list[Json]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def last_integer(text: str) -> int | None:
    """The last integer in a text, without commas. A number with leading zeros, which Python rejects, does not count."""
    digits = re.findall(r"[0-9]+", text.replace(",", ""))
    if not digits or (digits[-1].startswith("0") and digits[-1].strip("0")):
        return None
    return min(int(digits[-1]), LARGEST)


def make_prompts(questions: Iterable[Json], examples: Iterable[Json]) -> list[str]:
    """The prompts: each question after all examples."""
    shown = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in examples)
    return [f"{shown}Question: {one['question']}\nAnswer:" for one in questions]


def cut(text: str) -> str | None:
    """The text before the first stop string; None if there is no stop string."""
    found = [at for stop in STOP if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def location(name: str) -> Path:
    """The directory of the model of this name. Raises FileNotFoundError if it is missing or no model."""
    folder = models.directory(name) if name == coder.NAME else Path(name)
    if not folder.is_dir():
        made = f": {coder.missing() or 'python -m benchmarks.coder makes it'}" if name == coder.NAME else ""
        raise FileNotFoundError(f"there is no directory {folder}{made}")
    return folder


class Reference:
    """A model in transformers in float32 that generates greedily."""

    def __init__(self, model: Any, tokenizer: Tokenizer, ends: set[int]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._ends = ends

    @classmethod
    def load(cls, name: str) -> Reference:
        """Loads `smollm2`, the second model of the benchmarks by its name, or a directory as on the hub."""
        if name == "smollm2":
            smollm2 = SmolLM2()
            config: Any = smollm2.reference.config
            return cls(smollm2.reference, smollm2.tokenizer, _ids(config.eos_token_id))
        folder = location(name)
        config = AutoConfig.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(model.eval(), tokenizer, _ids(config.eos_token_id) | _ids(model.generation_config.eos_token_id))

    def answers(self, prompts: Sequence[str], labels: Sequence[int], most: int) -> Iterable[Answer]:
        """Answers of at most `most` tokens, one by one. The common prefix of all prompts is computed once."""
        encoded = [self._tokenizer.encode(prompt).ids for prompt in prompts]
        # The last token is always computed, because it gives the first logits.
        heads = zip(*(ids[:-1] for ids in encoded), strict=False)
        shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, heads))
        with torch.inference_mode():
            prefix = DynamicCache()
            if shared:
                self._logits(encoded[0][:shared], prefix)
            for index, (prompt, ids, label) in enumerate(zip(prompts, encoded, labels, strict=True)):
                start = time.perf_counter()
                text, tokens, margin = self._generate(ids[shared:], copy.deepcopy(prefix), most)
                latency = time.perf_counter() - start
                predicted = last_integer(text)
                correct = predicted == label
                yield Answer(index, prompt, text, predicted, label, correct, tokens, latency, margin)

    def _logits(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """The logits [vocabulary] after `ids`, which follow the content of `cache` and are added to it."""
        output = self._model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _generate(self, ids: list[int], cache: DynamicCache, most: int) -> tuple[str, int, float]:
        """The text, its number of tokens, and the least margin."""
        tokens: list[int] = []
        margin = float("inf")
        logits = self._logits(ids, cache)
        while True:
            best, second = logits.topk(2)[0].tolist()
            margin = min(margin, best - second)
            tokens.append(int(logits.argmax()))
            if tokens[-1] in self._ends:
                return self._text(tokens[:-1]), len(tokens), margin
            text = self._text(tokens)
            if (stopped := cut(text)) is not None:
                return stopped, len(tokens), margin
            if len(tokens) == most:
                return text, len(tokens), margin
            logits = self._logits(tokens[-1:], cache)

    def _text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _ids(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def differences(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The differences of each question whose prompt, text or number differs; empty if all agree.

    Further questions that only our side answered are ignored.
    """
    found = []
    if len(ours) < len(theirs):
        found.append(f"{len(ours)} answers, but the reference has {len(theirs)}")
    for one, other in zip(ours, theirs, strict=False):
        differing = [name for name in ("index", "prompt", "label", "text", "predicted") if one[name] != other[name]]
        if one["error"] is not None:
            found.append(f"question {one['index']}: the request failed: {one['error']}")
        elif differing:
            values = "".join(f"\n  ours:      {one[name]!r}\n  reference: {other[name]!r}" for name in differing[:1])
            found.append(
                f"question {one['index']}: {', '.join(differing)} differ (least margin {other['margin']:.2g}){values}"
            )
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help=f"smollm2, {coder.NAME} or a directory as on the hub")
    parser.add_argument("--data-path", type=Path, required=True, help="GSM8K's test questions")
    parser.add_argument("--train-path", type=Path, required=True, help="GSM8K's training questions")
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--output", type=Path, required=True, help="a JSON object an answer, written as they come")
    parser.add_argument("--compare", type=Path, help="what --raw-result-file wrote; exit with 1 if it differs")
    parser.add_argument("--record", action="store_true", help="put the comparison into the committed results")
    chosen = parser.parse_args()
    if chosen.record and chosen.compare is None:
        parser.error("--record needs --compare")
    return chosen


def main() -> int:
    """Runs the reference; returns 1 if it differs from the compared file."""
    chosen = arguments()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    questions = read_jsonl(chosen.data_path)[: chosen.num_questions]
    prompts = make_prompts(questions, read_jsonl(chosen.train_path)[: chosen.num_shots])
    labels = [last_integer(question["answer"]) for question in questions]
    assert all(label is not None for label in labels), "every question has an answer"
    reference = Reference.load(chosen.model)
    answers = []
    start = time.perf_counter()
    with chosen.output.open("w", encoding="utf-8") as output:
        for answer in reference.answers(
            prompts, [label for label in labels if label is not None], chosen.max_new_tokens
        ):
            answers.append(asdict(answer))
            output.write(json.dumps(answers[-1]) + "\n")
            output.flush()
    latency = time.perf_counter() - start
    print(f"Accuracy: {sum(answer['correct'] for answer in answers) / len(answers):.3f}")
    print(f"Invalid: {sum(answer['predicted'] is None for answer in answers) / len(answers):.3f}")
    print(f"Latency: {latency:.3f} s")
    print(f"Output throughput: {sum(answer['tokens'] for answer in answers) / latency:.3f} token/s")
    if chosen.compare is None:
        return 0
    ours = read_jsonl(chosen.compare)
    found = differences(ours, answers)
    if chosen.record:
        values = gsm8k_results.counts(ours, answers)
        gsm8k_results.record(Path(chosen.model).name, {"shots": chosen.num_shots, **values})
    print("\n".join(found) or f"All {len(answers)} answers agree.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
