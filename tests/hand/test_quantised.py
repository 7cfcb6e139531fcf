"""Quantised products: models against PyTorch with the same rounding, any company, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize

from benchmarks.described import described
from forebay.compute import choose
from forebay.compute.eager import TorchCompute
from forebay.compute.native import NativeCompute
from forebay.compute.rows import Launch, Rows
from forebay.kernels import library as binding
from forebay.kernels.packing import plain_parts
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.support import FAMILIES, HOST, hf_config, reference_model, runner_of, wire_config
from tests.weights.support import smollm2, tiny_metadata, tiny_tensors, tiny_tokenizer, write_gguf

Q = gguf.GGMLQuantizationType
Step = list[tuple[int, int, int]]  # slot, start, length of each row
STEPS: list[Step] = [
    [(0, 0, 37), (1, 0, 1), (2, 0, 50)],
    [(1, 1, 1), (0, 37, 1), (2, 50, 1), (3, 0, 9)],
]
MIXED = {"attn_q": Q.Q4_0, "attn_k": Q.Q4_1, "attn_v": Q.Q5_0, "attn_output": Q.F16, "token_embd": Q.Q8_0}
"""Types by tensor: what is fused is not all of one type, and what is not given is Q4_1."""
WITHOUT_KERNELS = {"attn_q": Q.Q5_0, "attn_k": Q.Q4_0, "attn_v": Q.Q8_0, "ffn_down": Q.Q5_1, "token_embd": Q.Q5_0}
"""The same, and most of them have no kernels of their own."""


def rows(step: Step) -> Launch:
    slot, start, length = np.array(step, np.int64).T
    return Launch.of(Rows(slot, start, length, np.arange(len(step))), HOST)


def fill(runner: ModelRunner) -> ModelRunner:
    """Puts random tokens into four slots, and pages in no order."""
    random = np.random.default_rng(5)
    tables = runner.tables
    vocabulary = runner.model_config.vocab_size
    tables.token_pool[:4] = torch.from_numpy(random.integers(0, vocabulary, tables.token_pool[:4].shape))
    pages = random.permutation(runner.kv.page_count)[: 4 * tables.pages_per_slot].reshape(4, -1)
    tables.page_table[:4] = torch.from_numpy(pages)
    return runner


def int8(family: str = "llama", dtype: str = "float32", quantization: str | None = "w8a8_int8") -> ModelRunner:
    return fill(runner_of(reference_model(family), dtype=dtype, page_size=16, quantization=quantization))


def loaded(path: Path, dtype: str = "float32", quantization: str | None = "gguf") -> ModelRunner:
    model = described(path, path.parent / "cache")
    config = wire_config({}, load_format="auto", page_size=16, dtype=dtype, quantization=quantization)
    runner = ModelRunner(RunnerConfig.from_dict({**config, "model": model}))
    runner.load(lambda done, total: None)
    return fill(runner)


def tiny(path: Path, types: dict[str, Any], architecture: str = "llama", *, tied: bool = True) -> Path:
    """A small model whose matrices have these types, by the tensors' names; "" is what the others have."""
    tensors = {}
    for name, (values, kind) in tiny_tensors(architecture, tied=tied).items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        if values.ndim == 2:
            kind = types.get(stem, types[""])
            values = quantize(values * 0.12, kind)
        tensors[name] = (values, kind)
    return write_gguf(path, architecture, {**tiny_metadata(), **tiny_tokenizer()}, tensors)


def native(runner: ModelRunner, threads: int = 2) -> NativeCompute:
    return NativeCompute(runner.decoder, runner.tables, runner.kv, runner.prompts, threads)


def reference(runner: ModelRunner) -> TorchCompute:
    return TorchCompute(runner.decoder, runner.tables, runner.kv, runner.prompts, runner.device)


def rounded(x: torch.Tensor, shared: int) -> torch.Tensor:
    """What 8 bits and a scale for every `shared` elements leave of x."""
    parts = x.float().unflatten(-1, (-1, shared))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return (scale * (parts / scale.clamp_min(1e-30)).round()).flatten(-2)


