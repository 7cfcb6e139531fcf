"""transformers as a peer on a GPU: tokens a second of its own two ways to generate, in one process and without HTTP.

    python generate.py --model FOLDER --way static|continuous --requests 64 --prompt 512 --answer 128

Weights are made up on the device. `static` is `generate` with a static cache and compiled decode steps (CUDA graphs).
`continuous` is `generate_batch`: paged attention, with graphs and asynchronous batches where it can. Both are measured
after a run of the same sizes. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE = 256
"""Tokens of a page, which is the default."""


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", required=True)
    flags.add_argument("--way", choices=("static", "continuous"), required=True)
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--requests", type=int, required=True)
    flags.add_argument("--prompt", type=int, required=True)
    flags.add_argument("--answer", type=int, required=True)
    flags.add_argument("--runs", type=int, default=3)
    flags.add_argument("--attention", default="sdpa", help="of transformers' names [%(default)s]")
    asked = flags.parse_args()
    with torch.device(asked.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(asked.model), dtype=torch.bfloat16, attn_implementation=asked.attention
        ).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, model.config.vocab_size - 1, (asked.requests, asked.prompt), generator=generator)
    run = static if asked.way == "static" else continuous
    times = run(model, prompts, asked.answer, asked.runs)
    tokens = asked.requests * asked.answer
    print(json.dumps({"output_throughput": tokens / statistics.median(times), "seconds": times, "tokens": tokens}))


def timed(work: Callable[[], None], runs: int) -> list[float]:
    """Seconds of each run but the first, which does the setup."""
    times = []
    for _ in range(1 + runs):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[1:]


def static(model: AutoModelForCausalLM, prompts: torch.Tensor, answer: int, runs: int) -> list[float]:
    """Generates with all prompts in one static batch."""
    where = model.device
    config = GenerationConfig(
        max_new_tokens=answer,
        min_new_tokens=answer,
        do_sample=False,
        pad_token_id=0,
        # transformers then compiles decode steps on a GPU.
        cache_implementation="static",
    )
    inputs = prompts.to(where)
    mask = torch.ones_like(inputs)

    def work() -> None:
        made = model.generate(inputs, attention_mask=mask, generation_config=config)
        if made.shape[1] != prompts.shape[1] + answer:
            raise RuntimeError(f"{made.shape[1]} tokens")

    return timed(work, runs)


def continuous(model: AutoModelForCausalLM, prompts: torch.Tensor, answer: int, runs: int) -> list[float]:
    """Generates with continuous batching."""
    # No token ends an answer.
    config = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    inputs = prompts.tolist()
    pages = len(inputs) * -(-(prompts.shape[1] + answer) // PAGE)
    # Every run has the same prompts, so blocks are not shared: no other server here reuses prefixes.
    batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages + 64, allow_block_sharing=False)

    def work() -> None:
        # The persistent manager keeps the setup of the first run.
        made = model.generate_batch(
            inputs, config, continuous_batching_config=batching, progress_bar=False, persistent_manager=True
        )
        lengths = {len(output.generated_tokens) for output in made.values()}
        if len(made) != len(inputs) or lengths != {answer}:
            errors = {str(output.error) for output in made.values() if output.error}
            raise RuntimeError(f"{len(made)} answers of {sorted(lengths)} tokens {errors or ''}")

    return timed(work, runs)


if __name__ == "__main__":
    main()
