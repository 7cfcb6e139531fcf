"""BERT (Devlin et al. 2019), as an embedder and as a cross-encoder: attention is bidirectional."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from forebay.attention.whole import Group, attend
from forebay.layers.linear import Linear
from forebay.layers.norm import LayerNorm
from forebay.layers.params import Parameters, Report, ignore
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.pooling import Pooling

_BODY = "bert."
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Packed:
    """Whole prompts, concatenated and sorted by length; `n` tokens, `r` prompts."""

    tokens: torch.Tensor  # int32 [n]
    positions: torch.Tensor  # int64 [n]
    segments: torch.Tensor  # int64 [n]: 0 in the first text of a pair, 1 in the second
    groups: Sequence[Group]


class Block:
    """A transformer layer: `norm(x + attention(x))`, then `norm(x + mlp(x))`."""

    def __init__(self, config: EncoderConfig, params: Parameters, index: int) -> None:
        prefix, hidden = f"encoder.layer.{index}", config.hidden_size
        self._heads = config.num_attention_heads
        self._activation = _ACTIVATIONS[config.hidden_act]
        parts = {"query": hidden, "key": hidden, "value": hidden}
        self.qkv = Linear(params, f"{prefix}.attention.self", hidden, parts, bias=True)
        self.output = Linear(params, f"{prefix}.attention.output", hidden, {"dense": hidden}, bias=True)
        eps = config.layer_norm_eps
        self.attention_norm = LayerNorm(params, f"{prefix}.attention.output.LayerNorm", hidden, eps)
        self.up = Linear(params, f"{prefix}.intermediate", hidden, {"dense": config.intermediate_size}, bias=True)
        self.down = Linear(params, f"{prefix}.output", config.intermediate_size, {"dense": hidden}, bias=True)
        self.output_norm = LayerNorm(params, f"{prefix}.output.LayerNorm", hidden, eps)

    def __call__(self, x: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Computes the layer for x [n, hidden]."""
        q, k, v = self.qkv(x).view(x.shape[0], 3, self._heads, -1).unbind(1)
        x = self.attention_norm(self.output(attend(q, k, v, groups)).add_(x))
        return self.output_norm(self.down(self._activation(self.up(x))).add_(x))


class Bert:
    """The encoder, and the layers that compute a vector from a prompt's states."""

    def __init__(self, config: EncoderConfig, pooling: Pooling, params: Parameters) -> None:
        hidden = config.hidden_size
        self.config = config
        self.params = params
        self.pooling = pooling

        def table(name: str, rows: int) -> torch.Tensor:
            return params.tensor((rows, hidden), {f"embeddings.{name}_embeddings.weight": rows})

        self.words = table("word", config.vocab_size)
        self.positions = table("position", config.max_position_embeddings)
        self.types = table("token_type", config.type_vocab_size)
        self.norm = LayerNorm(params, "embeddings.LayerNorm", hidden, config.layer_norm_eps)
        self.blocks = [Block(config, params, index) for index in range(config.num_hidden_layers)]
        params.skip("embeddings.position_ids")
        self.head: tuple[Linear, Linear] | None = None
        """The layers that compute a logit from a vector (the pooler and the classifier); None: there are none."""
        self.size = hidden
        """The number of elements of the resulting vector."""
        if pooling.scores:
            self.size = pooling.size
            pooler = Linear(params, "pooler", hidden, {"dense": hidden}, bias=True)
            self.head = pooler, Linear(params, "", hidden, {"classifier": pooling.size}, bias=True)
        else:
            params.skip("pooler.dense.weight")
            params.skip("pooler.dense.bias")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], report: Report = ignore) -> None:
        """Loads checkpoint tensors, by Hugging Face name. Raises `WeightError` if they do not fit."""
        self.params.load(((name.removeprefix(_BODY), tensor) for name, tensor in weights), report)

    def __call__(self, packed: Packed) -> torch.Tensor:
        """Returns a vector per prompt, float32 [r, size]: the pooled state without further processing, or logits."""
        x = F.embedding(packed.tokens, self.words)
        x += F.embedding(packed.positions, self.positions)
        x += F.embedding(packed.segments, self.types)
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, packed.groups)
        vectors = torch.cat([self._pool(x, part) for part in packed.groups])
        if self.head is not None:
            pooler, classifier = self.head
            vectors = classifier(torch.tanh(pooler(vectors.to(x.dtype)))).float()
        return vectors

    def _pool(self, x: torch.Tensor, part: Group) -> torch.Tensor:
        """Pools the prompts of a group to float32 [prompts, hidden]."""
        states: torch.Tensor = x[part.tokens].unflatten(0, (part.count, part.length))
        return states[:, 0].float() if self.pooling.kind == "cls" else states.mean(dim=1, dtype=torch.float32)
