"""A hand's life in twenty steps, for a sanitizer: prompts in chunks, decode rows, draws, penalties, a slot used again.

    compute-sanitizer --tool memcheck python -m tests.gpu_device.sanitized cuda qwen3

Nothing is captured, so that each kernel is reported by its own name.
"""

from __future__ import annotations

import sys

from tests.hand.support import MiniBrain, Request, Sampling, reference_model, runner_of

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=3),
    Sampling(temperature=0.7, repetition_penalty=1.3, seed=9, logprobs=2),
]


def main(device: str, family: str) -> None:
    """Serves six requests, of which at most four run at a time."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    runner = runner_of(reference_model(family), device=device, dtype=dtype, graph_rows=0, attention_backend="triton")
    runner.warm_up()
    # The lengths are on both sides of a page's end.
    lengths = (1, 7, 8, 9, 30, 3)
    requests = [
        Request(list(range(1, 1 + length)), 5, SAMPLINGS[number % 3], 2 * number)
        for number, length in enumerate(lengths)
    ]
    MiniBrain(runner, lookahead=1).serve(requests, chunk=7)
    print("tokens", sum(len(request.tokens) for request in requests))


if __name__ == "__main__":
    main(*sys.argv[1:])
