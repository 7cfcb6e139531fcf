"""Dockerfiles and the compose file, checked without Docker."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.binary import ROOT
from tests.deploy.tools import DEPLOY, run, unknown_flags
from tests.structure.make import targets
from tests.structure.repository import files

DOCKER = DEPLOY / "docker"
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
DRAIN_SECONDS = 30


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, with its continued lines joined."""

    word: str
    rest: str

    def list(self) -> list[str]:
        """The rest of the instruction as a JSON array."""
        found: list[str] = json.loads(self.rest)
        return found


def instructions(name: str) -> list[Instruction]:
    lines = (DOCKER / name).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [Instruction(*line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


def last_stage(name: str) -> list[Instruction]:
    found = instructions(name)
    start = max(i for i, instruction in enumerate(found) if instruction.word == "FROM")
    return found[start:]


def of(found: list[Instruction], word: str) -> list[Instruction]:
    return [instruction for instruction in found if instruction.word == word]


def context() -> set[Path]:
    """The files of the checkout that .dockerignore allows in a build."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line.strip() for line in patterns if line.strip() and not line.startswith("#")]

    def matches(path: Path, pattern: str) -> bool:
        below = [path, *path.parents][:-1]
        if pattern.startswith("**/"):
            return any(fnmatch.fnmatch(part, pattern[3:]) for part in path.parts)
        return any(fnmatch.fnmatchcase(str(part), pattern) for part in below)

    kept = set()
    for path in files():
        ignored = False
        for rule in rules:
            if matches(path, rule.lstrip("!")):
                ignored = not rule.startswith("!")
        if not ignored:
            kept.add(path)
    return kept


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    run("hadolint", DOCKER / name)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_base_images_are_pinned(name: str) -> None:
    stages: set[str] = set()
    for instruction in of(instructions(name), "FROM"):
        image, *alias = re.split(r"\s+AS\s+", instruction.rest)
        assert image in stages or re.fullmatch(r"[\w./-]+:\d[\w.-]+", image), image
        stages |= set(alias)


def test_both_images_are_built_of_the_same_bases() -> None:
    bases = [[found.rest for found in of(instructions(name), "FROM")] for name in DOCKERFILES]
    assert bases[0] == bases[1]
    rust = re.search(r"rust:(\d+)\.(\d+)-", bases[0][0])
    least = re.search(r'rust-version = "(\d+)\.(\d+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    assert rust
    assert least
    assert tuple(map(int, rust.groups())) >= tuple(map(int, least.groups()))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_there(name: str) -> None:
    known = context()
    for instruction in of(instructions(name), "COPY"):
        words = shlex.split(instruction.rest)
        if not any(word.startswith("--from=") for word in words):
            for source in words[:-1]:
                inside = source == "." or any(path.is_relative_to(source) for path in known)
                assert inside, f"{source} is not in the build's context"


def test_the_page_is_in_the_context() -> None:
    """crates/webui/build.rs packs the page, and no manifest lists it."""
    page = {path for path in files() if path.is_relative_to("web/dist")}
    assert page
    assert page <= context()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_builds_run_targets_of_the_makefile(name: str) -> None:
    text = " ".join(instruction.rest for instruction in of(instructions(name), "RUN"))
    assert re.findall(r"\bmake (\S+)", text) == ["wheel"]
    assert "wheel" in targets()


def test_the_context_has_what_the_wheel_is_built_of(tmp_path: Path) -> None:
    known = context()
    assert not [path for path in known if path.parts[0] in {"tests", "docs", ".git", "deploy"}]
    for path in known:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    # All files that the workspace's manifests name exist. pyproject.toml names the files for maturin.
    command = ["cargo", "metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packages = json.loads(done.stdout)["packages"]
    assert len(packages) == len(list((ROOT / "crates").glob("*/Cargo.toml")))
    assert all(Path(target["src_path"]).is_file() for package in packages for target in package["targets"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("README.md", "LICENSE", "crates/forebay/Cargo.toml", "python/forebay/__init__.py"):
        assert name.split("/forebay/__init__")[0] in project
        assert (tmp_path / name).is_file()
    done = subprocess.run(["make", "-n", "wheel"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for script in re.findall(r"(?:scripts|requirements)/[\w.]+", done.stdout):
        assert (tmp_path / script).is_file(), script
    assert "torch" not in done.stdout
    assert "runtime.txt" not in done.stdout


def test_what_is_compiled_includes_nothing_from_outside() -> None:
    known = context()
    for path in known:
        if path.suffix == ".rs" and "tests" not in path.parts:
            for name in re.findall(r'include_(?:str|bytes)!\(\s*"([^"]+)"', (ROOT / path).read_text(encoding="utf-8")):
                target = (ROOT / path.parent / name).resolve().relative_to(ROOT)
                assert target in known, f"{path} includes {target}"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_servers_are_no_root_and_keep_what_they_download(name: str) -> None:
    final = last_stage(name)
    (user,) = of(final, "USER")
    assert int(user.rest.split(":")[0]) > 0
    (volume,) = of(final, "VOLUME")
    environment = " ".join(found.rest for found in of(final, "ENV"))
    caches = re.findall(r"(?:FOREBAY_CACHE|HF_HOME|TRITON_CACHE_DIR)=(\S+)", environment)
    assert caches
    assert all(path.startswith(volume.rest + "/") for path in caches)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_entry_point_serves_with_flags_that_are_there(name: str) -> None:
    final = last_stage(name)
    entry, command = of(final, "ENTRYPOINT")[0].list(), of(final, "CMD")[0].list()
    assert entry[:2] == ["forebay", "serve"]
    assert unknown_flags("serve", entry + command) == []
    ports = {entry[entry.index(flag) + 1] for flag in ("--port", "--health-port")}
    assert set(of(final, "EXPOSE")[0].rest.split()) == ports
    assert of(final, "STOPSIGNAL")[0].rest == "SIGTERM"
    health = of(final, "HEALTHCHECK")[0].rest
    assert f"http://127.0.0.1:{entry[entry.index('--health-port') + 1]}/health" in health
    probe = json.loads(health[health.index("[") :])
    # The probe is a Python program, so it must compile.
    compile(probe[2], "probe", "exec")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_no_memory_is_shared_with_the_host(name: str) -> None:
    lines = [line for line in (DOCKER / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert not [line for line in lines if "ipc" in line or "shm" in line]


def test_compose_asks_for_nothing_of_the_host() -> None:
    for name, service in COMPOSE["services"].items():
        assert not {"ipc", "shm_size", "privileged", "network_mode", "pid"} & service.keys(), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the network"


def test_compose_passes_flags_that_are_there() -> None:
    server, router = COMPOSE["services"]["forebay"], COMPOSE["services"]["router"]
    assert unknown_flags("serve", server["command"]) == []
    assert router["entrypoint"] == ["forebay", "route"]
    assert unknown_flags("route", router["command"]) == []
    assert "--backends-dns=forebay:8000" in router["command"]


def test_compose_passes_keys_on_only_where_they_are_set() -> None:
    """A name without a value takes the shell's value, if any. An empty key would end the program at its start."""
    for name in ("forebay", "router"):
        environment = COMPOSE["services"][name]["environment"]
        assert {"FOREBAY_API_KEY", "FOREBAY_ROUTER_KEY"} <= set(environment)
        assert not [entry for entry in environment if "=" in entry]


def test_compose_waits_for_drains() -> None:
    for name in ("forebay", "router"):
        service = COMPOSE["services"][name]
        words = [word for item in service["command"] for word in item.split("=")]
        drain = int(words[words.index("--drain-timeout") + 1])
        assert drain == DRAIN_SECONDS
        assert service["stop_grace_period"] == f"{drain + 10}s"


def test_compose_mounts_what_is_there() -> None:
    volumes = set(COMPOSE["volumes"])
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in volumes or (DOCKER / source).resolve().exists(), source
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_compose_pins_its_images() -> None:
    images = {service["image"] for service in COMPOSE["services"].values() if "build" not in service}
    for image in images - {COMPOSE["services"]["forebay"]["image"]}:
        assert re.search(r":v?\d+\.\d+\.\d+$", image), image
