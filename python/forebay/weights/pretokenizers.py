"""The cutting of text before byte-pair merges, for each `tokenizer.ggml.pre`.

GGUF holds a name where `tokenizer.json` holds a pipeline. Here is the pipeline of the original tokenizer behind each
name, in the form of `tokenizer.json`.
"""

# ruff: noqa: RUF001 (the regexes are of characters that look alike)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.weights.errors import UnsupportedModelError

__all__ = ["PIPELINES", "Pipeline", "pipeline"]


@dataclass(frozen=True)
class Pipeline:
    """The steps of a byte-level tokenizer around its merges; JSON in the form of `tokenizer.json`."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    """True if a whole word that is a token stays that token, also if the merges do not lead there."""
    add_bos: bool = False
    """True if the beginning of sequence is added by default."""


def pipeline(name: str) -> Pipeline:
    """The pipeline called `name`. Raises UnsupportedModelError for an unknown name."""
    if name not in PIPELINES:
        raise UnsupportedModelError(
            f"the GGUF pre-tokenizer {name!r} is not supported; supported: {', '.join(sorted(PIPELINES))}"
        )
    return PIPELINES[name]


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _splits(*regexes: str) -> dict[str, Any]:
    return _sequence(*(_split(regex) for regex in regexes), _byte_level(use_regex=False))


_DIGITS = {"type": "Digits", "individual_digits": True}
_NFC = {"type": "NFC"}

_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4_like(numbers: str) -> str:
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return (
        rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# GPT-4o's: words apart by case, each with the end of a contraction.
_O200K_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION_END}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Seed-Coder's: marks take no line's end with them.
_SEED_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Ling's.
_BAILING_REGEX = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Qwen3.5's: marks that combine with letters belong to words.
_QWEN35_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
_KIMI_REGEX = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION_END}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The letters that DeepSeek LLM takes for words: those of alphabets with two cases. Six are escaped, because editors
# that normalise text replace them by their equivalents, which lie elsewhere.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"

_GPT2 = Pipeline(_byte_level(use_regex=True))
_SINGLE_DIGITS = Pipeline(_sequence(_DIGITS, _byte_level(use_regex=True)))
_LLAMA3 = Pipeline(_splits(_gpt4_like(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)
_GLM4 = Pipeline(_splits(_gpt4_like(r"\p{N}{1,3}")))
_ONE_DIGIT = _splits(_gpt4_like(r"\p{N}"))
_QWEN2 = Pipeline(_ONE_DIGIT, normalizer=_NFC)
_O200K = Pipeline(_splits(_O200K_REGEX))
_BAILING = Pipeline(_splits(_BAILING_REGEX))
_DEEPSEEK_V3 = Pipeline(
    _splits(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

PIPELINES = {
    # No name at all is the same as "default": llama.cpp's guess for files older than the names.
    "default": Pipeline(_splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_REGEX, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "glm4": _GLM4,
    "chatglm-bpe": _GLM4,
    "kimi-k2": Pipeline(_splits(_KIMI_REGEX)),
    "tekken": Pipeline(_splits(_TEKKEN_REGEX), ignore_merges=True, add_bos=True),
    "deepseek-llm": Pipeline(
        _sequence(
            _split("[\r\n]"),
            _split(rf"\s?[{_DEEPSEEK_LETTERS}]+"),
            _split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            _split(r"\s+$"),
            _split(_DEEPSEEK_CJK),
            _DIGITS,
            _byte_level(use_regex=False),
        )
    ),
    "deepseek-coder": Pipeline(
        _sequence(
            _split("[\r\n]"),
            _split(r"\s?\p{L}+"),
            _split(r"\s?\p{P}+"),
            _split(_DEEPSEEK_CJK),
            _DIGITS,
            _byte_level(use_regex=False),
        )
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    # Names of llama.cpp for tokenizers whose pattern is another's.
    **dict.fromkeys(("a.x-4.0", "exaone4", "gigachat", "granite-docling", "jais", "mellum", "trillion"), _GPT2),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("falcon-h1", "jina-v5-nano", "lfm2", "midm-2.0", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "glm5", "smaug-bpe"), _GLM4),
    **dict.fromkeys(("f2llmv2", "kormo"), _QWEN2),
    **dict.fromkeys(("grok-2", "hunyuan", "solar-open", "stablelm2"), Pipeline(_ONE_DIGIT)),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "minimax-m2"), _O200K),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK_V3),
    "minicpm5": Pipeline(_splits(r"\p{N}{1,3}", _gpt4_like(r"\p{N}+")), ignore_merges=True),
    "command-r": Pipeline(_SINGLE_DIGITS.pre_tokenizer, normalizer=_NFC),
    "qwen35": Pipeline(_splits(_QWEN35_REGEX), normalizer=_NFC),
    "seed-coder": Pipeline(_splits(_SEED_REGEX)),
}
