"""Makes a LoRA adapter of random matrices, in PEFT's format.

It shows that a server applies adapters: its answers differ from those of the base model. It teaches the model nothing.

    .venv/bin/python scripts/make_adapter.py smollm2 ./tone
    forebay serve smollm2 --enable-lora --lora-modules tone=./tone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SMOLLM2: Mapping[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""The sizes of SmolLM2-135M."""


def modules(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yields the modules of a dense decoder: name, inputs and outputs."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            yield f"model.layers.{layer}.{name}", inputs, outputs


def make(config: Mapping[str, Any], folder: Path, rank: int = 8, seed: int = 1, strength: float = 0.02) -> None:
    """Writes an adapter for all modules to a folder. `strength` is about the size of the change of each weight."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, inputs, outputs in modules(config):
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / rank**0.5
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * strength
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 1)[1] for name, _, _ in modules(config)})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2))


def main() -> None:
    """Makes the adapter that the command line specifies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="`smollm2`, or a folder with a config.json")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strength", type=float, default=0.02, help="about the size of a change of a weight")
    given = parser.parse_args()
    config = SMOLLM2
    if given.model != "smollm2":
        config = json.loads((Path(given.model) / "config.json").read_text())
    make(config, given.folder, given.rank, given.seed, given.strength)


if __name__ == "__main__":
    main()
