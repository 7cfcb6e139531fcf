"""The compiled kernels against PyTorch's operators, and against themselves however a step is put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.described import model_config
from forebay.compute.eager import TorchCompute
from forebay.compute.native import NativeCompute
from forebay.compute.rows import Launch, Rows
from forebay.kernels import library as binding
from forebay.kernels.library import level, native_wanted
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.support import FAMILIES, HOST, hf_config, reference_model, runner_of, wire_config

PAGE_SIZES = (8, 16)
"""Keys and values lie in the order that the kernels read, or cannot."""
POSITIONS = 512
Step = list[tuple[int, int, int]]  # slot, start, length of each row

COMPILED = [
    family
    for family, (kind, config) in FAMILIES.items()
    if NativeCompute.supports(model_config(hf_config(config, kind.__name__)))
]
"""The families that the kernels compute."""


AMPLIFIED = {"mistral-window": 2, "gemma3": 4, "gemma3-windows-only": 5, "gemma3-long-windows": 4}
"""Random models that amplify what is rounded, in PyTorch's bfloat16 as in the kernels': wider bounds by this factor."""


def filled(family: str, dtype: str, page_size: int = 16, **changes: Any) -> ModelRunner:
    """A runner with random weights, tokens in four slots and pages in no order."""
    pages_per_slot = -(-changes["context_length"] // page_size)
    positions = max(POSITIONS, 4 * pages_per_slot * page_size)
    runner = runner_of(reference_model(family), dtype=dtype, max_total_tokens=positions, page_size=page_size, **changes)
    random = np.random.default_rng(5)
    tables = runner.tables
    tables.token_pool[:4] = torch.from_numpy(random.integers(0, 131, tables.token_pool[:4].shape))
    pages = random.permutation(positions // page_size)[: 4 * tables.pages_per_slot].reshape(4, -1)
    tables.page_table[:4] = torch.from_numpy(pages)
    return runner


def native(runner: ModelRunner, threads: int = 2) -> NativeCompute:
    return NativeCompute(runner.decoder, runner.tables, runner.kv, runner.prompts, threads)


def rows(step: Step) -> Launch:
    slot, start, length = np.array(step, np.int64).T
    return Launch.of(Rows(slot, start, length, np.arange(len(step))), HOST)


def silent(start: int, length: int) -> Launch:
    """A row of slot 0 that does not sample."""
    return Launch.of(Rows(np.array([0]), np.array([start]), np.array([length]), np.zeros(0, np.int64)), HOST)


STEPS: list[Step] = [
    [(0, 0, 37), (1, 0, 1), (2, 0, 50)],
    [(0, 37, 1), (2, 50, 20), (1, 1, 33)],
    [(1, 34, 1), (0, 38, 1), (2, 70, 1), (3, 0, 90)],
    [(3, 90, 1)],
]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", COMPILED)
def test_logits_are_those_of_torch(family: str, dtype: str, page_size: int, instructions: str) -> None:
    expected_runner, runner = (filled(family, dtype, page_size, context_length=96) for _ in range(2))
    expected = TorchCompute(
        expected_runner.decoder,
        expected_runner.tables,
        expected_runner.kv,
        expected_runner.prompts,
        expected_runner.device,
    )
    compute = native(runner)
    for step in STEPS:
        found, wanted = compute.logits(rows(step)), expected.logits(rows(step))
        # bfloat16 has 8 bits, and the two round at different places: the bound is on the typical difference.
        typical = {"float32": 2e-6, "bfloat16": 0.02}[dtype] * max(1.0, float(wanted.std())) * AMPLIFIED.get(family, 1)
        apart = (found - wanted).square().mean(dim=-1)
        # A token between two experts may go to either: that row has other logits.
        of_rows = apart.median() if "moe" in family and dtype == "bfloat16" else apart.mean()
        assert float(of_rows.sqrt()) < typical
        tokens, finite = compute.greedy(rows(step))
        assert tokens.tolist() == found.argmax(dim=-1).tolist()
        assert finite.all()
        assert torch.equal(compute.head(compute.states(rows(step))), found)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "glm4-moe"])
def test_a_row_gets_the_same_bits_in_any_company(
    family: str, dtype: str, threads: int, page_size: int, instructions: str
) -> None:
    whole, pieces = (filled(family, dtype, page_size, context_length=96) for _ in range(2))
    alone = native(whole, threads=1)
    wanted = [alone.logits(rows([(slot, 0, 80)]))[0] for slot in range(3)]
    mixed = native(pieces, threads)
    mixed.logits(rows([(0, 0, 33), (1, 0, 7), (2, 0, 79)]))
    mixed.logits(rows([(1, 7, 60), (0, 33, 46)]))
    found = mixed.logits(rows([(2, 79, 1), (0, 79, 1), (1, 67, 13)]))
    for slot, row in ((2, 0), (0, 1), (1, 2)):
        assert torch.equal(found[row], wanted[slot])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_long_row_that_threads_share_gets_the_bits_of_its_prompt(dtype: str, threads: int) -> None:
    length = 1300  # two whole spans of attention, and a part of one
    runner = filled("llama", dtype, context_length=length)
    alone = native(runner, threads=1)
    step = silent(0, length - 1)
    alone.logits(step)
    wanted = alone.logits(rows([(0, length - 2, 2)]))
    shared = native(filled("llama", dtype, context_length=length), threads)
    for start in range(0, length - 1, 433):
        shared.logits(silent(start, 433))
    for _ in range(2):
        assert torch.equal(shared.logits(rows([(0, length - 1, 1)])), wanted)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_told_and_keep_to_themselves(bad: float, page_size: int) -> None:
    runner = filled("llama", "float32", page_size, context_length=96)
    compute = native(runner)
    # What was on a page before its owner wrote there is nobody's business.
    for slot, length in ((0, 20), (1, 20)):
        first_unwritten = -(-length // page_size) - 1
        for page in runner.tables.page_table[slot, first_unwritten:].tolist():
            for layer in runner.kv.layers:
                layer.values[page * page_size : (page + 1) * page_size] = bad
                layer.keys[page * page_size : (page + 1) * page_size] = bad
    assert compute.logits(rows([(0, 0, 20), (1, 0, 20)])).isfinite().all()
    page = int(runner.tables.page_table[0, 0])
    runner.kv.layers[0].values[page * page_size : (page + 1) * page_size] = bad
    logits = compute.logits(rows([(0, 20, 1), (1, 20, 1)]))
    assert logits.isfinite().all(dim=-1).tolist() == [False, True]
    assert compute.greedy(rows([(0, 20, 1), (1, 20, 1)]))[1].tolist() == [False, True]


def test_of_equal_logits_the_first_wins() -> None:
    runner = filled("llama-untied-biases", "float32", context_length=96)
    runner.decoder.head[:] = runner.decoder.head[3]
    assert native(runner).greedy(rows([(0, 0, 5)]))[0].tolist() == [0]


def test_steps_that_sample_nothing_only_write_pages() -> None:
    runner = filled("qwen3", "float32", context_length=96)
    compute = native(runner)
    step = silent(0, 9)
    assert compute.logits(step).shape == (0, 131)
    assert compute.greedy(step)[0].shape == (0,)
    keys = runner.kv.layers[-1].keys
    written, *others = keys.view(-1, 16, *keys.shape[1:])[runner.tables.page_table[0].long()]
    assert int(written.ne(0).sum()) == 9 * keys[0].numel()
    assert all(page.eq(0).all() for page in others)


def test_odd_sizes_are_left_to_torch() -> None:
    config = {
        **reference_model("llama").config.to_dict(),
        "intermediate_size": 97,
        "architectures": ["LlamaForCausalLM"],
    }
    runner = ModelRunner(RunnerConfig.from_dict(wire_config(config, load_format="dummy")))
    assert not NativeCompute.supports(runner.decoder.config)
    runner.load(lambda done, total: None)
    runner.warm_up()


def test_the_choice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert level() in binding.LEVELS
    for choice, wanted in (("native", True), ("torch", False)):
        monkeypatch.setenv("FOREBAY_KERNELS", choice)
        assert native_wanted() is wanted
    monkeypatch.setenv("FOREBAY_KERNELS", "fast")
    with pytest.raises(ValueError, match="native or torch"):
        native_wanted()
    monkeypatch.setenv("FOREBAY_KERNELS", "baseline")
    assert native_wanted()
    assert level() == "baseline"
    binding.library().fb_limit(None)
    monkeypatch.setattr(binding, "NAME", "none.so")
    binding.library.cache_clear()
    try:
        monkeypatch.setenv("FOREBAY_KERNELS", "native")
        with pytest.raises(binding.KernelsUnavailableError):
            native_wanted()
        monkeypatch.delenv("FOREBAY_KERNELS")
        assert not native_wanted()
        assert "slower" in capsys.readouterr().err
    finally:
        binding.library.cache_clear()


def test_the_kernels_compute_every_dense_family() -> None:
    assert [family for family in FAMILIES if not family.startswith(("glm-dsa", "deepseek"))] == COMPILED
