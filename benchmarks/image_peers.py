"""A burst of images for a tiny Qwen3-VL with random weights, in Forebay and vLLM, and its effect on text streams.

    python -m benchmarks.image_peers --servers forebay,vllm

96 chats come at the same moment, each with another PNG file of 1200x1200 (noise in eight levels, 1.6 MB). They come
first alone, then beside 32 streams of text. The streams run from before the first image until after the last. Their
gaps are measured from the arrival of the images to the last answer about one. The model has one layer and its tower has
one, so the path from the socket to the tower dominates. Both servers compute the same weights with PyTorch.
"""

from __future__ import annotations

import base64
import json
import selectors
import socket
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks import compare, images, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.intake import running_requests, send_all, stand_back
from benchmarks.load import SEED, start
from benchmarks.processes import Running, ServerError
from benchmarks.records import Results
from benchmarks.servers import SERVED_NAME, Server, Setting
from benchmarks.servers import chosen as choose

MODEL = "seeing-tiny"
STREAMS = 32
REQUESTS = 96
INPUT, OUTPUT = 64, 7000
"""Words of a stream's prompt, and tokens of its answer: enough to outlast the answer to the last image."""
ANSWER = 8
"""Tokens of an answer to an image."""
MARKS = (*images.MARKS, "<|video_pad|>")
SETTING = Setting(model=MODEL, streams=STREAMS + REQUESTS, context=8192, pool=262_144)
WARM_UP = 2
"""Images that are sent before the measurement."""
PATIENCE_SECONDS = 300.0
ALONE = f"{REQUESTS} images alone"
BESIDE = f"{REQUESTS} images beside {STREAMS} streams"


def build() -> None:
    """Writes the model: SmolLM2's vocabulary, one layer, a tower of one layer."""
    models.build(force=False)
    folder = models.directory(MODEL)
    if folder.is_dir():
        return
    partial, tokenizer = images.begin_model(folder, MARKS)
    start_id, end_id, image_id, video_id = (int(tokenizer.token_to_id(mark) or 0) for mark in MARKS)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    text = {"vocab_size": video_id + 1, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, **ends}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "rope_parameters": rope}
    text |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    tower = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 1, "out_hidden_size": 64}
    tower |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [0]}
    marks = {"image_token_id": image_id, "video_token_id": video_id}
    marks |= {"vision_start_token_id": start_id, "vision_end_token_id": end_id}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **marks, **ends)
    torch.manual_seed(SEED)
    model: Any = Qwen3VLForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(partial)
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    norm = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            **sizes,
            **norm,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
            **sizes,
            **norm,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2TokenizerFast",
            "processor_class": "Qwen3VLProcessor",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "chat_template": images.TEMPLATE,
        },
    }
    for name, value in files.items():
        models.write_json(partial / name, value)
    (partial / "chat_template.jinja").write_text(images.TEMPLATE, encoding="utf-8")
    partial.replace(folder)


