"""Quantised checkpoints in the hand in Rust: the same bits and tokens as PyTorch's hand, and refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import deserialize
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.described import handshake_model
from forebay.state.config import RunnerConfig
from forebay.weights.errors import ModelError
from forebay.weights.load import iter_weights
from tests.hand.loading import memory_of
from tests.hand.named_models import NAMED
from tests.hand.stored_models import Format, Weights, awq, fp8_blocks, gptq, pack_quantized, quantised
from tests.hand.support import Request, Sampling, greedy_reference, hf_config, random_model, reference_model
from tests.hand.test_checkpoints import COUNT, PROMPT
from tests.hand.test_rust_hand import brain_of, check, rust, served, settings, torch_runner
from tests.hand.test_stored import FORMATS, OTHER_NAMES, Q, drop, experts, of

MIB = 1 << 20
SIZE = int(os.environ.get("FOREBAY_LOAD_MIB", "300"))
ATOL = 1e-4
LIMIT = 1 << 30
"""The limit of the cache of packed weights, in bytes."""


def kept(folder: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files of packed weights that a hand keeps in `folder`, by name, each with its tensors by name."""
    cache = folder / "cache"
    values = {**values, "model": {**values["model"], "cache": str(cache)}, "weight_cache_bytes": LIMIT}

    def found() -> dict[str, dict[str, Any]]:
        packed = cache / "packed"
        files = [path for path in packed.iterdir() if not path.name.startswith(".")] if packed.exists() else []
        return {path.name: dict(deserialize(path.read_bytes())) for path in files}  # type: ignore[no-untyped-call]

    with rust(folder, values):
        for _ in range(200):
            if found():
                break
            signal.sigtimedwait([], 0.05)
    return found()


