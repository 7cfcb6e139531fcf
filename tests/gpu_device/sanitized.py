"""Runs steps of two tiny hands kernel by kernel under a sanitizer. The steps use every operator.

python3 -m tests.gpu_device.sanitized --device cuda
"""

from __future__ import annotations

import argparse

from tests.hand.greedy import model_of
from tests.hand.sparse_slot import FULL, PROMPT, Slot
from tests.hand.support import EVERYTHING, MiniBrain, Request, Sampling, runner_of

DRAWN = Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=3)
LAST_WORDS = "all steps were computed:"


def dense(device: str, dtype: str) -> int:
    """Computes chunks beside decode rows, greedy and drawn. Returns the number of steps."""
    runner = runner_of(model_of("qwen3-moe"), device=device, dtype=dtype, attention_backend="triton")
    runner.warm_up()
    brain = MiniBrain(runner, lookahead=1)
    requests = [
        Request(list(range(1, 30)), 5),
        Request([3, 14, 15], 6, DRAWN, arrival=2),
        Request(list(range(40, 60)), 4, EVERYTHING, arrival=3),
    ]
    brain.serve(requests, chunk=8)
    return brain._step


def sparse(device: str, dtype: str) -> int:
    """Runs a slot that becomes sparse, with choices of an index, hot rows, and rows in the host's memory."""
    slot = Slot("glm-dsa-shared", device=device, dtype=dtype, attention_backend="triton")
    slot.runner.warm_up()
    slot.prefill()
    slot.until_ended(FULL)
    for number in range(10):
        builder = slot.plan()
        if number == 1:
            slot.become_sparse(builder)
        builder.row(1, len(PROMPT) + number, 1)
        slot.take(builder)
    return slot._step


def main() -> None:
    parser = argparse.ArgumentParser(prog="sanitized")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    steps = dense(options.device, options.dtype) + sparse(options.device, options.dtype)
    print(LAST_WORDS, steps)


if __name__ == "__main__":
    main()
