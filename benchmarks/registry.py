"""The benchmarks by name: the commands of each, its minutes, and the make targets that it needs.

Every module that registers a table, and every study, is a benchmark by its file's name, without a row here. `ROWS` has
the data that modules do not state: minutes, other commands, make targets, and peers.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "benchmarks/studies")
VARIABLES = ("ROUNDS", "STREAMS", "TEXT", "PEERS", "TRACE", "MOONCAKE")
"""Variables of make. Each becomes a flag, `ROUNDS=3` for example `--rounds 3`, of the modules that have this flag."""
CODER, FEW = "--model qwen2.5-coder-0.5b", "--concurrency 1,8 --prefill-concurrency 1"


class UsageError(ValueError):
    """A command line that fits no benchmark. The message is for the user."""


@dataclass(frozen=True)
class Benchmark:
    """A name and its commands in order."""

    name: str
    minutes: int | None = None
    commands: tuple[str, ...] = ()
    """Commands as in a shell, with environment variables first. Empty: the module with the benchmark's name."""
    about: str = ""
    """A one-line summary. Empty: the first line of the first module's docstring."""
    needs: str = "bench-build"
    """The make targets that the benchmark needs."""
    peers: str = ""
    """The peers to compare with, if they are installed: `make bench-setup PEERS=...`."""


ROWS = (
    Benchmark(
        "servers",
        120,
        ("python -m benchmarks.host_ceiling", "python -m benchmarks.cpu_model"),
        about="The host ceiling, then SmolLM2-135M on the CPU, beside all installed peers.",
        peers="vllm vllm-rust sglang llama",
    ),
    Benchmark(
        "cpu",
        120,
        (
            "python -m benchmarks.cpu_model --rounds 5",
            "cargo run --locked --release -p forebay-kernels --example roofline",
        ),
        about="SmolLM2-135M on the CPU, and the machine's limits.",
        peers="vllm vllm-rust llama",
    ),
    Benchmark(
        "coder",
        30,
        (f"python -m benchmarks.cpu_model --rounds 1 {CODER} --servers 'forebay vllm llama' {FEW}",),
        about="A second real model on the CPU, Qwen2.5-Coder-0.5B.",
        peers="coder vllm llama",
    ),
    Benchmark("quantised", 60, peers="llama"),
    Benchmark(
        "quantised-coder",
        60,
        (f"python -m benchmarks.quantised --rounds 1 {CODER}",),
        about="GGUF files of Qwen2.5-Coder-0.5B in their own bits, beside llama.cpp's server.",
        peers="coder llama",
    ),
    Benchmark("experts", 10, peers="llama"),
    Benchmark("layers", 15, peers="gemma llama"),
    Benchmark("accuracy", 6),
    Benchmark("kv-cache", 15, peers="coder"),
    Benchmark("speculation", 30, peers="coder vllm llama"),
    Benchmark("lora", 6),
    Benchmark("batches", 5),
    Benchmark("models", 5, ("python -m benchmarks.fleet",), peers="coder llama"),
    Benchmark("startup", 15, peers="vllm llama"),
    Benchmark("first-minute", 20, needs="bench-build wheel tarball"),
    Benchmark("ablations", 15),
    Benchmark(
        "egress",
        10,
        ("python -m benchmarks.egress", "cargo bench --locked -p forebay-server --bench socket_writes"),
    ),
    Benchmark("llm", 2),
    Benchmark("profile", 1),
    Benchmark("agreement", 10, peers="vllm vllm-rust"),
    Benchmark(
        "embeddings",
        10,
        ("python -m benchmarks.embeddings", "python -m benchmarks.embedding_rate"),
        needs="bench-build setup-embedder",
        peers="vllm onnxruntime",
    ),
    Benchmark("attacks", 25),
    Benchmark("intake", 2),
    Benchmark("images", 3),
    Benchmark("image-peers", 15, peers="vllm"),
    Benchmark(
        "image-prepare",
        2,
        (
            "cargo build --locked --release --package forebay-vision --example prepare",
            "OMP_NUM_THREADS=1 python -m benchmarks.image_prepare",
        ),
        needs="setup-dev",
    ),
    Benchmark("masks", 2),
    Benchmark(
        "mask-times",
        1,
        (
            "cargo build --locked --release --package forebay-grammar --example masks",
            "python -m benchmarks.mask_times",
        ),
        needs="setup-dev",
    ),
    Benchmark("hand-host", 1, needs="setup-dev"),
    Benchmark(
        "fan-out",
        1,
        ("cargo build --locked --release --package forebay-hand --example fan_out", "python -m benchmarks.fan_out"),
        needs="setup-dev",
    ),
    Benchmark(
        "outposts",
        1,
        (
            "cargo build --locked --release --package forebay-outpost --example round_trip",
            "python -m benchmarks.outposts",
        ),
        needs="setup-dev",
    ),
    Benchmark("outpost-bursts", 3),
    Benchmark("router", 80, peers="sglang-router"),
    Benchmark("replicas", 40),
    Benchmark("pd", 15),
    Benchmark("pd-plan", 10),
    Benchmark("host-tier", 10),
    Benchmark("turns", 15, ("python -m benchmarks.turns", "python -m benchmarks.turns_cpu")),
    Benchmark("hisparse", 2),
    Benchmark("tool-calls", 3, peers="coder"),
    Benchmark("gsm8k-ranks", 15, peers="coder"),
    Benchmark(
        "micro",
        5,
        (
            "cargo bench --locked -p forebay-scheduler -p forebay-kvcache -p forebay-engine",
            "python -m benchmarks.studies.micro",
        ),
        needs="setup",
    ),
    Benchmark(
        "gpu",
        6,
        ("python scripts/gpu.py bench",),
        about="An NVIDIA GPU: its limits, operators, steps, a server. Elsewhere it says why not.",
        needs="setup",
    ),
    Benchmark(
        "gpu-peers",
        9,
        ("python scripts/gpu.py peers",),
        about="transformers, and vLLM where it is installed, on the same GPU.",
        needs="setup",
    ),
)


