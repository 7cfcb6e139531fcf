"""Quantised checkpoints on the CUDA device without a GPU: loading, and the calls of PyTorch's products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.device.watch import NoStrayCopies, NoWaits
from forebay.gpu.choose import VARIABLE
from forebay.gpu.products import multiplies_floats
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.fake_cuda import fake_tensors, install
from tests.hand.stored_models import Format, awq, fp8_blocks, fp8_channels, fp8_tensors, gptq, pack_quantized, quantised
from tests.hand.support import (
    FAMILIES,
    Sampling,
    greedy_reference,
    hf_config,
    products_of_floats,
    reference_model,
    wire_config,
)
from tests.hand.test_checkpoints import COUNT, PROMPT, loaded, saved, tokens
from tests.hand.test_cuda import CPU, GPU, plans


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


@pytest.mark.parametrize(
    "format_", [fp8_blocks(16), fp8_tensors(), awq(32), gptq(32, desc_act=True), pack_quantized(32, symmetric=False)]
)
def test_codes_go_through_its_buffers(format_: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_model("qwen2")
    checkpoint = quantised(tmp_path, model, format_)
    install(monkeypatch, CPU)
    settings = {"max_total_tokens": None, "mem_fraction_static": 0.9, "attention_backend": "triton"}
    runner = loaded(checkpoint, device="cuda", **settings)
    assert runner.decoder.params.kept
    runner.warm_up()
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]


def test_weights_are_quantised_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CPU)
    model = reference_model("qwen2")
    runner = loaded(saved(tmp_path, model), device="cuda", attention_backend="triton", quantization="fp8")
    kept = runner.decoder.params.kept
    name = "model.layers.1.mlp.up_proj.weight"
    values = model.get_parameter(name).float()
    # Gates come before ups in the fused matrix.
    matrix, first = kept[name].matrix, kept[name].first
    codes = matrix.codes[first : first + len(values)].view(torch.float8_e4m3fn).float()
    found = codes * matrix.scale[first : first + len(values)]
    assert first == len(values)
    assert ((found - values).abs() <= values.abs() / 15 + 1e-4).all()
    assert not any(weight.startswith(("lm_head", "model.embed")) for weight in kept)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2", fp8_channels().config),
        ("qwen2", gptq(32, desc_act=True).config),
        ("qwen3-moe", fp8_blocks(16).config),
        ("deepseek-v3", fp8_blocks(16).config),
        ("qwen3", None),
    ],
)
def test_a_launch_mixes_no_devices_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, family: str, config: dict[str, Any] | None, capability: tuple[int, int]
) -> None:
    """PyTorch checks the arguments of its product of 8-bit floats. The tensors have no content."""
    install(monkeypatch, GPU).capability = capability
    called = products_of_floats(monkeypatch)
    kind, shape = FAMILIES[family]
    changes = {"quantization": "fp8"} if config is None else {}
    hub = hf_config(shape, kind.__name__) | {"quantization_config": config}
    wired = wire_config(hub, device="cuda", dtype="bfloat16", **changes)
    with fake_tensors(monkeypatch):
        runner = ModelRunner(RunnerConfig.from_dict(wired))
        runner.load(lambda done, total: None)
        for builder in plans(Sampling()):
            plan = builder.build()
            with NoWaits(), NoStrayCopies():
                launched = runner.launch(plan)
            launched.collect()
    with_floats = capability == (9, 0) and (config is None or config == fp8_channels().config)
    assert bool(called) == with_floats
    assert {len(args[0]) for args in called} == ({20, 15, 2, 1} if with_floats else set())


def test_which_gpus_multiply_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, does in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert multiplies_floats(GPU) is does
