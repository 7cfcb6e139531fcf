"""Tiny draft heads, and their forward pass built from modules of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DeepseekV3ForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.described import handshake_model
from forebay.layers.draft_heads import DraftHead
from forebay.runner.head_drafts import HeadDrafts
from forebay.runner.runner import ModelRunner
from tests.hand.drafted import TOKENS
from tests.hand.support import hf_config, random_model, runner_of, whole_weights

SIZE = 40
"""The vocabulary size of a head that has a separate vocabulary."""


@dataclass
class Head:
    """A head's weights by their names in a checkpoint, and its description for the hand."""

    told: dict[str, Any]
    weights: dict[str, torch.Tensor]
    layer: Any = None
    """The decoder layer of an MTP head, as a module of transformers."""
    rotary: Any = None


def _random(shape: Sequence[int], scale: float = 0.12) -> torch.Tensor:
    return torch.randn(*shape) * scale


def eagle(target: Any, seed: int = 3, taps: Sequence[int] = (0, 1, 2), **parts: Any) -> Head:
    """A random EAGLE-3 head of a model, whose attention and rotary embedding differ from the model's."""
    torch.manual_seed(seed)
    config = target.config
    hidden, vocabulary = config.hidden_size, config.vocab_size
    own = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        attention_bias=bool(parts.pop("bias", False)),
    )
    head = {
        "kind": "eagle3",
        "taps": list(taps),
        "norm_before_residual": False,
        "vocab_size": SIZE,
        "mapped": True,
        "own_embedding": False,
        "own_output": True,
        **parts,
    }
    matrices = {
        "fc": (hidden, len(taps) * hidden),
        "midlayer.self_attn.q_proj": (96, 2 * hidden),
        "midlayer.self_attn.k_proj": (24, 2 * hidden),
        "midlayer.self_attn.v_proj": (24, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, 96),
        "midlayer.mlp.gate_proj": (80, hidden),
        "midlayer.mlp.up_proj": (80, hidden),
        "midlayer.mlp.down_proj": (hidden, 80),
        "lm_head": (head["vocab_size"], hidden),
    }
    weights = {f"{name}.weight": _random(shape) for name, shape in matrices.items()}
    if own.attention_bias:
        weights |= {
            f"midlayer.self_attn.{name}.bias": _random((len(weights[f"midlayer.self_attn.{name}.weight"]),))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + _random((hidden,), 0.3)
    if head["mapped"]:
        ids = torch.randperm(vocabulary)[: head["vocab_size"]].sort().values
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, value=True)
    if head["own_embedding"]:
        weights["embed_tokens.weight"] = _random((vocabulary, hidden), 0.2)
    if not head["own_output"]:
        del weights["lm_head.weight"]
    shape = deepcopy(handshake_model(hf_config(own, "LlamaForCausalLM"))["shape"])
    return Head({"head": head, "shape": shape, "files": [], "manifest": None}, weights)