def benchmarks(root: Path = ROOT, rows: Sequence[Benchmark] = ROWS) -> dict[str, Benchmark]:
    """All benchmarks by name, those of `rows` first, with their commands and first lines filled in."""
    modules = {path.stem.replace("_", "-"): path for path in _modules(root)}
    found = {row.name: row for row in rows}
    # A row whose only command is the bare module renames the module's benchmark.
    bare = [row.commands[0] for row in rows if len(row.commands) == 1 and len(row.commands[0].split()) == 3]
    renamed = [module_file(command, root) for command in bare]
    more = [name for name, path in sorted(modules.items()) if name not in found and path not in renamed]
    found |= {name: Benchmark(name) for name in more}
    return {name: _filled(row, modules, root) for name, row in found.items()}


def named(name: str, root: Path = ROOT) -> Benchmark:
    """The benchmark of this name. Raises UsageError if there is none."""
    found = benchmarks(root)
    if name not in found:
        raise UsageError(f"no benchmark is called {name!r}: `python -m benchmarks` lists them")
    return found[name]


def module_file(command: str, root: Path = ROOT) -> Path | None:
    """The file of the module that a command runs; None if it runs no module."""
    found = re.search(r"\bpython -m (benchmarks[\w.]*)", command)
    return root / f"{found[1].replace('.', '/')}.py" if found else None


def variables_of(command: str, root: Path = ROOT) -> frozenset[str]:
    """The make variables whose flags the module has: `compare.parser` adds rounds, `add_servers` peers."""
    path = module_file(command, root)
    if path is None:
        return frozenset()
    source = path.read_text(encoding="utf-8")
    flags = set(re.findall(r'add_argument\(\s*"--(\w+)"', source))
    found = {name for name in VARIABLES if name.lower() in flags}
    found |= {"ROUNDS"} if "compare.parser(" in source else set()
    return frozenset(found | ({"PEERS"} if "add_servers(" in source else set()))


