"""Servers and models for the end-to-end tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tests.e2e.models import Model, SmolLM2, TinyImageModel, TinyModel
from tests.e2e.server import BINARY, CACHE, RUNNING, Server

FLAGS = ("--dtype", "float32", "--log-interval", "0")


class Serve(Protocol):
    """Starts servers that are killed when the fixture ends."""

    def __call__(self, model: Model, *flags: str, healthy: bool = True) -> Server: ...


class Models(Protocol):
    """Makes each model once."""

    def __call__(self, name: str) -> Model: ...


@pytest.fixture(scope="session", autouse=True)
def _set_up() -> None:
    assert BINARY.is_file(), "run `make build-tests` first"
    # Child processes inherit ignored signals: started under `nohup`, no program would end by SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # One token at a time gains nothing from a second thread, and is much slower when other programs run.
    torch.set_num_threads(1)
    # Tell the library where the binary is.
    os.environ["FOREBAY_BINARY"] = str(BINARY)
    os.environ.setdefault("FOREBAY_CACHE", str(CACHE))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny families of `tests.e2e.models`, with `qwen2` in shards, and `smollm2`."""
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            if name == "smollm2":
                made[name] = SmolLM2()
            else:
                directory = tmp_path_factory.mktemp("models") / f"tiny-{name}"
                sees = name.endswith("-vl")
                made[name] = (
                    TinyImageModel(name, directory) if sees else TinyModel(name, directory, sharded=name == "qwen2")
                )
        return made[name]

    return model


@pytest.fixture(scope="session")
def tiny(models: Models) -> Model:
    """The tiny Llama."""
    return models("llama")


def server_factory(folder: Path, stack: ExitStack) -> Serve:
    """Starts servers that log into `folder` and are killed when `stack` is closed."""

    def serve(model: Model, *flags: str, healthy: bool = True) -> Server:
        threads = ("--threads", str(model.threads))
        server = Server(model.path, *FLAGS, *threads, *flags, log=folder / f"server-{len(list(folder.iterdir()))}.log")
        stack.callback(server.kill)
        if healthy:
            server.wait_for_health()
        return server

    return serve


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers for one test. They compute in float32 unless a flag says otherwise."""
    with ExitStack() as stack:
        yield server_factory(tmp_path, stack)


@pytest.fixture(scope="module")
def serve_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers that the tests of a module share."""
    with ExitStack() as stack:
        yield server_factory(tmp_path_factory.mktemp("logs"), stack)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of the running servers to the report of a failure."""
    report: Any = yield
    if report.failed:
        report.sections += [(f"log of {server.url}", server.log()) for server in RUNNING]
    return report
