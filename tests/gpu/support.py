"""Both kinds of operators for tests in the interpreter, and mutated kernels."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from forebay.device.watch import NoWaits
from forebay.gpu import kernels, reference
from forebay.gpu.interface import Kernels


class Watched:
    """The reference operators, which fail if they wait for a value."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(reference, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Without inference mode, some operators are dispatched only as the smaller operators of which they consist.
            with torch.inference_mode(), NoWaits():
                return operator(*args, **kwargs)

        return call


WATCHED: Kernels = cast(Kernels, Watched())
BOTH = pytest.mark.parametrize("operators", [kernels, WATCHED], ids=["triton", "reference"])


def mutant(module: str, old: str, new: str, folder: Path) -> ModuleType:
    """A module of `forebay.gpu.kernels` in which a text that occurs once is replaced."""
    spec = importlib.util.find_spec(f"forebay.gpu.kernels.{module}")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    assert text.count(old) == 1, f"{module} has this {text.count(old)} times: {old}"
    path = folder / f"mutant_{module}.py"
    path.write_text(text.replace(old, new))
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made is not None
    assert made.loader is not None
    loaded = importlib.util.module_from_spec(made)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules[path.stem] = loaded
    try:
        made.loader.exec_module(loaded)
    finally:
        del sys.modules[path.stem]
    return loaded


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes a mutant. The kernels `users` use its function `name` instead of the right one."""

    def make(module: str, old: str, new: str, name: str = "", users: tuple[str, ...] = ()) -> ModuleType:
        loaded = mutant(module, old, new, tmp_path)
        for user in users:
            monkeypatch.setattr(sys.modules[f"forebay.gpu.kernels.{user}"], name, getattr(loaded, name))
        return loaded

    return make


class Programs:
    """Counts the programs that the interpreter runs."""

    def __init__(self) -> None:
        self.count = 0


def counted(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Counts programs from now on."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    programs = Programs()
    run = interpreter.GridExecutor.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        grid = self.grid(args) if callable(self.grid) else self.grid
        number = 1
        for size in grid:
            number *= size
        programs.count += number
        run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counting)
    return programs