def plain_of(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Settings of a plain checkpoint in `folder`, with the weights that PyTorch's hand reads from a quantised one."""
    read = iter_weights(values["model"], RunnerConfig.from_dict({**values, "quantization": None}).model_config)
    config = {key: value for key, value in values["model"]["config"].items() if key != "quantization_config"}
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file({name: tensor.float().contiguous() for name, tensor in read}, path)
    return {**values, "model": handshake_model(config, [str(path)])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_pytorchs_hand_to_the_bit(tmp_path: Path, name: str, dtype: str) -> None:
    """Compares the packed weights on disk, which are all that the hand computes with."""
    values = settings(quantised(tmp_path / "model", reference_model("qwen2"), FORMATS[name]), dtype=dtype)
    plain = plain_of(tmp_path / "plain", values)
    (tmp_path / "ours").mkdir()
    (ours,) = kept(tmp_path / "ours", values).values()
    (theirs,) = kept(tmp_path / "plain", plain).values()
    assert ours == theirs


def test_kept_weights_of_other_forms_have_other_names(tmp_path: Path) -> None:
    """The same files represent other weights under another config. A plain checkpoint has a third name."""
    model = reference_model("llama")
    one = quantised(tmp_path / "model", model, gptq(32))
    config = dict(one["config"])
    stored = config["quantization_config"]
    other = handshake_model(config | {"quantization_config": stored | {"checkpoint_format": "gptq_v2"}}, one["files"])
    del config["quantization_config"]
    plain = handshake_model(config, [str(tmp_path / "model" / "whole" / "model.safetensors")])
    found: dict[str, Any] = {}
    for number, described in enumerate((one, other, plain)):
        folder = tmp_path / str(number)
        folder.mkdir()
        of_one = kept(folder, settings(described))
        assert len(of_one) == 1
        assert not of_one.keys() & found.keys()
        found |= of_one


def greedy(runner: Any) -> list[int]:
    request = Request(PROMPT, COUNT, Sampling(logprobs=5))
    brain_of(runner).serve([request])
    return request.tokens


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_pytorchs_hand(name: str, tmp_path: Path) -> None:
    model = reference_model("qwen2")
    values = settings(quantised(tmp_path / "model", model, FORMATS[name]))
    with rust(tmp_path, values) as runner:
        assert greedy(runner) == greedy_reference(model, PROMPT, COUNT)[0]
        found = served(runner, 17)
    check(found, served(torch_runner(values), 17), ATOL)


@pytest.mark.parametrize("form", OTHER_NAMES)
@pytest.mark.parametrize("family", ["phi3", "ernie4_5", "minimax-m2"])
def test_matrices_under_other_names_are_read(tmp_path: Path, family: str, form: str) -> None:
    model = random_model(*NAMED[family])
    with rust(tmp_path, settings(quantised(tmp_path / "model", model, FORMATS[form]))) as runner:
        assert greedy(runner) == greedy_reference(model, PROMPT, COUNT)[0]


@pytest.mark.parametrize(
    ("name", "inner"), [("blocks", 32), ("blocks", 24), ("awq", 32), ("packed", 32), ("gptq desc_act", 32)]
)
def test_experts(name: str, inner: int, tmp_path: Path) -> None:
    model = experts(inner)
    values = settings(quantised(tmp_path / "model", model, FORMATS[name]))
    with rust(tmp_path, values) as runner:
        assert greedy(runner) == greedy_reference(model, PROMPT, COUNT)[0]
        found = served(runner, 17)
    check(found, served(torch_runner(values), 17), ATOL)


def test_layers_that_are_left_out(tmp_path: Path) -> None:
    model = reference_model("llama")
    checkpoint = quantised(
        tmp_path / "model", model, awq(32), lambda name: "layers.0.mlp" in name or "0.self_attn.k_" in name
    )
    with rust(tmp_path, settings(checkpoint)) as runner:
        assert greedy(runner) == greedy_reference(model, PROMPT, COUNT)[0]


@pytest.mark.parametrize("name", ["awq", "channels"])
def test_integers_are_made_of_the_same_numbers(name: str, tmp_path: Path) -> None:
    values = settings(quantised(tmp_path / "model", reference_model("qwen2"), FORMATS[name]), quantization="w8a8_int8")
    plain = plain_of(tmp_path / "plain", values)
    (tmp_path / "ours").mkdir()
    (ours,) = kept(tmp_path / "ours", values).values()
    (theirs,) = kept(tmp_path / "plain", plain).values()
    assert ours == theirs
    assert {tensor["dtype"] for tensor in ours.values()} == {"F32", "U8"}


def test_a_flag_that_names_the_checkpoint_changes_nothing(tmp_path: Path) -> None:
    model = reference_model("llama")
    checkpoint = quantised(tmp_path / "model", model, gptq(32))
    with rust(tmp_path, settings(checkpoint, quantization="gptq")) as runner:
        assert greedy(runner) == greedy_reference(model, PROMPT, COUNT)[0]
    message = "quantization awq is not what the model has: the checkpoint is quantised by gptq"
    with pytest.raises(AssertionError, match=message), rust(tmp_path, settings(checkpoint, quantization="awq")):
        pass


def test_dummy_weights(tmp_path: Path) -> None:
    """The checkpoint has no files, and its config states which matrices are quantised."""
    config = hf_config(reference_model("llama").config, "LlamaForCausalLM")
    model = handshake_model(config | {"quantization_config": FORMATS["packed"].config}, [])
    with rust(tmp_path, settings(model, load_format="dummy")) as runner:
        assert len(greedy(runner)) == COUNT


@pytest.mark.parametrize(
    ("format_", "change", "message"),
    [
        (gptq(32), of("g_idx", torch.zeros(64).int()), "groups that are not of 32 inputs each"),
        (gptq(32), of("g_idx", torch.arange(64).flip(0).int() // 32), "the config does not say so"),
        (gptq(32, desc_act=True), of("g_idx", torch.arange(64).int() // 32 - 1), "groups that are not of 32 inputs"),
        (gptq(32, desc_act=True), of("g_idx", torch.arange(64).int() // 32 + 1), "groups that are not of 32 inputs"),
        (pack_quantized(32), of("weight_shape", torch.tensor([64, 60])), r"is \[64, 60\] by its weight_shape"),
        (fp8_blocks(16), of("weight", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)), "not finite"),
    ],
)
def test_damaged_numbers_are_refused_in_one_line(
    format_: Format, change: Callable[[Weights], Any], message: str, tmp_path: Path
) -> None:
    """These files have damaged values. The brain refuses damaged headers: tests/hand/test_stored.py."""
    checkpoint = quantised(tmp_path / "model", reference_model("llama"), format_, change=change)
    with pytest.raises(AssertionError, match=message), rust(tmp_path, settings(checkpoint)):
        pass
    said = (tmp_path / "stderr").read_text().strip()
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("format_", "change", "message"),
    [
        (awq(32), drop("qzeros"), rf"{Q}.qweight is quantised, and the checkpoint has no {Q}.qzeros"),
        (awq(32), of("qzeros", torch.ones(2, 8)), rf"{Q}.qzeros is of the type F32, and I32 is read"),
        (gptq(32), of("scales", torch.ones(2, 64).int()), rf"{Q}.scales is of the type I32, and F32, F16"),
        (fp8_blocks(16), of("weight_scale_inv", torch.ones(4, 4).byte()), rf"{Q}.weight_scale_inv is of the type U8"),
        (gptq(32), of("qweight", torch.ones(8, 60).int()), rf"{Q}.qweight has 60 outputs"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_hand_starts(
    format_: Format, change: Callable[[Weights], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        quantised(tmp_path, reference_model("llama"), format_, change=change)


def test_biases_that_only_tools_have_written(tmp_path: Path) -> None:
    model = reference_model("llama")
    names = [f"{Q}.bias", "model.layers.0.mlp.up_proj.bias"]

    def zero(weights: Weights) -> None:
        weights.update({name: torch.zeros(64) for name in names})

    checkpoint = quantised(tmp_path / "zero", model, gptq(32), change=zero)
    with rust(tmp_path, settings(checkpoint)) as runner:
        assert greedy(runner) == greedy_reference(model, PROMPT, COUNT)[0]

    def others(weights: Weights) -> None:
        zero(weights)
        weights[names[0]] = torch.ones(64)

    checkpoint = quantised(tmp_path / "others", model, gptq(32), change=others)
    message = f"the checkpoint has {names[0]}, which the model does not have"
    with pytest.raises(AssertionError, match=message), rust(tmp_path, settings(checkpoint)):
        pass


# Memory of loading.

HIDDEN, INNER = 512, 1536
LAYER_MIB = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) * 2 / MIB


def words(directory: Path, layers: int, form: str) -> dict[str, Any]:
    """A checkpoint of random codes."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
    }
    shape = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=131, tie_word_embeddings=True)
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {"model.norm.weight": norm, "model.embed_tokens.weight": torch.randn(131, HIDDEN).bfloat16()}
    matrices = dict.fromkeys([f"self_attn.{name}_proj" for name in "qkvo"], (HIDDEN, HIDDEN))
    matrices |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    generator = torch.Generator().manual_seed(5)

    def random(*size: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, size, generator=generator).int()

    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{name}.weight": norm.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        for name, (rows, inputs) in matrices.items():
            groups = inputs // 128
            if form == "awq":
                tensors[f"{at}{name}.qweight"] = random(inputs, rows // 8)
                tensors[f"{at}{name}.qzeros"] = random(groups, rows // 8)
                tensors[f"{at}{name}.scales"] = torch.full((groups, rows), 0.004).half()
            else:
                tensors[f"{at}{name}.weight"] = torch.full((rows, inputs), 0.5).to(torch.float8_e4m3fn)
                tensors[f"{at}{name}.weight_scale_inv"] = torch.full((-(-rows // 128), groups), 0.02)
    stored = awq(128).config if form == "awq" else fp8_blocks(128).config
    directory.mkdir()
    path = directory / "model.safetensors"
    save_file(tensors, path)
    return handshake_model(hf_config(shape, "LlamaForCausalLM") | {"quantization_config": stored}, [str(path)])


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_loading_takes_the_weights_and_a_tenth(tmp_path: Path, form: str) -> None:
    def loaded(layers: int) -> tuple[int, int]:
        model = words(tmp_path / f"model-{layers}", layers, form)
        with rust(tmp_path, settings(model, dtype="bfloat16", max_total_tokens=128, threads=2)) as runner:
            return memory_of(runner.pid, "VmHWM") - runner.facts["kv_bytes"], runner.facts["weight_bytes"]

    (small, few), (peak, weights) = loaded(1), loaded(round(SIZE / LAYER_MIB))
    assert weights >= 0.9 * SIZE * MIB
    assert 0.9 * (weights - few) <= peak - small <= 1.1 * (weights - few)
