"""Tiny random draft heads, as checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.models import Model

SHARED = 500
"""The size of an EAGLE-3 head's draft vocabulary: every fourth token of the model's vocabulary."""


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.1


def _read(model: Model) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model.path) / "config.json").read_text())
    return config


def eagle3(model: Model, folder: Path, **changes: Any) -> Path:
    """An EAGLE-3 head of a model, in a folder without a tokenizer."""
    torch.manual_seed(4)
    hidden, vocabulary = _read(model)["hidden_size"], _read(model)["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "draft_vocab_size": SHARED,
        "max_position_embeddings": 512,
        "rope_theta": 500.0,
        **changes,
    }
    size = hidden // 4
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (4 * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (2 * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (2 * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, 4 * size),
        "midlayer.mlp.gate_proj": (48, hidden),
        "midlayer.mlp.up_proj": (48, hidden),
        "midlayer.mlp.down_proj": (hidden, 48),
        "lm_head": (SHARED, hidden),
    }
    weights = {f"{name}.weight": _random(*shape) for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + _random(hidden)
    ids = torch.arange(SHARED) * 4
    weights["d2t"] = ids - torch.arange(SHARED)
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, value=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def with_mtp(model: Model, folder: Path) -> Path:
    """A copy of a GLM-4.5 model with an MTP layer, which is a copy of its last layer."""
    torch.manual_seed(4)
    shutil.copytree(model.path, folder)
    config = _read(model) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, own = f"model.layers.{number - 1}.", f"model.layers.{number}."
    weights = load_file(folder / "model.safetensors")
    weights |= {
        own + name.removeprefix(last): tensor.clone() for name, tensor in weights.items() if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{own}{name}.weight"] = torch.ones(hidden)
    # This projection passes on the model's last state, and adds half of the token's embedding.
    weights[f"{own}eh_proj.weight"] = torch.cat((torch.eye(hidden) * 0.5, torch.eye(hidden)), dim=1)
    weights[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
