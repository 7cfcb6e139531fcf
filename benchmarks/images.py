"""The effect of a burst of images on the streams beside it: gaps between tokens, by where the burst is decoded.

    python -m benchmarks.images --rounds 3

The load is that of `benchmarks.intake`, with images. 64 streams decode on a simulated device whose every step takes 5
ms. Once a second 96 chats come at the same moment, each with another image of 1200x1200. An image is a PNG file of
noise in eight levels, about 1.6 MB, 2.2 MB in base64. The simulated vision tower takes no time. So only the host
affects the gaps: JSON, base64, hashes, decoding, the resize, the copy into the arena. In one row another server gets
the bursts: the same work, but in an independent process.
"""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.intake import (
    MORE_KEPT,
    REQUESTS,
    STREAMS,
    Bursts,
    Case,
    bursts,
    send_all,
    stand_back,
)
from benchmarks.load import Workload, client_command, kept, run_client, start
from benchmarks.processes import ServerError
from benchmarks.records import Results
from benchmarks.servers import STEPS_OF_5_MS, Server, Setting

MODEL = "seeing"
TOKENS = 3900
"""Tokens of each stream: on two cores a burst takes some seconds."""
SIDE = 1200
LEVELS = 8
CONTEXT = 4096
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTING = Setting(model=MODEL, streams=STREAMS + REQUESTS, context=CONTEXT)
WORKLOAD = Workload(f"{STREAMS} streams", SETTING, 10, TOKENS, requests=STREAMS, warmup=0)


CASES = [
    Case("no burst", "forebay-chat", profile=STEPS_OF_5_MS, bursts=Bursts.NOWHERE),
    Case("burst, to another server", "forebay-chat", profile=STEPS_OF_5_MS, bursts=Bursts.ELSEWHERE),
    Case("burst", "forebay-chat", profile=STEPS_OF_5_MS),
    Case("burst, --inline-intake", "forebay-chat", flags=("--inline-intake",), profile=STEPS_OF_5_MS),
]


def begin_model(folder: Path, marks: Sequence[str]) -> tuple[Path, Tokenizer]:
    """Begins a model's folder with SmolLM2's tokenizer and these marks; it becomes `folder` when complete."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(models.tokenizer_file("smollm2")))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(partial / "tokenizer.json"))
    return partial, tokenizer


def build() -> None:
    """Writes the files that a simulated Qwen3-VL-4B needs: its shapes and a tokenizer; no weights."""
    models.build(force=False)
    folder = models.directory(MODEL)
    if folder.is_dir():
        return
    partial, tokenizer = begin_model(folder, MARKS)
    start_id, end_id, image_id = (int(tokenizer.token_to_id(mark) or 0) for mark in MARKS)
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": image_id + 1,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2560,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
        "hidden_act": "gelu_pytorch_tanh",
    }
    models.write_json(
        partial / "config.json",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": text,
            "vision_config": tower,
            "image_token_id": image_id,
            "vision_start_token_id": start_id,
            "vision_end_token_id": end_id,
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        },
    )
    models.write_json(
        partial / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    models.write_json(partial / "tokenizer_config.json", config)
    partial.replace(folder)


def png(seed: int, side: int = SIDE) -> bytes:
    """A PNG of noise, with so few levels that the file is about as large as a photograph's."""
    random = np.random.default_rng(seed)
    pixels = (random.integers(0, LEVELS, (side, 1 + 3 * side)) * (256 // LEVELS)).astype(np.uint8)
    # The first byte of each row selects its filter: none.
    pixels[:, 0] = 0

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(pixels.tobytes(), 1)) + chunk(b"IEND", b"")


def request(file: bytes) -> bytes:
    """One request of the burst: head and body."""
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@cache
def requests() -> tuple[bytes, ...]:
    """The requests of a burst."""
    return tuple(request(png(seed)) for seed in range(REQUESTS))


def send(port: int, contents: Sequence[bytes], count: int) -> list[float]:
    """Sends a burst."""
    assert len(contents) == count
    return send_all(port, contents)


def encoded(port: int) -> float:
    """The number of images that the tower has encoded."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("forebay:images_encoded_total"))


def measure(server: Server, workload: Workload) -> dict[str, Any]:
    """Runs the streams and bursts beside them. Returns the kept keys. Raises ServerError."""
    assert isinstance(server, Case)
    contents, where = requests(), server.bursts
    with (
        start(server, workload.setting) as running,
        ExitStack() as others,
        tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder,
        ThreadPoolExecutor(1) as threads,
        ThreadPoolExecutor(1, initializer=stand_back) as sender,
    ):
        target = others.enter_context(start(server, workload.setting)) if where is Bursts.ELSEWHERE else running
        output = Path(folder) / "run.jsonl"
        streams = threads.submit(run_client, client_command(server, workload, running.url, running.pid, output))
        slowest, began = None, time.monotonic()
        if where is not Bursts.NOWHERE:
            slowest = sender.submit(bursts, running, target.port, streams, contents, send).result()
        seconds, seen = time.monotonic() - began, encoded(target.port)
        streams.result()
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"]:
        raise ServerError(f"{server.name}: {run['failed']} streams failed: {run['errors']}")
    told = {"slowest_of_burst_ms": slowest, "images": seen, "images_a_second": seen / seconds}
    return kept(run) | {key: run[key] for key in MORE_KEPT} | told


@table_of("images")
def table(found: Results) -> str:
    """Gaps beside bursts of images; the last ratio compares the p99 with a burst at another server."""
    head = ["beside the streams", "ITL p50 ms", "p99 ms", "max ms", "p99 / no burst", "p99 / another server"]
    head += ["slowest of the burst ms", "images/s"]
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        nothing, other, *_ = found.servers(workload)
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in keys]
            cells += [spread(found.ratio(workload, server, base, "p99_itl_ms")) for base in (nothing, other)]
            cells += [number(found.median(workload, server, key)) for key in ("slowest_of_burst_ms", "images_a_second")]
            rows.append([server, *cells])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Gaps between the tokens of streams while images come in.", rounds=3)
    chosen = flags.parse_args()
    found = records.new("images", chosen.rounds)
    build()
    compare.measure_in_turn(found, WORKLOAD, CASES, chosen.rounds, measure)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