def mtp(target: Any, *, own_output: bool = True) -> Head:
    """A random MTP layer of a model. It has the same kind as the model's last layer and follows it."""
    config, number = target.config, target.config.num_hidden_layers
    hidden, vocabulary = config.hidden_size, config.vocab_size
    longer = deepcopy(config)
    longer.num_hidden_layers = number + 1
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(longer, name, None):
            setattr(longer, name, [*getattr(longer, name), getattr(longer, name)[-1]])
    at = f"model.layers.{number}."
    model = random_model(type(target), longer)
    weights = {name: tensor for name, tensor in whole_weights(model).items() if name.startswith(at)}
    torch.manual_seed(11)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{at}{name}.weight"] = 1 + _random((hidden,), 0.3)
    weights[f"{at}eh_proj.weight"] = _random((hidden, 2 * hidden))
    weights[f"{at}embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
    if own_output:
        weights[f"{at}shared_head.head.weight"] = _random((vocabulary, hidden))
    shape = deepcopy(handshake_model(hf_config(config, type(target).__name__))["shape"])
    shape["decoder"]["layers"].append(shape["decoder"]["layers"][-1])
    head = {
        "kind": "mtp",
        "taps": [number],
        "norm_before_residual": False,
        "vocab_size": vocabulary,
        "mapped": False,
        "own_embedding": False,
        "own_output": own_output,
    }
    told = {"head": head, "shape": shape, "files": [], "manifest": None}
    return Head(told, weights, model.model.layers[number], model.model.rotary_emb)


def headed(target: Any, head: Head, tokens: int = TOKENS, **changes: Any) -> ModelRunner:
    """A runner of a model with a draft head."""
    config: dict[str, Any] = {"device": "deferred", "max_running_requests": 40}
    runner = runner_of(target, draft={"model": head.told, "tokens": tokens}, **config | changes)
    assert isinstance(runner.draft_model, HeadDrafts)
    made = runner.decoder.draft_head
    assert isinstance(made, DraftHead)
    made.params.load(head.weights.items(), lambda done, total: None)
    made.loaded()
    return runner


@dataclass
class Reference:
    """A head's forward pass, built from modules of transformers and without pages."""

    target: Any
    head: Head

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The inputs [n, hidden] of each layer, and the final states."""
        found = self.target.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        return [state[0] for state in found.hidden_states]

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Returns the drafts after `tokens`, the states [count, hidden] that gave them, and the keys or latent rows.

        The KV entry of a position uses the feature of the previous position. That is the target model's feature if it
        is known, else the head's own state.
        """
        features = list(self._features(self.states(tokens)[: len(tokens)]))
        known, drafted, states = list(tokens), [], []
        keys = torch.zeros(0)
        for _ in range(count):
            # The feature of the last known token is not needed.
            before = torch.stack([torch.zeros_like(features[0]), *features[: len(known) - 1]])
            state, keys = self._layer(torch.tensor(known), before)
            drafted.append(self._likely(state[-1]))
            states.append(state[-1])
            features = [*features[: len(known) - 1], state[-1]]
            known.append(drafted[-1])
        return drafted, torch.stack(states), keys[: len(tokens)]

    @property
    def _weights(self) -> Mapping[str, torch.Tensor]:
        return self.head.weights

    def _features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        head = self.head.told["head"]
        tapped = torch.cat([states[tap] for tap in head["taps"]], dim=1)
        return F.linear(tapped, self._weights["fc.weight"]) if head["kind"] == "eagle3" else tapped

    def _norm(self, name: str, eps: float) -> LlamaRMSNorm:
        made = LlamaRMSNorm(self.target.config.hidden_size, eps)
        made.weight.data = self._weights[f"{name}.weight"]
        return made

    def _likely(self, state: torch.Tensor) -> int:
        head, weights = self.head.told["head"], self._weights
        if head["kind"] == "eagle3":
            normal, output = self._norm("norm", 1e-5)(state), weights.get("lm_head.weight")
        else:
            at = f"model.layers.{self.target.config.num_hidden_layers}.shared_head"
            normal = self._norm(f"{at}.norm", self.target.config.rms_norm_eps)(state)
            output = weights.get(f"{at}.head.weight")
        logits = F.linear(normal, self.target.lm_head.weight if output is None else output)
        found = int(logits.argmax())
        return found + int(weights["d2t"][found]) if head["mapped"] else found

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        own = self._weights.get("embed_tokens.weight")
        embedded = F.embedding(tokens, self.target.model.embed_tokens.weight if own is None else own)
        # Position 0 has no previous feature, and its embedding is set to 0.
        return torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))

    def _layer(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.head.told["head"]["kind"] == "mtp":
            return self._mtp(tokens, before)
        weights, count = self._weights, len(tokens)

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            name = f"midlayer.self_attn.{name}"
            return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        normal = self._norm("midlayer.hidden_norm", 1e-5)(before)
        x = torch.cat((self._norm("midlayer.input_layernorm", 1e-5)(self._embedded(tokens)), normal), dim=1)
        q, k, v = (product(f"{name}_proj", x).view(1, count, -1, 24).transpose(1, 2) for name in "qkv")
        config = LlamaConfig(
            hidden_size=96,
            num_attention_heads=4,
            head_dim=24,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(count)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        residual = normal if self.head.told["head"]["norm_before_residual"] else before
        x = residual + product("o_proj", attended[0].transpose(0, 1).flatten(1))
        config = LlamaConfig(hidden_size=self.target.config.hidden_size, intermediate_size=80)
        mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(mlp, name).weight.data = weights[f"midlayer.mlp.{name}.weight"]
        return x + mlp(self._norm("midlayer.post_attention_layernorm", 1e-5)(x)), k[0].transpose(0, 1)

    def _mtp(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number, eps = self.target.config.num_hidden_layers, self.target.config.rms_norm_eps
        at = f"model.layers.{number}."
        both = [self._norm(f"{at}enorm", eps)(self._embedded(tokens)), self._norm(f"{at}hnorm", eps)(before)]
        x = F.linear(torch.cat(both, dim=1), self._weights[f"{at}eh_proj.weight"])[None]
        layer = self.head.layer
        angles = self.head.rotary(x, torch.arange(len(tokens))[None])
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
        found = layer(x, attention_mask=mask, position_embeddings=angles)
        states = (found if isinstance(found, torch.Tensor) else found[0])[0]
        return states, self._keys(layer, x, angles)

    def _keys(self, layer: Any, x: torch.Tensor, angles: Any) -> torch.Tensor:
        """The keys of heads [n, heads, dim], or the latent parts of rows [n, 1, rank]."""
        attention, x = layer.self_attn, layer.input_layernorm(x)
        if isinstance(self.target, DeepseekV3ForCausalLM):
            rank = self.target.config.kv_lora_rank
            return attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(x)[0, :, :rank])[:, None]
        k = attention.k_proj(x).view(1, x.shape[1], -1, attention.head_dim)
        k = attention.k_norm(k) if hasattr(attention, "k_norm") else k
        k = k.transpose(1, 2)
        turned = angles[0].shape[-1]
        rotated, _ = apply_rotary_pos_emb(k[..., :turned], k[..., :turned], *angles)
        return torch.cat((rotated, k[..., turned:]), dim=-1)[0].transpose(0, 1)
