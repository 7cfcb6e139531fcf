"""Converts other formats of tokenizers to a `tokenizer.json`, and caches the result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.files import read_json

__all__ = ["OTHER_FORMS", "tokenizer_file"]

OTHER_FORMS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")
"""The files that Transformers can convert to a fast tokenizer."""
_VERSION = 2
"""The version of the conversion. Increase it with every change that affects the results."""
_UPPER, _LOWER = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OWN_PATTERNS = {
    "tokenization_kimi.TikTokenTokenizer": (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}
"""Patterns by which repositories' own tokenizer code splits text, by class name. Files of token ranks contain none."""


def tokenizer_file(directory: Path, cache: Path) -> Path | None:
    """Returns the converted file in `cache`; None: there is a `tokenizer.json`, or nothing to convert.

    Raises ModelError.
    """
    found = [directory / name for name in OTHER_FORMS if (directory / name).is_file()]
    found += sorted(directory.glob("*.tiktoken"))
    if (directory / "tokenizer.json").is_file() or not found:
        return None
    digest = hashlib.blake2b(f"tokenizer {_VERSION}".encode(), digest_size=16)
    for path in (*found, directory / "tokenizer_config.json", directory / "config.json"):
        digest.update(path.read_bytes() if path.is_file() else b"")
    made = cache / "tokenizers" / digest.hexdigest() / "tokenizer.json"
    if not made.is_file():
        _make(directory, made, found[0].name)
    return made


def _make(directory: Path, made: Path, name: str) -> None:
    try:
        text = _read(directory, name)
    except (ImportError, OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"no tokenizer.json can be made of {directory / name}: {why}") from error
    from forebay.weights.cache import atomic_file

    try:
        with atomic_file(made) as file:
            file.write(text.encode())
    except OSError as error:
        raise ModelError(f"{made.parent} can't be written: {error.strerror or error}") from error


def _read(directory: Path, name: str) -> str:
    """Returns the content of a `tokenizer.json` for a folder, as Transformers converts it."""
    from transformers import AutoTokenizer, TokenizersBackend

    own = _own_code(directory) if "tiktoken" in name else None
    if own is not None and own not in _OWN_PATTERNS:
        raise UnsupportedModelError(
            f"{name} has ranks only, and the code that cuts text is the repository's own ({own}), which is never run"
        )
    kind: Any = AutoTokenizer if own is None else TokenizersBackend
    tokenizer = kind.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(f"transformers makes no fast tokenizer of {directory / name}")
    text: str = backend.to_str()
    if own is None:
        return text
    steps = [
        {"type": "Split", "pattern": {"Regex": _OWN_PATTERNS[own]}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    cut = {"type": "Sequence", "pretokenizers": steps}
    return json.dumps({**json.loads(text), "pre_tokenizer": cut}, ensure_ascii=False)


def _own_code(directory: Path) -> str | None:
    """Returns the name of the repository's own tokenizer class; None: the class is part of Transformers."""
    path = directory / "tokenizer_config.json"
    found = (read_json(path) if path.is_file() else {}).get("auto_map") or {}
    named = found.get("AutoTokenizer") if isinstance(found, dict) else found
    first = named[0] if isinstance(named, list) and named else named
    return str(first) if first else None
