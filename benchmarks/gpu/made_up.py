"""A model's folder without weights: a shape, and a byte-level tokenizer with as many tokens as the shape has."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "\u0120"
"""The space, as byte-level tokenizers write it."""
END = "<|end|>"


def write(folder: Path, config: dict[str, Any]) -> Path:
    """Writes `config.json` and a tokenizer; weights are the server's `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    end = config["vocab_size"] - 1
    whole = {**config, "torch_dtype": "bfloat16", "eos_token_id": end, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE of `size` tokens: the bytes, beginnings of made-up words of up to four letters, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), size - len(alphabet) - 1))
    words = [*alphabet, *(left + right for left, right in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    if made.get_vocab_size() != size:
        raise ValueError(f"a tokenizer of {made.get_vocab_size()} tokens where the model has {size}")
    return made


def _merges() -> itertools.chain[tuple[str, str]]:
    """Pairs of a prefix and its next letter, short ones first; practically endless."""
    lengths = (itertools.product((SPACE + LETTERS), *[LETTERS] * (length - 1)) for length in itertools.count(1))
    beginnings = itertools.chain.from_iterable(lengths)
    return itertools.chain.from_iterable(
        (("".join(beginning), letter) for letter in LETTERS) for beginning in beginnings
    )
