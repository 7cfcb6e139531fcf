"""Models without a `tokenizer.json`: the server's ids equal those of transformers and of another library."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from tests.e2e.conftest import Models, Serve
from tests.e2e.models import TOKENIZER, Model
from tests.e2e.server import ROOT, Server

Ids = Callable[[str], list[int]]
"""A function from a text to its ids."""
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{L}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The pattern of tokenization_kimi.py.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
OWN_CODE = "tokenization_kimi.TikTokenTokenizer"


def texts() -> list[str]:
    """Lines of prose, code and tables, and texts that the patterns split differently."""
    lines = (ROOT / "LICENSE").read_text().splitlines() + (ROOT / "Makefile").read_text().splitlines()[:80]
    return [
        *filter(None, lines),
        "It's 12345.678 o'clock,  isn't IT?  XMLHttpRequest",
        "naïve Straße ŒUVRE Δοκιμή проверка",
        "汉字和English混合 かな カナ 한국어 ไทย",
        "🌊🌊 e\u0301 \u200d \u202e",
        "tabs\tand\n\n\nlines \r\n  end   ",
        " ",
    ]


def ranks() -> list[bytes]:
    """The tokens of the tiny models' tokenizer in the order of their merges, without special tokens."""
    source = json.loads(TOKENIZER.read_text())
    special = {token["content"] for token in source["added_tokens"]}
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    ordered = sorted((number, token) for token, number in source["model"]["vocab"].items() if token not in special)
    return [bytes(byte_of[letter] for letter in token) for _, token in ordered]


def encoding(pattern: str, first: int = 0) -> Ids:
    """The ids of OpenAI's tiktoken, counted from `first`."""
    found = tiktoken.Encoding(
        "tiny", pat_str=pattern, mergeable_ranks={token: rank for rank, token in enumerate(ranks())}, special_tokens={}
    )
    return lambda text: [first + number for number in found.encode(text, disallowed_special=())]


def of_tiktoken(folder: Path) -> Ids:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks()))
    (folder / "tiktoken.model").write_text("".join(lines))
    return encoding(TikTokenConverter().pattern)  # type: ignore[no-untyped-call]


def of_kimi(folder: Path) -> Ids:
    of_tiktoken(folder)
    configure(folder, auto_map={"AutoTokenizer": [OWN_CODE, None]})
    return encoding(KIMI)


def of_tekken(folder: Path) -> Ids:
    special = 17
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(ranks())
    ]
    config = {"pattern": TEKKEN, "version": "v7", "default_num_special_tokens": special}
    config |= {"num_vocab_tokens": len(vocabulary), "default_vocab_size": len(vocabulary) + special}
    control = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": control}))
    return encoding(TEKKEN, special)


def of_sentencepiece(folder: Path) -> Ids:
    sentencepiece.SentencePieceTrainer.train(
        input=str(ROOT / "LICENSE"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1000,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    configure(folder, tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=False)
    found = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return lambda text: list(found.encode(text))


def configure(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


MAKERS = {"tiktoken": of_tiktoken, "kimi": of_kimi, "tekken": of_tekken, "sentencepiece": of_sentencepiece}


def folder_of(form: str, models: Models, tmp_path: Path) -> tuple[Path, Ids]:
    folder = tmp_path / form
    shutil.copytree(models("llama").path, folder)
    (folder / "tokenizer.json").unlink()
    configure(folder, bos_token=None, eos_token=None)
    return folder, MAKERS[form](folder)


def ids(server: Server, text: str) -> list[int]:
    found: list[int] = server.ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    return found


@pytest.mark.parametrize("form", ["kimi", "tekken", "sentencepiece", pytest.param("tiktoken", marks=pytest.mark.slow)])
def test_a_server_has_the_ids_of_transformers(form: str, models: Models, serve: Serve, tmp_path: Path) -> None:
    folder, other = folder_of(form, models, tmp_path)
    server = serve(Model(form, folder, TOKENIZER))
    # Only code of Kimi's repository has the pattern, and transformers must not run that code.
    own: Any = None if form == "kimi" else AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in texts():
        found = ids(server, text)
        assert own is None or found == own(text, add_special_tokens=False).input_ids, text
        if form == "sentencepiece" and text.startswith(" "):
            # SentencePiece puts a space before the text, and transformers does not.
            continue
        assert found == other(text), text
        assert server.ask("/detokenize", {"tokens": found})["prompt"] == text
    answer = server.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 4


def test_code_that_cuts_text_is_named_and_never_run(models: Models, serve: Serve, tmp_path: Path) -> None:
    folder, _ = folder_of("kimi", models, tmp_path)
    configure(folder, auto_map={"AutoTokenizer": ["tokenization_other.OtherTokenizer", None]})
    server = serve(Model("other", folder, TOKENIZER), healthy=False)
    assert server.process.wait(120) != 0
    assert "is the repository's own (tokenization_other.OtherTokenizer), which is never run" in server.log()


def test_what_is_no_tokenizer_is_refused(models: Models, serve: Serve, tmp_path: Path) -> None:
    folder, _ = folder_of("sentencepiece", models, tmp_path)
    (folder / "tokenizer.model").write_bytes(b"\x00 nothing")
    server = serve(Model("broken", folder, TOKENIZER), healthy=False)
    assert server.process.wait(120) != 0
    assert f"no tokenizer.json can be made of {folder / 'tokenizer.model'}" in server.log()
    assert "Traceback" not in server.log()
