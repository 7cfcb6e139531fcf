"""The meaning of a `quantization_config`, and the parts of it that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.described import model_config
from forebay.weights.codes import Layout, folded, quantised
from forebay.weights.quantization import why_not_stored
from forebay.weights.stored import COMPRESSED, Fp8, Int4, Scheme, Stored
from tests.weights.support import tiny_config


@pytest.mark.parametrize(
    ("patterns", "left_out", "quantised_"),
    [
        (
            ["lm_head", "model.layers.0.mlp.gate", "visual"],
            ["lm_head", "model.layers.0.mlp.gate", "model.visual.blocks.0.attn.qkv"],
            ["model.layers.0.mlp.gate_proj", "model.layers.10.mlp.gate"],
        ),
        (
            ["lm_head", "re:.*self_attn.*"],
            ["lm_head", "model.layers.3.self_attn.q_proj"],
            ["model.layers.3.mlp.up_proj"],
        ),
        (["-:model\\.layers\\.1\\..*"], ["model.layers.1.mlp.up_proj"], ["model.layers.11.mlp.up_proj"]),
    ],
)
def test_modules_that_are_left_out(patterns: list[str], left_out: list[str], quantised_: list[str]) -> None:
    found = Stored("fp8", Fp8(), tuple(patterns))
    assert all(map(found.leaves_out, left_out))
    assert not any(map(found.leaves_out, quantised_))


def test_a_shape_says_how_matrices_are_stored() -> None:
    def read(config: dict[str, Any]) -> Stored | None:
        return model_config(tiny_config() | {"quantization_config": config}).stored

    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"]}
    assert read(fp8) == Stored("fp8", Fp8((128, 64)), ("lm_head",))
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}
    assert read(gptq) == Stored("gptq", Int4("gptq", None, ordered=True, less_one=True))
    assert model_config(tiny_config()).stored is None


def test_a_flag_says_what_the_checkpoint_is() -> None:
    fp8, awq = Stored("fp8", Fp8()), Stored("awq", Int4("awq", 128))
    for flag, given_, fits in [
        ("fp8", None, True),
        ("fp8", fp8, True),
        ("fp8", Stored(COMPRESSED, Fp8()), True),
        ("fp8", awq, False),
        ("awq", awq, True),
        ("gptq", awq, False),
        ("gptq", None, False),
    ]:
        assert (why_not_stored(flag, given_) is None) == fits


@pytest.mark.parametrize(
    ("scheme", "inputs", "parts", "layout"),
    [
        (Fp8(), 100, [8], Layout(100, 100)),
        (Fp8((128, 128)), 300, [256, 100], Layout(300, 128, 128)),
        (Fp8((128, 128)), 300, [100, 256], Layout(300, 128, 1)),
        (Fp8((4, 6)), 300, [100], None),
        (Fp8((8, 8)), 64, [8], None),
        (Int4("awq", 128), 256, [8, 8], Layout(256, 128, 1, 128)),
        (Int4("gptq", 32, ordered=True), 64, [8], Layout(64, 32, 1, 32, True)),
        (Int4("gptq", None), 192, [8], Layout(192, 192, 1, 64)),
        (Int4("gptq", None), 80, [8], None),
        (Int4("gptq", 128), 192, [8], None),
    ],
)
def test_layouts(scheme: Scheme, inputs: int, parts: list[int], layout: Layout | None) -> None:
    assert Layout.of(scheme, inputs, parts) == layout


@given(rows=st.integers(0, 3), folds=st.integers(1, 3), fold=st.sampled_from([32, 64, 128]), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_folding_loses_nothing(rows: int, folds: int, fold: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, folds * fold), dtype=torch.uint8, generator=generator)
    halves = folded(codes, fold).unflatten(1, (folds, fold // 2))
    assert torch.cat((halves & 15, halves >> 4), dim=2).flatten(1).equal(codes)


def test_what_is_quantised_here_is_near() -> None:
    values = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    values[3] = 0
    values[4] *= 1e-6
    codes = quantised(values)
    # Half the last place of a value with 3 mantissa bits, or half the smallest value.
    allowed = (values.abs() / 16).maximum(codes.scale * 2**-10)
    assert ((codes.values() - values).abs() <= allowed).all()
    assert codes.codes[0].float().abs().max() == 448
