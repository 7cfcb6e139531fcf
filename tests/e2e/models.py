"""Tiny random models that start in seconds, and the default model, with their references in transformers."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.described import described
from forebay.weights.cache import cache_directory
from tests.e2e.server import ROOT
from tests.weights.support import smollm2

TOKENIZER = ROOT / "crates/text/tests/data/tiny-llama-tokenizer.json"
VOCABULARY = 2048
END = 2
"""The id of <|im_end|>, in the tiny models and in SmolLM2."""
TINY_CONTEXT = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

IMAGE = VOCABULARY + 2
"""The id of <|image_pad|> in the tiny models with a vision tower."""
IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1 << 18},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

GEMMA_MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for item in message.content %}"
    "{% if item.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ item.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes images as the template of Gemma 3 does."""
GEMMA_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_seq_length": 16,
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 32, "width": 32},
}

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TINY_CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
_LATENT: dict[str, Any] = {
    **_SHAPE,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_INDEXED: dict[str, Any] = {**_LATENT, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
# transformers' classes have few type annotations, so they are Any here.
_FAMILIES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE, head_dim=32)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_experts=8, norm_topk_prob=True)),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**_SHAPE, **_EXPERTS, n_routed_experts=8, n_group=2, topk_group=1, use_qk_norm=True),
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**_LATENT)),
    "deepseek-v32": (DeepseekV32ForCausalLM, DeepseekV32Config(**_INDEXED)),
    "glm-dsa": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig(**{**_INDEXED, "num_hidden_layers": 3}, indexer_types=["full", "shared", "full"]),
    ),
    # Most bytes of its pages are rows rather than index keys, so sparse decoding from host memory saves much.
    "glm-dsa-one-index": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig(**{**_INDEXED, "num_hidden_layers": 6}, indexer_types=["full", *["shared"] * 5]),
    ),
}


_SEEING: dict[str, Any] = {
    "image_token_id": IMAGE,
    "vision_start_token_id": VOCABULARY,
    "vision_end_token_id": VOCABULARY + 1,
}
_SEEING_SHAPE: dict[str, Any] = {**_SHAPE, "vocab_size": VOCABULARY + 3}
_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
_SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_FAMILIES |= {
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_SHAPE,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=24,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    # Only transformers' own code computes Starcoder2.
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config(**_SHAPE, sliding_window=24)),
    "qwen3.5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **{**_SHAPE, "num_hidden_layers": 4},
            head_dim=16,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    ),
    "nemotron-3": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **{key: value for key, value in _SHAPE.items() if key != "num_hidden_layers"},
            head_dim=16,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            time_step_min=1e-30,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            moe_latent_size=32,
        ),
    ),
    "falcon-h1": (
        FalconH1ForCausalLM,
        FalconH1Config(
            **_SHAPE,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=2,
            key_multiplier=0.7,
            ssm_multipliers=[0.9, 1.4, 0.8, 1.1, 0.7],
        ),
    ),
}
_FAMILIES |= {
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config={
                **_SEEING_SHAPE,
                "head_dim": 16,
                "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
            },
            vision_config={**_TOWER, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
            **_SEEING,
        ),
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(
            text_config={**_SEEING_SHAPE, "rope_parameters": _SECTIONS},
            vision_config={**_TOWER, "window_size": 24, "fullatt_block_indexes": [1, 3]},
            **_SEEING,
        ),
    ),
    "qwen3.5-vl": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(
            text_config={
                **_SEEING_SHAPE,
                "num_hidden_layers": 4,
                "head_dim": 32,
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "rope_parameters": {**_SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
            },
            vision_config={**_TOWER, "num_position_embeddings": 36},
            **_SEEING,
        ),
    ),
    "gemma3-vl": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config={**_SEEING_SHAPE, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 24},
            vision_config={
                "hidden_size": 36,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "patch_size": 4,
                "image_size": 32,
                "vision_use_head": False,
            },
            mm_tokens_per_image=16,
            image_token_index=IMAGE,
            boi_token_index=VOCABULARY,
            eoi_token_index=VOCABULARY + 1,
        ),
    ),
}


class Model:
    """A model to serve, with its reference in transformers."""

    def __init__(self, name: str, path: str | Path, tokenizer: Path) -> None:
        self.name = name
        self.path = path
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @cached_property
    def reference(self) -> Any:
        """The same weights in transformers, in float32."""
        pytest.fail(f"{self.name} has no reference")

    @property
    def threads(self) -> int:
        """The number of threads that is fastest: a tiny model has too little work to share."""
        return 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


class TinyModel(Model):
    """A random model of a family, in a directory as on the Hugging Face hub."""

    def __init__(self, family: str, directory: Path, *, sharded: bool = False) -> None:
        self.family = family
        model = self._random(family)
        model.save_pretrained(directory, max_shard_size="300KB" if sharded else "1GB")
        assert (directory / "model.safetensors.index.json").is_file() == sharded
        shutil.copyfile(TOKENIZER, directory / "tokenizer.json")
        config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        super().__init__(directory.name, directory, TOKENIZER)
        self._model = model

    @staticmethod
    def _random(family: str) -> Any:
        # Weights larger than those of an untrained model spread the logits and the attention.
        kind, config = _FAMILIES[family]
        torch.manual_seed(11)
        model = kind(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                norm = name.endswith("norm.weight")
                parameter.copy_(torch.randn_like(parameter) * (0.3 if norm else 0.18))
                if norm:
                    parameter.add_(1)
        return model

    @cached_property
    def reference(self) -> Any:
        return self._model


class TinyImageModel(TinyModel):
    """A random model with a vision tower. A patch has 4 by 4 pixels, and a position 8 by 8."""

    pixels = 8

    def __init__(self, family: str, directory: Path) -> None:
        super().__init__(family, directory)
        is_gemma = family.startswith("gemma")
        self.tokens = GEMMA_MARKS if is_gemma else ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
        template, preprocessor = (GEMMA_TEMPLATE, GEMMA_PREPROCESSOR) if is_gemma else (IMAGE_TEMPLATE, PREPROCESSOR)
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in self.tokens])
        assert tokenizer.token_to_id(self.tokens[-1]) == IMAGE
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        self.tokenizer = tokenizer

    @cached_property
    def reference(self) -> Any:
        # transformers keeps the RoPE offsets of the last prompt, so they are reset here.
        self._model.model.rope_deltas = None
        return self._model


class SmolLM2(Model):
    """The default model."""

    def __init__(self) -> None:
        found = described(smollm2(), cache_directory())
        super().__init__("smollm2", "smollm2", Path(found["tokenizer"]))

    @property
    def threads(self) -> int:
        return 2

    @cached_property
    def reference(self) -> Any:
        # transformers' own reader of GGUF: the reference must share no code with the tested reader.
        path = str(smollm2())
        read: Any = load_gguf_checkpoint
        model: Any = LlamaForCausalLM(LlamaConfig(**read(path, return_tensors=False)["config"]))
        weights = read(path, return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert missing == ["lm_head.weight"]
        assert not unexpected
        model.tie_weights()
        return model.float().eval()
