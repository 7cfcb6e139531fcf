"""The benchmark of a mixture of experts: its weights, and its table."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from benchmarks import expert_model, gpt_oss_model, tables
from benchmarks.records import Results, Run


def test_outputs_of_random_blocks_are_as_large_as_inputs() -> None:
    random = np.random.default_rng(3)
    made = expert_model.blocks(random, 4, 64, 512)
    assert made.shape == (4, 64, 512 // 32 * 18)
    weights = dequantize(made.reshape(-1, made.shape[-1]), GGMLQuantizationType.Q4_0)
    x = random.standard_normal(512).astype(np.float32)
    assert abs(float((weights @ x).std()) - 1) < 0.15


@pytest.mark.parametrize("kind", [GGMLQuantizationType.MXFP4, GGMLQuantizationType.Q8_0])
def test_outputs_of_random_blocks_of_a_gpt_oss_are_as_large_as_inputs(kind: GGMLQuantizationType) -> None:
    random = np.random.default_rng(3)
    made = gpt_oss_model.blocks(random, kind, 4, 64, 512)
    weights = dequantize(made.reshape(-1, made.shape[-1]), kind)
    x = random.standard_normal(512).astype(np.float32)
    # A scale of MXFP4 is a power of 2, so the size is only approximate.
    assert abs(float(np.log2((weights @ x).std()))) < (0.65 if kind == GGMLQuantizationType.MXFP4 else 0.2)


def test_every_server_has_a_column_and_the_first_is_compared_with_the_others() -> None:
    def run(workload: str, server: str, rate: float) -> Run:
        return Run(workload, server, 1, {"output_throughput": rate, "input_throughput": 10 * rate})

    found = Results(
        "experts", runs=[run("one", "a", 6), run("one", "b", 2), run("prefill", "a", 3), run("prefill", "b", 4)]
    )
    lines = tables.table(found).splitlines()
    assert lines[0] == "| workload | a, tokens/s | b, tokens/s | a / b |"
    assert lines[2:] == ["| one | 6.00 | 2.00 | 3.00 |", "| prefill | 30.0 | 40.0 | 0.75 |"]
