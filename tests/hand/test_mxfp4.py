"""gpt-oss with experts of MXFP4, in safetensors and in GGUF files, against transformers' own dequantisation."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from benchmarks.described import described, handshake_model
from tests.hand.gguf_models import Form
from tests.hand.named_files import write_gguf
from tests.hand.named_models import model_of, save
from tests.hand.support import MiniBrain, Request, Sampling, greedy_reference
from tests.hand.test_named_families import COUNT, prompts
from tests.hand.test_rust_hand import brain_of, rust, settings, torch_runner

Q = gguf.GGMLQuantizationType
FAMILY = "gpt-oss-blocks"
STACKS = ("gate_up_proj", "down_proj")
STORED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def coded(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes uint8 [experts, outputs, blocks, 16] and exponents of a stack [experts, inputs, outputs]."""
    rows = stack.transpose(1, 2).contiguous().numpy()
    blocks = torch.from_numpy(quantize(rows, Q.MXFP4)).unflatten(2, (-1, 17))
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    numbers = torch.cat((low, high), dim=-1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, blocks[..., 0].contiguous()


@cache
def model() -> Any:
    """A model whose experts have the values that transformers computes from their codes."""
    found = deepcopy(model_of(FAMILY))
    with torch.no_grad():
        for layer in found.model.layers:
            for name in STACKS:
                stack = getattr(layer.mlp.experts, name)
                stack.copy_(_convert_moe_packed_tensors(*coded(stack), dtype=torch.float32))
    return found


def stored(folder: Path) -> Path:
    """A checkpoint folder with codes and exponents in place of stacked experts, as OpenAI publishes."""
    model().save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = coded(tensors.pop(name))
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": STORED}))
    return folder


def of_safetensors(folder: Path, **changes: Any) -> dict[str, Any]:
    config = json.loads((stored(folder) / "config.json").read_text())
    return settings(handshake_model(config, [str(folder / "model.safetensors")]), **changes)


def requests() -> list[Request]:
    return [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]


@cache
def expected() -> list[tuple[list[int], torch.Tensor]]:
    return [greedy_reference(model(), prompt, COUNT) for prompt in prompts()]


def test_codes_are_multiplied_out_as_transformers_does(tmp_path: Path) -> None:
    found = requests()
    MiniBrain(torch_runner(of_safetensors(tmp_path)), 7).serve(found, 7)
    for request, (tokens, logprobs) in zip(found, expected(), strict=True):
        assert request.tokens == tokens
        for (ids, values), distribution in zip(request.logprobs, logprobs, strict=False):
            top = distribution.topk(5)
            assert ids[1:].tolist() == top.indices.tolist()
            np.testing.assert_allclose(values[1:], top.values, atol=1e-4)


def test_both_files_keep_the_codes(tmp_path: Path) -> None:
    values = of_safetensors(tmp_path / "model")
    count = 3 * 6 * 3

    def of_rust(values: dict[str, Any]) -> list[Request]:
        found = requests()
        with rust(tmp_path, values) as runner:
            brain_of(runner).serve(found, 7)
        assert f"computing with blocks of the file: {count} MXFP4;" in (tmp_path / "stderr").read_text()
        return found

    found = of_rust(values)
    # 8-bit activations change few tokens.
    same = [request.tokens[0] == tokens[0] for request, (tokens, _) in zip(found, expected(), strict=True)]
    assert sum(same) >= len(same) - 1

    save(tmp_path / "plain", FAMILY)
    model().save_pretrained(tmp_path / "plain")
    experts = [f"blk.{layer}.ffn_{kind}_exps.weight" for layer in range(3) for kind in ("gate", "up", "down")]
    form = Form(others=dict.fromkeys(experts, Q.MXFP4))
    path = write_gguf(tmp_path / "m.gguf", FAMILY, tmp_path / "plain", form)
    of_file = of_rust(settings(described(path, tmp_path), quantization=None))
    for one, two in zip(found, of_file, strict=True):
        assert one.tokens == two.tokens
        for (ids, logprobs), (same_ids, same_logprobs) in zip(one.logprobs, two.logprobs, strict=True):
            assert list(ids) == list(same_ids)
            np.testing.assert_array_equal(logprobs, same_logprobs)


def test_codes_without_exponents_are_named(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gone = "model.layers.1.mlp.experts.down_proj_scales"
    del tensors[gone]
    save_file(tensors, path)
    with pytest.raises(Exception, match=f"the checkpoint lacks {gone}"):
        handshake_model(json.loads((folder / "config.json").read_text()), [str(path)])
