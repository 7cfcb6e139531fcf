"""Write crates/text/tests/data/tokenizers/: tiny tokenizers, and the results of Hugging Face's tokenizers package.

Each tokenizer has NAME.json (a `tokenizer.json`) and NAME.cases.json. For each text of a difficult corpus, the cases
have the ids with and without special tokens, and the text of those ids with special tokens kept and skipped. They also
have lists of arbitrary ids with their text.

Training breaks ties at random, so existing tokenizers are kept. Remove a tokenizer's file to train it again.

Run from the repository root: python tests/text/make_tokenizer_cases.py
"""

import json
import pathlib
import random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = pathlib.Path(__file__).parents[2] / "crates/text/tests/data"
OUT = DATA / "tokenizers"

TRAINING = [
    "The quick brown fox jumps over the lazy dog, again and again; the dog didn't mind.",
    "A forebay is the pool right in front of a turbine: it holds water ready so that the turbine never runs dry.",
    "def main(argv: list[str]) -> int:\n    return 0 if argv else 1\n\n\tfor x in range(10):\n        print(x)\n",
    "Zürich liegt am See. Été à la plage, où ça? ¿Qué tal, señor?",
    "日本語のテキスト。中文文本也在这里。한국어 텍스트도 있습니다.",
    "שלום עולם, مرحبا بالعالم, नमस्ते दुनिया, สวัสดีชาวโลก",
    "Numbers: 1234567890, 3.14159, 1e-7, 0xdeadbeef; prices: $5, €10, £20.",
] * 3

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<｜end｜>"]
PLAIN_ADDED = ["<think>", "<tool▁call>", " spaced out ", "Ġodd", "é\u0301\u200d"]

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "  two spaces before, two after  ",
    "\n\n\t\r\n \n",
    "\x00",
    "a\x00b\x01\x02\x1b[0m\x7f\x80\x85\x9f",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇨🇭 country, 1️⃣ key",
    "e\u0301 n\u0303 o\u0308\u0304\u0323 Z̸̢̛͎a̷l̶g̴o̵",
    "é vs e\u0301, ﬁ ligature, Ⅷ, ①, ½, K (Kelvin), Å",
    "שלום \u202bRTL\u202c עולם مرحبا\u200f\u200e",
    "日本語のテキスト。中文，全角　空格！한국어",
    "नमस्ते กำลัง ကမ္ဘာ ᠮᠣᠩᠭᠣᠯ",
    "\u2581 real metaspace \u2581\u2581x",
    "\ufeffBOM, \ufffd replacement, \ufffe\uffff non-characters, \U0010ffff last",
    "\u200b\u200c\u200d\u2060\u00ad zero width",
    "\u2028line\u2029paragraph\u00a0nbsp\u3000wide\u2003em",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒻𝓊𝓃 🜁 𓀀 𠜎",
    "<s>literal</s> <|im_start|>user\nhi<｜end｜> <think>x</think> <tool▁call> spaced out Ġodd é\u0301\u200d",
    "<s<s>> <|im_start|<|im_start|>> < s>",
    "<0x0A> <0xE2><0x82><0xAC> <0xZZ> <unk> [UNK] ## ##ing Ġ Ċ ▁",
    "don't I'll we're they've it's 'quoted' \"double\" ``ticks''",
    "x = {'a': [1, 2, 3], \"b\": None}  # comment\n\tif x:\n\t\tpass\n",
    " " * 300,
    "\n" * 60 + "end",
    "ab" * 150,
    "é" * 70,
    "🙂" * 30,
    "word " * 40,
    "￼￼￼ ÿþ \u0085 \u001c\u001d\u001e\u001f",
]


def byte_level() -> Tokenizer:
    """GPT-2 style, with added tokens outside of the byte alphabet, both special and not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    add_tokens(tokenizer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
        ]
    )
    return tokenizer


def add_tokens(tokenizer: Tokenizer) -> None:
    """Adds the same tokens to every tokenizer."""
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])


def byte_fallback() -> Tokenizer:
    """Llama 2 style: a normaliser that replaces spaces by ▁, and byte tokens for characters without a token."""
    vocabulary = trained_pieces()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = sorted(
        {c for text in TRAINING for c in text.replace(" ", "▁") if c.isascii() or c in "▁éüçñààù。日本語中文"}
    )
    merges = [merge for merge in vocabulary if all(c in characters for c in "".join(merge))]
    names += characters
    names += list(dict.fromkeys(a + b for a, b in merges if a + b not in names))
    merges = [(a, b) for a, b in merges if a in names and b in names]
    ids = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    add_tokens(tokenizer)
    tokenizer.add_tokens([AddedToken("normal form", normalized=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    return tokenizer


def trained_pieces() -> list[tuple[str, str]]:
    """Merges trained on text with ▁ for spaces."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TRAINING], trainer)
    return [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


def unigram() -> Tokenizer:
    """T5 style, with Metaspace as pre-tokenizer and decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "</s>"]
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    add_tokens(tokenizer)
    end = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT style. Its decoder looks at the token before, and cleans up spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator(TRAINING, trainer)
    add_tokens(tokenizer)
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return tokenizer


def word_level() -> Tokenizer:
    """Without a decoder, so tokens are joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=120, show_progress=False, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(TRAINING, trainer)
    add_tokens(tokenizer)
    return tokenizer


def suffix_bpe() -> Tokenizer:
    """GPT-1 style: a suffix marks the end of a word and becomes a space, except at the end of the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>"], end_of_word_suffix="</w>"
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    add_tokens(tokenizer)
    return tokenizer


def cases(tokenizer: Tokenizer) -> dict[str, Any]:
    """The package's results for every text, and for random lists of ids."""
    texts = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with_special = tokenizer.encode(text).ids
        texts.append(
            {
                "text": text,
                "ids": ids,
                "ids_with_special": with_special,
                "kept": tokenizer.decode(with_special, skip_special_tokens=False),
                "skipped": tokenizer.decode(with_special, skip_special_tokens=True),
            }
        )
    rng = random.Random(7)
    size = tokenizer.get_vocab_size() + 20
    lists = [[rng.randrange(size) for _ in range(rng.randrange(1, 30))] for _ in range(40)]
    arbitrary = [
        {
            "ids": ids,
            "kept": tokenizer.decode(ids, skip_special_tokens=False),
            "skipped": tokenizer.decode(ids, skip_special_tokens=True),
        }
        for ids in lists
    ]
    return {"texts": texts, "arbitrary": arbitrary}


def main() -> None:
    """Write all files."""
    OUT.mkdir(parents=True, exist_ok=True)
    made = (byte_level, byte_fallback, unigram, wordpiece, word_level, suffix_bpe)
    tokenizers = {}
    for make in made:
        path = OUT / f"{make.__name__}.json"
        if not path.exists():
            path.write_text(make().to_str(pretty=False) + "\n", encoding="utf-8")
        tokenizers[make.__name__] = Tokenizer.from_file(str(path))
    tokenizers["tiny_llama"] = Tokenizer.from_file(str(DATA / "tiny-llama-tokenizer.json"))
    for name, tokenizer in tokenizers.items():
        text = json.dumps(cases(tokenizer), ensure_ascii=True, separators=(",", ":"))
        (OUT / f"{name}.cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