def http(asked: dict[str, Any]) -> bytes:
    """A chat with an answer that is greedy and has its full length: head and body of the request."""
    body = json.dumps({"model": SERVED_NAME, "temperature": 0, "ignore_eos": True, **asked}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def request(seed: int) -> bytes:
    """A chat about an image that no other chat has."""
    url = f"data:image/png;base64,{base64.b64encode(images.png(seed)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return http({"messages": [{"role": "user", "content": content}], "max_tokens": ANSWER})


@cache
def requests() -> tuple[bytes, ...]:
    """All chats for a server: warm-up, images alone, and images beside the streams. No image occurs twice."""
    return tuple(request(seed) for seed in range(WARM_UP + 2 * REQUESTS))


def burst(port: int, first: int, end: int) -> tuple[float, float, float]:
    """Sends images `first .. end` at once. Returns the start, the end and the longest time of one request, in seconds.

    The clock is that of the system, which all processes share.
    """
    contents = requests()[first:end]
    began = time.monotonic()
    seconds = send_all(port, contents)
    return began, time.monotonic(), max(seconds)


class Streams:
    """Text streams, read by a thread that notes when tokens come. Leaving the context ends them."""

    def __init__(self, port: int) -> None:
        words = np.random.default_rng(SEED).integers(0, 1000, (STREAMS, INPUT))
        self._selector = selectors.DefaultSelector()
        self._times: list[list[tuple[float, int]]] = [[] for _ in range(STREAMS)]
        self._ended = threading.Event()
        self._broken: str | None = None
        for at, numbers in enumerate(words.tolist()):
            connection = socket.create_connection(("127.0.0.1", port))
            text = " ".join(map(str, numbers))
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT, "stream": True}
            connection.sendall(http(asked))
            self._selector.register(connection, selectors.EVENT_READ, at)
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _read(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.1):
                piece = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                if tokens := piece.count(b"data: {"):
                    self._times[key.data].append((time.monotonic(), tokens))
                if not piece or b"data: [DONE]" in piece:
                    self._broken = f"stream {key.data} ended before the images did: {piece[-200:]!r}"
                    return

    def gaps(self, began: float, ended: float) -> dict[str, float]:
        """Gaps between tokens from `began` to `ended`, over all streams, in milliseconds. Raises ServerError."""
        if self._broken:
            raise ServerError(self._broken)
        gaps: list[float] = []
        for times in self._times:
            last = began
            for at, tokens in times:
                if began < at <= ended:
                    gaps += [1e3 * (at - last), *([0.0] * (tokens - 1))]
                    last = at
            gaps.append(1e3 * (ended - last))
        half, most, longest = np.percentile(gaps, [50, 99, 100]).tolist()
        tokens = (len(gaps) - STREAMS) / (ended - began)
        return {"median_itl_ms": half, "p99_itl_ms": most, "max_itl_ms": longest, "output_throughput": tokens}


def told(began: float, ended: float, slowest: float) -> dict[str, float]:
    """The values of a burst that the results keep."""
    return {"images_a_second": REQUESTS / (ended - began), "slowest_of_burst_ms": 1e3 * slowest}


def measure(server: Server, sender: ProcessPoolExecutor) -> list[tuple[str, dict[str, Any]]]:
    """Runs the images alone, then beside streams, on a fresh server. Raises ServerError."""

    def send(running: Running, first: int, count: int) -> tuple[float, float, float]:
        return sender.submit(burst, running.port, first, first + count).result()

    with start(server, SETTING) as running:
        send(running, 0, WARM_UP)
        alone = send(running, WARM_UP, REQUESTS)
        with Streams(running.port) as streams:
            patience = time.monotonic() + PATIENCE_SECONDS
            while running_requests(running.port) < STREAMS:
                if time.monotonic() > patience:
                    raise ServerError(f"{server.name}: {STREAMS} streams never ran at the same time")
                time.sleep(0.05)
            beside = send(running, WARM_UP + REQUESTS, REQUESTS)
            gaps = streams.gaps(beside[0], beside[1])
    return [(ALONE, told(*alone)), (BESIDE, told(*beside) | gaps)]


@table_of("image_peers")
def table(found: Results) -> str:
    """Images at once by server; the ratios are of the first server to the others."""
    head = ["sent", "by", "images/s", "forebay / this", "slowest s", "ITL p50 ms", "p99 ms", "max ms"]
    head.append("p99, forebay / this")
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            slowest = found.median(workload, server, "slowest_of_burst_ms")
            cells = [number(found.median(workload, server, "images_a_second"))]
            cells += [spread(found.ratio(workload, first, server, "images_a_second"))]
            cells += [number(None if slowest is None else slowest / 1e3)]
            cells += [number(found.median(workload, server, key)) for key in keys]
            cells += [spread(found.ratio(workload, first, server, "p99_itl_ms"))]
            rows.append([workload, server, *cells])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Images at once, beside vLLM on the same model.", rounds=3)
    compare.add_servers(flags, ["forebay", "vllm"])
    chosen = flags.parse_args()
    found = records.new("image_peers", chosen.rounds)
    build()
    servers, found.skipped = choose(chosen.servers)
    found.notes = {server.name: server.note for server in servers if server.note}
    by_name = {server.name: server for server in servers}
    # A separate process sends the images, so that the thread that reads the streams is not delayed.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=stand_back) as sender:
        sender.submit(requests).result()
        for turn, name in records.in_turn(chosen.rounds, list(by_name)):
            for workload, values in measure(by_name[name], sender):
                found.runs.append(records.Run(workload, name, turn, values))
                compare.say(f"  round {turn} {workload}: {name}: {values['images_a_second']:.1f} images/s")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