def quantised_torch(monkeypatch: pytest.MonkeyPatch, shared: Callable[[torch.Tensor], int | None]) -> None:
    """Has PyTorch's products round their inputs as the kernels do; `shared` of a weight: elements to a scale."""
    exact = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count = shared(weight)
        return exact(x if count is None else rounded(x, count).to(x.dtype), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


def check(compute: NativeCompute, expected: TorchCompute) -> None:
    """Codes may differ by one where a number is halfway: the bound is on the typical difference."""
    for step in STEPS:
        found, wanted = compute.logits(rows(step)), expected.logits(rows(step))
        assert float((found - wanted).square().mean().sqrt()) < 0.02 * float(wanted.std())
        tokens, finite = compute.greedy(rows(step))
        assert tokens.tolist() == found.argmax(dim=-1).tolist()
        assert finite.all()
        assert torch.equal(compute.head(compute.states(rows(step))), found)


@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "llama-head-dim", "qwen2", "qwen3"])
def test_int8_logits_are_those_of_torch_that_rounds(
    family: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = native(int8(family))
    other = int8(family, quantization=None)
    decoder = other.decoder
    for attention, mlp in map(plain_parts, decoder.blocks):
        for of in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
            of.weight.copy_(rounded(of.weight, of.weight.shape[1]))
    # The head is quantised, the embedding is not.
    decoder.head = rounded(decoder.head, decoder.head.shape[1])
    quantised_torch(monkeypatch, lambda weight: weight.shape[1])
    check(compute, reference(other))


@pytest.mark.parametrize(
    ("types", "architecture", "tied"),
    [
        ({"": Q.Q4_0}, "llama", True),
        ({"": Q.Q4_1, "token_embd": Q.Q8_0}, "llama", True),
        ({"": Q.Q8_0}, "qwen3", False),
        ({"": Q.Q4_1, **MIXED}, "qwen2", False),
        ({"": Q.Q4_0, **WITHOUT_KERNELS}, "llama", True),
    ],
)
def test_gguf_logits_are_those_of_torch_that_rounds(
    types: dict[str, Any],
    architecture: str,
    tied: bool,
    instructions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny(tmp_path / "model.gguf", types, architecture, tied=tied)
    compute = native(loaded(path))
    other = loaded(path, quantization=None)
    # What has a type without blocks is computed as ever.
    parts = [plain_parts(block) for block in other.decoder.blocks]
    plain = [attention.output for attention, _ in parts if types.get("attn_output") == Q.F16]
    addresses = {of.weight.data_ptr() for of in plain}
    for _, mlp in parts if types.get("ffn_down") == Q.Q5_1 else ():
        # Q8_0 has no least value: these become the nearest that it has.
        mlp.down.weight.copy_(rounded(mlp.down.weight, 32))
    quantised_torch(monkeypatch, lambda weight: None if weight.data_ptr() in addresses else 32)
    check(compute, reference(other))


def check_company(runner: Callable[[], ModelRunner]) -> None:
    """Last rows of three slots have the same bits alone on one thread and beside others on several."""
    alone = native(runner(), threads=1)
    wanted = [alone.logits(rows([(slot, 0, 80)]))[0] for slot in range(3)]
    for threads in (1, 2, 3):
        mixed = native(runner(), threads)
        mixed.logits(rows([(0, 0, 33), (1, 0, 7), (2, 0, 79)]))
        mixed.logits(rows([(1, 7, 60), (0, 33, 46)]))
        found = mixed.logits(rows([(2, 79, 1), (0, 79, 1), (1, 67, 13)]))
        for slot, row in ((2, 0), (0, 1), (1, 2)):
            assert torch.equal(found[row], wanted[slot])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "Q4_0", "Q4_1", "Q8_0"])
def test_a_row_gets_the_same_bits_in_any_company(dtype: str, kind: str, instructions: str, tmp_path: Path) -> None:
    def runner() -> ModelRunner:
        if kind == "int8":
            return int8(dtype=dtype)
        return loaded(tiny(tmp_path / "model.gguf", {"": getattr(Q, kind)}), dtype)

    check_company(runner)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int8", "gguf"])
def test_rows_that_are_not_finite_are_told_and_keep_to_themselves(bad: float, kind: str, tmp_path: Path) -> None:
    runner = int8() if kind == "int8" else loaded(tiny(tmp_path / "model.gguf", {"": Q.Q4_1}))
    compute = native(runner)
    compute.logits(rows([(0, 0, 20), (1, 0, 20)]))
    page = int(runner.tables.page_table[0, 0])
    runner.kv.layers[0].values[page * 16 : (page + 1) * 16] = bad
    logits = compute.logits(rows([(0, 20, 1), (1, 20, 1)]))
    assert logits.isfinite().all(dim=-1).tolist() == [False, True]
    assert compute.greedy(rows([(0, 20, 1), (1, 20, 1)]))[1].tolist() == [False, True]


def test_the_default_model_is_as_far_from_exact_as_rounding_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, other = loaded(smollm2()), loaded(smollm2(), quantization=None)
    # "The capital of France is": 30 layers make much of a code that differs by one where there is no sense in a text.
    tokens = torch.tensor([504, 3575, 282, 4649, 314])
    for each in (runner, other):
        each.tables.token_pool[0, : len(tokens)] = tokens
    step = rows([(0, 0, len(tokens))])
    exact = reference(other).logits(step)
    quantised_torch(monkeypatch, lambda weight: 32)
    found, wanted = native(runner).logits(step), reference(other).logits(step)

    def distance(logits: torch.Tensor) -> float:
        return float((logits - exact).square().mean().sqrt() / exact.std())

    assert 0 < distance(found) < max(0.1, 1.5 * distance(wanted))
    assert found.argmax() == exact.argmax()


