"""The server with hands on a GPU: requests get the same tokens if a hand is killed, or another one continues them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.binary import binary
from tests.hand.support import reference_model

STREAMS = 64
START_SECONDS = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the tokens w0, w1, ...."""
    folder = tmp_path_factory.mktemp("model")
    model = reference_model("qwen3")
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


class Server:
    def __init__(self, directory: Path, log: Path, *more: str, env: dict[str, str] | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        flags = ["--device", "cuda", "--dtype", "float32", "--port", str(port), "--max-running-requests", "64"]
        with log.open("wb") as file:
            command = [str(binary()), "serve", str(directory), *flags, *more]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **(env or {})})

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/server_info", timeout=5) as answer:
                    if all(replica["status"] == "ready" for replica in json.load(answer)["internal_states"]):
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.1)
        pytest.fail(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def ask(self, request: dict[str, Any]) -> list[int]:
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/generate", body, headers), timeout=120
        ) as answer:
            tokens: list[int] = json.load(answer)["output_ids"]
            return tokens

    def metric(self, name: str) -> float:
        """The sum of a metric over all labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def hand(self) -> int:
        """The process id of the hand."""
        for folder in Path("/proc").iterdir():
            try:
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                line = (folder / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if int(parent) == self.process.pid and b"forebay.worker" in line:
                return int(folder.name)
        pytest.fail("there is no hand")


@contextmanager
def serving(directory: Path, log: Path, *more: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    if not binary().is_file():
        pytest.skip("no binary was packed: `make gpu-pack` where there is one")
    server = Server(directory, log, *more, env=env)
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()


@pytest.fixture
def server(directory: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(directory, tmp_path / "log") as server:
        yield server


def requests() -> list[dict[str, Any]]:
    return [
        {
            "input_ids": [(7 * number + at) % 130 for at in range(3 + number % 17)],
            "sampling_params": {
                "max_new_tokens": 60 + number % 13,
                "temperature": 0.8 * (number % 2),
                "top_p": 0.9,
                "seed": number,
                "ignore_eos": True,
            },
        }
        for number in range(STREAMS)
    ]


def test_all_streams_end_with_the_same_tokens_when_the_hand_is_killed(server: Server) -> None:
    asked = requests()
    alone = [server.ask(request) for request in asked[::8]]
    with ThreadPoolExecutor(STREAMS) as pool:
        together = list(pool.map(server.ask, asked))
        assert together[::8] == alone
        killed = server.hand()
        answers = [pool.submit(server.ask, request) for request in asked]
        time.sleep(0.05)
        os.kill(killed, signal.SIGKILL)
        assert [answer.result() for answer in answers] == together
    assert server.hand() != killed
    assert not Path(f"/proc/{killed}").exists() or Path(f"/proc/{killed}/cmdline").read_bytes() == b""


def test_a_prefill_and_a_decode_replica_share_the_gpu(directory: Path, tmp_path: Path) -> None:
    asked = [{**request, "input_ids": request["input_ids"] * 5} for request in requests()]
    with serving(directory, tmp_path / "one") as one, ThreadPoolExecutor(STREAMS) as pool:
        wanted = list(pool.map(one.ask, asked))
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    flags = ["--pd", "1:1", "--pd-local-tokens", "0", "--debug-kv-checksum"]
    memory = ["--max-total-tokens", "20000", "--mem-fraction-static", "0.4"]
    twice = {"CUDA_VISIBLE_DEVICES": f"{gpu},{gpu}"}
    with serving(directory, tmp_path / "two", *flags, *memory, env=twice) as two, ThreadPoolExecutor(STREAMS) as pool:
        assert list(pool.map(two.ask, asked)) == wanted
        assert two.metric("forebay:pd_handed_total") == STREAMS
        assert two.metric("forebay:copies_failed_total") == 0
