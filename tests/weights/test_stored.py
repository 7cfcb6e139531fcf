"""What a `quantization_config` says, and what of it is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.weights.codes import Layout, folded, quantised
from forebay.weights.config import ModelConfig, UnsupportedModelError
from forebay.weights.quantization import why_not_stored
from forebay.weights.stored import COMPRESSED, Fp8, Int4, Scheme, Stored
from tests.weights.support import tiny_config


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more}


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(format_: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    numbered = {f"group_{number}": group for number, group in enumerate(groups)}
    return {"quant_method": COMPRESSED, "format": format_, "config_groups": numbered, "ignore": ["lm_head"], **more}


def stored(config: dict[str, Any] | None) -> Stored | None:
    return ModelConfig.from_dict(tiny_config() | {"quantization_config": config}).stored


KNOWN: list[tuple[dict[str, Any], Scheme]] = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, Fp8((128, 128))),
    ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8()),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fp8()),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, Int4("awq", 128)),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, Int4("awq", 64)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Int4("gptq", 128, less_one=True)),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}, Int4("gptq", None, True, True)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}, Int4("gptq", 32)),
    (compressed("float-quantized", group(FLOAT, DYNAMIC)), Fp8()),
    (compressed("float-quantized", group({**FLOAT, "strategy": "tensor"}, STATIC)), Fp8()),
    (
        compressed("float-quantized", group({**FLOAT, "strategy": "block", "block_structure": [128, 128]}, DYNAMIC)),
        Fp8((128, 128)),
    ),
    (compressed("pack-quantized", group(FOUR), group(FOUR)), Int4(COMPRESSED, 128)),
    (compressed("pack-quantized", group({**FOUR, "actorder": "group"})), Int4(COMPRESSED, 128, ordered=True)),
    (compressed("pack-quantized", group({**FOUR, "actorder": "weight"})), Int4(COMPRESSED, 128)),
    (compressed("pack-quantized", group({**FOUR, "strategy": "channel", "group_size": None})), Int4(COMPRESSED, None)),
]


@pytest.mark.parametrize(("config", "scheme"), KNOWN)
def test_schemes(config: dict[str, Any], scheme: Scheme) -> None:
    found = stored(config)
    assert found is not None
    assert (found.method, found.scheme) == (config["quant_method"], scheme)
    assert stored(None) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "mxfp4"}, "quantised by 'mxfp4'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ({"quant_method": "awq", "bits": 8}, "awq with bits 8"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version 'gemv'"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
    ({"quant_method": "awq", "bits": 4, "group_size": 100}, "group_size of 100"),
    ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*gate": {}, "+:.*up": {"bits": 8}}}, "dynamic has '\\+:"),
    (compressed("pack-quantized", group(FOUR), group({**FOUR, "group_size": 64})), "one way for all matrices"),
    (compressed("mixed-precision", group(FOUR, format="pack-quantized"), group(FLOAT, format="x")), "has 2 groups"),
    (compressed("pack-quantized"), "has 0 groups"),
    (compressed("pack-quantized", group({**FOUR, "num_bits": 8})), "8-bit weights"),
    (compressed("pack-quantized", group(FOUR, {"num_bits": 8, "type": "int"})), "quantised activations"),
    (compressed("int-quantized", group({**FLOAT, "type": "int"})), "'int-quantized'"),
    (compressed("float-quantized", group(FLOAT, {"num_bits": 8, "type": "int"})), "activations of another kind"),
    (compressed("float-quantized", group({**FLOAT, "strategy": "group"})), "float, group"),
    (compressed("pack-quantized", group(FOUR), sparsity_config={"format": "sparse-24"}), "sparsity_config"),
    (compressed("pack-quantized", group(FOUR), transform_config={"config_groups": {"a": 1}}), "transform_config"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        stored(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "left_out", "quantised_"),
    [
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "visual"]},
            ["lm_head", "model.layers.0.mlp.gate", "model.visual.blocks.0.attn.qkv"],
            ["model.layers.0.mlp.gate_proj", "model.layers.10.mlp.gate"],
        ),
        (
            compressed("float-quantized", group(FLOAT)) | {"ignore": ["lm_head", "re:.*self_attn.*"]},
            ["lm_head", "model.layers.3.self_attn.q_proj"],
            ["model.layers.3.mlp.up_proj"],
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:model\\.layers\\.1\\..*": {}}},
            ["model.layers.1.mlp.up_proj"],
            ["model.layers.11.mlp.up_proj"],
        ),
    ],
)
def test_modules_that_are_left_out(config: dict[str, Any], left_out: list[str], quantised_: list[str]) -> None:
    found = stored(config)
    assert found is not None
    assert all(map(found.leaves_out, left_out))
    assert not any(map(found.leaves_out, quantised_))


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
        ("w8a8_int8", awq, True),
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
    # Half a step of a number with 3 bits behind the leading one, or of the smallest number.
    allowed = (values.abs() / 16).maximum(codes.scale * 2**-10)
    assert ((codes.values() - values).abs() <= allowed).all()
    assert codes.codes[0].float().abs().max() == 448