def test_blocks_take_less_memory_and_the_log_says_which_there_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny(tmp_path / "model.gguf", {"": Q.Q4_0, "ffn_down": Q.Q5_0, "attn_output": Q.F16})
    plain = loaded(path, quantization=None).facts()["weight_bytes"]
    assert capfd.readouterr().err == ""
    quantised = loaded(path).facts()["weight_bytes"]
    assert isinstance(plain, int)
    assert isinstance(quantised, int)
    assert quantised < 0.6 * plain
    told = "computing with blocks of the file: 11 Q4_0, 2 Q5_0 as Q8_0; 2 matrices in float32"
    assert told in capfd.readouterr().err


def test_a_file_is_computed_in_its_blocks_unless_asked_otherwise(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", {"": Q.Q4_1, **MIXED})
    given, automatic, plain = (loaded(path, quantization=wanted) for wanted in ("gguf", "auto", None))
    logits = [native(runner).logits(rows(STEPS[0])) for runner in (given, automatic, plain)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert automatic.facts() == given.facts()
    assert "Q4_1" in str(automatic.facts()["blocks"])
    assert plain.facts()["blocks"] == ""


def test_a_file_without_fitting_blocks_is_computed_in_the_models_type(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", {"": Q.F16})
    automatic, plain = (loaded(path, quantization=wanted) for wanted in ("auto", None))
    assert automatic.facts() == plain.facts()
    assert torch.equal(*(native(runner).logits(rows(STEPS[0])) for runner in (automatic, plain)))


@pytest.mark.parametrize("without", ["the kernels", "products of bytes"])
def test_blocks_are_multiplied_out_where_that_is_quicker(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without == "the kernels":
        monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    else:
        monkeypatch.setattr(choose, "level", lambda: "baseline")
    runner = loaded(tiny(tmp_path / "model.gguf", {"": Q.Q4_1, **MIXED}), quantization="auto")
    assert runner.facts()["blocks"] == ""
    assert not runner.model.params.formats.for_integers


def test_int8_takes_the_memory_that_it_says() -> None:
    plain, quantised = int8(quantization=None), int8()
    native(plain)
    native(quantised)
    weights = sum(plain_parts(block)[1].down.inputs * 64 for block in quantised.decoder.blocks)
    saved = int(plain.facts()["weight_bytes"]) - int(quantised.facts()["weight_bytes"])
    assert saved > 3 * weights


def runner_with(**changes: Any) -> ModelRunner:
    config = hf_config(FAMILIES["llama"][1], "LlamaForCausalLM")
    return ModelRunner(RunnerConfig.from_dict(wire_config(config, **changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "fp4"}, "use w8a8_int8 or gguf"),
        ({"quantization": "gguf"}, "none is loaded"),
        ({"quantization": "w8a8_int8", "intermediate_size": 90}, "needs multiples of 32"),
    ],
)
def test_what_can_not_be_quantised(changes: dict[str, Any], message: str) -> None:
    config = {**hf_config(FAMILIES["llama"][1], "LlamaForCausalLM")}
    config["intermediate_size"] = changes.pop("intermediate_size", 96)
    with pytest.raises(ValueError, match=message):
        ModelRunner(RunnerConfig.from_dict(wire_config(config, **changes)))


@pytest.mark.parametrize(
    ("family", "architecture", "message"),
    [
        ("deepseek-v3", "DeepseekV3ForCausalLM", "it has latent attention"),
    ],
)
def test_what_has_no_kernel_is_not_quantised(family: str, architecture: str, message: str) -> None:
    wire = wire_config(hf_config(FAMILIES[family][1], architecture), quantization="w8a8_int8")
    with pytest.raises(ValueError, match=f"not supported for {architecture}: .*{message}"):
        ModelRunner(RunnerConfig.from_dict(wire))


def test_a_file_without_a_type_that_there_are_kernels_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"knows Q8_0, Q4_0, .*, TQ2_0, and no matrix"):
        loaded(tiny(tmp_path / "model.gguf", {"": Q.F16}))


def test_pytorch_has_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    with pytest.raises(ValueError, match="needs the compiled kernels"):
        runner_with(quantization="w8a8_int8")


def test_a_level_without_dot_products_of_bytes_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", "baseline")
    runner_with(quantization="w8a8_int8")
    binding.library().fb_limit(None)
    assert "plain loops with baseline" in capfd.readouterr().err
