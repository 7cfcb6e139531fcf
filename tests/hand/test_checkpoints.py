"""Checkpoints with experts in the hub's forms: whole, in 8-bit floats, with layers to leave out, and damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import handshake_model
from forebay.layers.moe import MixtureOfExperts
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.codes import Raw
from forebay.weights.errors import ModelError
from forebay.weights.stored import Fp8
from tests.hand.support import MiniBrain, Request, greedy_reference, hub_weights, reference_model, wire_config

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
COUNT = 6
Weights = dict[str, torch.Tensor]


def saved(directory: Path, model: Any, change: Callable[[Weights], Any] | None = None, **config: Any) -> dict[str, Any]:
    """A checkpoint as transformers writes it, in two files and with a change, as the brain describes it to a hand."""
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    if change is not None:
        change(weights)
    names = sorted(weights)
    parts = {"a": names[::2], "b": names[1::2]}
    for part, of_part in parts.items():
        save_file({name: weights[name].contiguous() for name in of_part}, directory / f"{part}.safetensors")
    stored = json.loads((directory / "config.json").read_text()) | config
    files = [str(directory / f"{part}.safetensors") for part in parts]
    return handshake_model(stored, files)


def loaded(model: dict[str, Any], **changes: Any) -> ModelRunner:
    config = wire_config({}, load_format="auto", **changes) | {"model": model}
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.load(lambda done, total: None)
    return runner


def tokens(runner: ModelRunner) -> list[int]:
    request = Request(PROMPT, COUNT)
    MiniBrain(runner).serve([request])
    return request.tokens


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3-windows-only", "qwen3-moe-some-dense", "glm4-moe"),
        *("deepseek-v2-lite", "deepseek-v3", "deepseek-v32", "glm-dsa-shared"),
    ],
)
def test_what_transformers_saves_is_loaded(tmp_path: Path, family: str) -> None:
    model = reference_model(family)
    runner = loaded(saved(tmp_path, model))
    runner.warm_up()
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]
    assert load_file(tmp_path / "model.safetensors").keys() == hub_weights(model).keys()


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = reference_model("deepseek-v3")

    def change(weights: Weights) -> None:
        weights["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
        weights["model.layers.4.mlp.experts.0.up_proj.weight"] = torch.zeros(24, 64)

    assert tokens(loaded(saved(tmp_path, model, change))) == greedy_reference(model, PROMPT, COUNT)[0]


def eight_bits(weights: Weights, block: tuple[int, int]) -> None:
    """Stores the matrices of experts, attention and indexers in 8-bit floats, with a scale for each block."""
    stored = ("_proj.weight", ".wq_b.weight", ".wk.weight")
    for name in [name for name in weights if name.endswith(stored) and "weights_proj" not in name]:
        values = weights[name].float()
        rows, columns = (math.ceil(size / of) for size, of in zip(values.shape, block, strict=True))
        scale = torch.rand(rows, columns) * 0.01 + 0.001
        spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        weights[name] = (values / spread[: values.shape[0], : values.shape[1]]).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale


FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}}


@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v32"])
def test_eight_bit_floats_are_multiplied_out(tmp_path: Path, family: str) -> None:
    model = reference_model(family)
    kept: Weights = {}

    def change(weights: Weights) -> None:
        eight_bits(weights, (16, 16))
        kept.update(weights)

    runner = loaded(saved(tmp_path, model, change, **FP8))
    exact = {}
    for name, tensor in kept.items():
        if name.endswith("_scale_inv"):
            continue
        scale = kept.get(f"{name}_scale_inv")
        if scale is not None:
            spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
            tensor = tensor.float() * spread
        exact[name] = tensor
    assert len(exact) < len(kept)
    plain = tmp_path / "plain"
    reference = loaded(saved(plain, model, lambda weights: weights.update(exact)))
    assert tokens(runner) == tokens(reference)
    ours, theirs = (each.decoder.blocks[1].mlp for each in (runner, reference))
    assert isinstance(ours, MixtureOfExperts)
    assert isinstance(theirs, MixtureOfExperts)
    assert ours.stacks is not None
    assert theirs.stacks is not None
    assert torch.equal(ours.stacks[0], theirs.stacks[0])


@pytest.mark.parametrize("shape", [(256, 256), (130, 129), (1, 300), (128, 5)])
def test_blocks_at_the_edge_are_shorter(shape: tuple[int, int]) -> None:
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(*(math.ceil(size / 128) for size in shape))
    found = Raw("", Fp8((128, 128)), {"weight": values, "weight_scale_inv": scale}).codes().values()
    for row in range(0, shape[0], 63):
        for column in range(0, shape[1], 61):
            assert found[row, column] == values[row, column].float() * scale[row // 128, column // 128]


def drop(name: str) -> Callable[[Weights], Any]:
    return lambda weights: weights.pop(name)


def cut(name: str) -> Callable[[Weights], Any]:
    return lambda weights: weights.update({name: weights[name][:-1].clone()})


UP = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(UP), f"lacks 1 of .* weights, the first is {UP}"),
        (cut(UP), rf"{UP} is \[23, 64\] in the checkpoint, the model wants \[24, 64\]"),
        (lambda weights: weights.update({"model.layers.2.mlp.experts.8.up_proj.weight": torch.zeros(24, 64)}), "8.up"),
        (drop("model.layers.1.mlp.gate.e_score_correction_bias"), "e_score_correction_bias"),
    ],
)
def test_a_broken_checkpoint_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Weights], Any], message: str
) -> None:
    model = saved(tmp_path, reference_model("deepseek-v3"), change)
    monkeypatch.setattr("forebay.runner.loader.iter_kept", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ModelError, match=message):
        loaded(model)


INDEX = "model.layers.3.self_attn.indexer"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(f"{INDEX}.k_norm.bias"), rf"lacks 1 of .* weights, the first is {INDEX}\.k_norm\.bias"),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if ".indexer." in name],
            r"lacks 10 of .* weights, the first is model\.layers\.0\.self_attn\.indexer\.k_norm\.bias",
        ),
        (cut(f"{INDEX}.weights_proj.weight"), r"weights_proj.weight is \[15, 64\] in the checkpoint"),
        (
            lambda weights: weights.update({"model.layers.1.self_attn.indexer.wk.weight": torch.zeros(16, 64)}),
            r"model\.layers\.1\.self_attn\.indexer\.wk\.weight, which the model does not have",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Weights], Any], message: str
) -> None:
    model = saved(tmp_path, reference_model("glm-dsa-shared"), change)
    monkeypatch.setattr("forebay.runner.loader.iter_kept", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ModelError, match=message):
        loaded(model)


def test_scales_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        eight_bits(weights, (16, 16))

    def without(weights: Weights) -> None:
        change(weights)
        del weights[f"{UP}_scale_inv"]

    def other(weights: Weights) -> None:
        change(weights)
        weights[f"{UP}_scale_inv"] = torch.ones(2, 3)

    model = reference_model("deepseek-v3")
    with pytest.raises(ModelError, match=f"no {UP}_scale_inv for it"):
        loaded(saved(tmp_path / "without", model, without, **FP8))
    with pytest.raises(ModelError, match=rf"{UP}_scale_inv is \[2, 3\], and {UP} of \[24, 64\] wants \[2, 4\]"):
        loaded(saved(tmp_path / "other", model, other, **FP8))
    with pytest.raises(ModelError, match="has 8-bit floats"):
        loaded(
            saved(tmp_path / "unsaid", model, lambda weights: weights.update({UP: weights[UP].to(torch.float8_e5m2)}))
        )
