"""all-MiniLM-L6-v2 in ONNX Runtime's fastest form: exported, with a fused graph, and in 8 bits.

python -m benchmarks.onnx_model

Writes `minilm.onnx` and `minilm-int8.onnx` into benchmarks/.models. The package of the model has safetensors only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from benchmarks import models
from benchmarks.servers import VENVS

FLOAT32 = models.MODELS / "minilm.onnx"
INT8 = models.MODELS / "minilm-int8.onnx"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Sentence(torch.nn.Module):
    """The encoder and the mean of its states, normalized to length 1, as in sentence-transformers."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> Any:
        """Takes int64 [texts, positions] three times; returns float32 [texts, hidden]."""
        states = self.body(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def missing() -> str | None:
    """The reason why ONNX Runtime cannot be measured; None if it can."""
    installed = (VENVS / "onnxruntime/bin/python").is_file()
    return None if installed else "onnxruntime is not installed: make bench-setup PEERS=onnxruntime"


def build() -> None:
    """Creates both files if they are missing."""
    if FLOAT32.is_file() and INT8.is_file():
        return
    # The packages of its environment come last, so that they replace none of ours.
    sys.path += [str(path) for path in VENVS.glob("onnxruntime/lib/python*/site-packages")]
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    models.build_embedder(force=False)
    body = AutoModel.from_pretrained(
        models.directory(models.EMBEDDER), dtype=torch.float32, attn_implementation="eager"
    )
    exported = models.MODELS / "minilm.exported.onnx"
    texts = torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "texts", 1: "positions"} for name in INPUTS}
    torch.onnx.export(
        Sentence(body).eval(),
        (texts, texts, texts * 0),
        str(exported),
        input_names=list(INPUTS),
        output_names=["vectors"],
        dynamic_axes={**axes, "vectors": {0: "texts"}},
        opset_version=17,
        dynamo=False,
    )
    config = body.config
    fused = optimize_model(
        str(exported),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=FusionOptions("bert"),
    )
    print("fused:", {name: count for name, count in fused.get_fused_operator_statistics().items() if count})
    fused.save_model_to_file(str(FLOAT32))
    # Shape inference does not pass fused operators, so float32 is the default type.
    types = {"DefaultTensorType": TensorProto.FLOAT}
    quantize_dynamic(str(FLOAT32), str(INT8), per_channel=True, weight_type=QuantType.QInt8, extra_options=types)
    exported.unlink()
    for path in (FLOAT32, INT8):
        print(f"{Path(path).name}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    build()
