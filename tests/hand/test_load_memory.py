"""Loading a mixture of experts takes the memory of its weights, and little more. `FOREBAY_LOAD_MIB` sets their size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from benchmarks.described import handshake_model, model_config
from forebay.attention.cpu import CpuAttention
from forebay.layers.ops import HostOps
from forebay.layers.params import Parameters
from forebay.models import registry
from tests.hand.support import hf_config, wire_config
from tests.weights.support import ROOT

MIB = 1 << 20
SIZE = int(os.environ.get("FOREBAY_LOAD_MIB", "300"))
HIDDEN, INNER, EXPERTS = 512, 256, 64
LAYER_MIB = 3 * EXPERTS * INNER * HIDDEN * 2 // MIB
FILES = 2


def config(layers: int) -> dict[str, Any]:
    """A model whose weights are mostly experts, as in those that people serve."""
    shape: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": HIDDEN,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
    }
    return hf_config(Qwen3MoeConfig(**shape), "Qwen3MoeForCausalLM")


def shapes(stored: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's weights."""
    params = Parameters(torch.bfloat16, torch.device("meta"))
    registry.build(model_config(stored), params, CpuAttention(), HostOps(), 96)
    return {name: tuple(target.shape) for name, target in params._targets.items()}


def safetensors(directory: Path, stored: dict[str, Any]) -> list[str]:
    """Writes a checkpoint in several files."""
    directory.mkdir()
    wanted, files = shapes(stored), []
    for number in range(FILES):
        names = sorted(wanted)[number::FILES]
        tensors = {name: torch.full(wanted[name], 0.01, dtype=torch.bfloat16) for name in names}
        files.append(str(directory / f"{number}.safetensors"))
        save_file(tensors, files[-1])
    return files


def blocks(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Q8_0 blocks of constant values."""
    made = np.ones((rows, columns // 32, 34), np.uint8)
    made[..., :2] = np.array([0.01], np.float16).view(np.uint8)
    return made.reshape(rows, -1)


def merged(stored: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a GGUF converter's tensors. The experts of a layer are stacked in one tensor."""
    for name, shape in shapes(stored).items():
        before, is_expert, after = name.partition(".mlp.experts.")
        if not is_expert:
            yield name, shape
        elif after.startswith("0."):
            yield f"{before}.mlp.experts.{after[2:]}", (EXPERTS, *shape)


def gguf_file(directory: Path, stored: dict[str, Any]) -> list[str]:
    """Writes the same checkpoint in one file, quantised."""
    directory.mkdir()
    path = directory / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, stored["num_hidden_layers"])
    for name, shape in merged(stored):
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None
        if len(shape) == 1:
            writer.add_tensor(found, np.ones(shape, np.float32))
            continue
        data = blocks(int(np.prod(shape[:-1])), shape[-1]).reshape(*shape[:-1], -1)
        writer.add_tensor(found, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [str(path)]


def model(directory: Path, kind: str, layers: int) -> str:
    """Writes such a checkpoint, and returns the config with which a hand loads it, as JSON."""
    stored = config(layers)
    files = safetensors(directory, stored) if kind == "safetensors" else gguf_file(directory, stored)
    described = handshake_model(stored, files, kind)
    return json.dumps(wire_config({}, load_format="auto", dtype="bfloat16") | {"model": described})


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_loading_experts_takes_their_weights_and_a_tenth(tmp_path: Path, kind: str) -> None:
    configs = model(tmp_path / "small", kind, 1), model(tmp_path / "large", kind, -(-SIZE // LAYER_MIB))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "python", ROOT)))}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.hand.loading"],
        input="\n".join(configs),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    weights = found["weights"]
    # In GGUF, experts stay in their blocks of 8 bits and a scale, instead of 16 bits.
    assert weights >= SIZE * MIB * (1 if kind == "safetensors" else 17 / 32)
    assert found["peak"] - found["before"] <= 1.1 * weights + found["pages"]
    assert found["peak"] - found["before"] >= 0.9 * weights, "this load causes the peak"
