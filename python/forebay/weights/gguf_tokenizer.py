"""GGUF tokenizer metadata, converted back to the original `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.pretokenizers import pipeline

__all__ = ["special_token", "tokenizer_json"]

_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6
_SPACE = "▁"
# Pre-tokenizers of SentencePiece's pieces, which no alphabet of bytes stands for.
_OF_PIECES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer.json`. Raises ModelError or UnsupportedModelError.

    Two facts are not in GGUF: if an added token takes the spaces beside it, and if a token that looks special was
    special. Neither changes the encoding of ordinary text.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the GGUF file has no tokenizer")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types")
    if kind == "gemma4" or (kind == "gpt2" and metadata.get("tokenizer.ggml.pre") in _OF_PIECES):
        return _merged_pieces(metadata, tokens, types)
    if kind == "gpt2":
        return _byte_level_bpe(metadata, tokens, types)
    if kind == "llama":
        return _sentencepiece_bpe(metadata, tokens, types)
    raise UnsupportedModelError(f"the GGUF tokenizer {kind!r} is not supported; supported: gemma4, gpt2, llama")


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the `bos` or `eos` token."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    pipe = pipeline(metadata.get("tokenizer.ggml.pre") or "default")
    vocab = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    return _document(
        metadata,
        tokens,
        types,
        normalizer=pipe.normalizer,
        pre_tokenizer=pipe.pre_tokenizer,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        add_bos=pipe.add_bos,
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pipe.ignore_merges,
            "vocab": vocab,
            "merges": _stored_merges(metadata, vocab),
        },
    )


def _stored_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[list[str]]:
    """The merges of the file. One that leads to no token is an error to the reader of a `tokenizer.json`."""
    stored = metadata.get("tokenizer.ggml.merges")
    if stored is None:
        raise ModelError("the GGUF file has a tokenizer of merges, and no merges (tokenizer.ggml.merges)")
    # A space separates the two halves, and neither holds one.
    pairs = [merge.split(" ", 1) for merge in stored if " " in merge]
    return [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]


def _merged_pieces(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Pieces as SentencePiece has them, whose merges the file names."""
    merges = _stored_merges(metadata, _first_places(tokens))
    return _pieces(metadata, tokens, types, merges=merges, prefix=False)


def _first_places(tokens: list[str]) -> dict[str, int]:
    """The place of each text. One that is there twice is the first one's, as SentencePiece and llama.cpp have it."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("the GGUF file has no score for each token, which its kind of tokenizer needs")
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _pieces(metadata, tokens, types, merges=_merges_of_scores(mergeable), prefix=prefix)


def _pieces(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], *, merges: list[list[str]], prefix: bool
) -> dict[str, Any]:
    """A tokenizer of pieces, in which a mark stands for each space. `prefix` puts one in front."""
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers = [replace_spaces]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(
        metadata,
        tokens,
        types,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        add_bos=True,
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": _first_places(tokens),
            "merges": merges,
        },
    )


def _merges_of_scores(scores: Mapping[str, float]) -> list[list[str]]:
    """The merges of a SentencePiece vocabulary, best first: every way to make a token of two, by the token's score.

    Ways to make tokens of the same score go by the length of their halves, longest first. Hugging Face converts such
    vocabularies in this order, and so the published `tokenizer.json` files have it.
    """
    ranks = {token: rank for rank, token in enumerate(scores)}
    merges = []
    for token, score in scores.items():
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(score, left, right) for left, right in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in merges]


def _document(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
    add_bos: bool,
) -> dict[str, Any]:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and token == model["unk_token"])
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(metadata, add_bos=add_bos),
        "decoder": decoder,
        "model": model,
    }


def _post_processor(metadata: Mapping[str, Any], *, add_bos: bool) -> dict[str, Any] | None:
    bos = special_token(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = special_token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return None
    single: list[dict[str, Any]] = []
    pair: list[dict[str, Any]] = []
    for sequence, type_id in (("A", 0), ("B", 1)):
        part: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if bos is not None:
            part.insert(0, {"SpecialToken": {"id": bos, "type_id": type_id}})
        if eos is not None:
            part.append({"SpecialToken": {"id": eos, "type_id": type_id}})
        single = single or part
        pair += part
    ids = {"bos": bos, "eos": eos}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            text: {"id": text, "ids": [metadata[f"tokenizer.ggml.{name}_token_id"]], "tokens": [text]}
            for name, text in ids.items()
            if text is not None
        },
    }