def command_lines(benchmark: Benchmark, words: Sequence[str], root: Path = ROOT) -> list[str]:
    """The commands with the user's words added: flags, and make variables as NAME=VALUE.

    If the benchmark has one module, all flags go to it, and it refuses unknown ones. Several modules take only flags
    that stand for variables. A variable that no module takes is left out, as make does. Raises UsageError.
    """
    given = {name: value for name, value in (_variable(word) for word in words) if value}
    flags = [word for word in words if not _is_variable(word)]
    takers = [command for command in benchmark.commands if _takes_flags(command)]
    if len(takers) > 1:
        stated = _shared(flags, benchmark)
        taken = frozenset[str]().union(*(variables_of(command, root) for command in takers))
        if unknown := [name for name in stated if name not in taken]:
            raise UsageError(f"{benchmark.name} takes no --{unknown[0].lower()}")
        given, flags = {**given, **stated}, []
    lines = []
    for command in benchmark.commands:
        more: list[str] = []
        for name in VARIABLES:
            if name in given and name in variables_of(command, root):
                more += [f"--{name.lower()}", given[name]]
        more += flags if _takes_flags(command) else []
        lines.append(" ".join([command, *(shlex.quote(word) for word in more)]))
    return lines


def listing(root: Path = ROOT) -> str:
    """A line for each benchmark: name, minutes and summary."""
    rows = benchmarks(root).values()
    width = max(len(row.name) for row in rows)
    return "\n".join(f"{row.name:{width}}  {row.minutes or '-':>4}  {row.about}" for row in rows)


def markdown(root: Path = ROOT) -> str:
    """The list as a table, with the make targets that each benchmark needs."""
    lines = ["| name | what | minutes | peers |", "|---|---|---:|---|"]
    for row in benchmarks(root).values():
        peers = f"`{row.peers}`" if row.peers else ""
        lines.append(f"| `{row.name}` | {row.about} | {row.minutes or '-'} | {peers} |")
    return "\n".join(lines)


def _modules(root: Path) -> list[Path]:
    """The modules that are benchmarks: those with a command and a table of their own, and studies."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            source = path.read_text(encoding="utf-8")
            measures = "\n@table_of(" in source or folder != FOLDERS[0]
            if measures and '\nif __name__ == "__main__":' in source:
                found.append(path)
    return found


def _filled(row: Benchmark, modules: dict[str, Path], root: Path) -> Benchmark:
    if not row.commands:
        path = modules[row.name].relative_to(root).with_suffix("")
        row = replace(row, commands=(f"python -m {'.'.join(path.parts)}",))
    return row if row.about else replace(row, about=_first_line(row.commands, root))


def _first_line(commands: Sequence[str], root: Path) -> str:
    path = next(path for command in commands if (path := module_file(command, root)))
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0]


def _takes_flags(command: str) -> bool:
    return any(word == "python" for word in command.split())


def _is_variable(word: str) -> bool:
    return re.match(r"[A-Z_]+=", word) is not None


def _variable(word: str) -> tuple[str, str]:
    """The name and value of a variable; two empty strings if the word is no variable."""
    if not _is_variable(word):
        return "", ""
    name, value = word.split("=", 1)
    if name not in VARIABLES:
        raise UsageError(f"{name} is no variable of a benchmark: there are {', '.join(VARIABLES)}")
    return name, value


def _shared(flags: Sequence[str], benchmark: Benchmark) -> dict[str, str]:
    """The flags of a benchmark of several modules, converted to variables."""
    found: dict[str, str] = {}
    rest = list(flags)
    while rest:
        flag, _, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").upper()
        if not flag.startswith("--") or name not in VARIABLES:
            raise UsageError(
                f"{benchmark.name} runs several modules, and {flag} is for one of them: {'; '.join(benchmark.commands)}"
            )
        if not value:
            if not rest:
                raise UsageError(f"{flag} needs a value")
            value = rest.pop(0)
        found[name] = value
    return found
