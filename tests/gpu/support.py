"""What the tests of kernels share: pages that nobody may read, rows of a step, and mutated kernels."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from forebay.device.watch import NoWaits
from forebay.gpu import kernels, reference
from forebay.gpu.interface import Kernels, PagedRows

LAYERS = 2
"""Of a pool; the tests use the second."""


class Watched:
    """The reference operators, each of which may wait for no value."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(reference, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Outside of inference mode, some operators hide behind those that they are made of.
            with torch.inference_mode(), NoWaits():
                return operator(*args, **kwargs)

        return call


WATCHED: Kernels = cast(Kernels, Watched())
BOTH = pytest.mark.parametrize("operators", [kernels, WATCHED], ids=["triton", "reference"])


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory in which nothing is a number."""
    return torch.full(shape, torch.nan, dtype=dtype)


@dataclass(frozen=True)
class Paged:
    """Random histories of slots in pages of a pool whose other entries are no numbers."""

    histories: list[torch.Tensor]  # one a row: [positions, kv_heads, width]
    pool: torch.Tensor  # [entries, kv_heads, width]
    page_table: torch.Tensor  # int32 [slots, pages a slot]
    page_size: int
    page_stride: int
    null_page: int

    @classmethod
    def make(cls, ends: list[int], kv_heads: int, width: int, page_size: int, seed: int, dtype: torch.dtype) -> Paged:
        """Of rows that end at these positions; row i is in slot `len(ends) - 1 - i`."""
        generator = torch.Generator().manual_seed(seed)
        wide = -(-max(ends, default=1) // page_size) + 1
        count = wide * len(ends) + 3
        stride = LAYERS * page_size
        # A layer is a view into a pool whose pages are pieces of all layers.
        whole = nan(count + 1, LAYERS, page_size, kv_heads, width, dtype=dtype)
        pool = whole.view(-1, kv_heads, width)[page_size:]
        given = torch.randperm(count, generator=generator)[: wide * len(ends)].view(-1, wide).int()
        table = torch.full((len(ends) + 1, wide), -1, dtype=torch.int32)
        table[-1] = count
        # The null page is real memory: what is read there must not be seen, but it may be anything.
        whole[count] = 7.0
        histories = []
        for row, end in enumerate(ends):
            slot = len(ends) - 1 - row
            used = -(-end // page_size)
            table[slot, :used] = given[row, :used]
            history = torch.randn(end, kv_heads, width, generator=generator).to(dtype)
            positions = torch.arange(end)
            pool[table[slot].long()[positions // page_size] * stride + positions % page_size] = history
            histories.append(history)
        return cls(histories, pool, table, page_size, stride, count)

    def rows(self, lengths: list[int], padding: int = 0) -> PagedRows:
        """The rows as a step has them, with so many tokens each; padded rows have none."""
        ends = torch.tensor([len(history) for history in self.histories] + [0] * padding)
        slots = torch.tensor([*range(len(lengths) - 1, -1, -1), *[len(lengths)] * padding])
        first = torch.tensor([0, *lengths, *[0] * padding]).cumsum(0)
        return PagedRows(
            slots.int(), ends.int(), first.int(), self.page_table, self.page_size, self.page_stride, self.null_page
        )


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [heads, dim] on keys and values [positions, kv_heads, dim], in float64."""
    group = q.shape[0] // keys.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = keys[:, head // group].double() @ q[head].double() * scale
        out.append(scores.softmax(0) @ values[:, head // group].double())
    return torch.stack(out)


def mutant(module: str, old: str, new: str, folder: Path) -> ModuleType:
    """A module of `forebay.gpu.kernels` in which a piece of text, which it has once, is another."""
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
    # Dataclasses look their module up.
    sys.modules[path.stem] = loaded
    try:
        made.loader.exec_module(loaded)
    finally:
        del sys.modules[path.stem]
    return loaded


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Gives a mutant, and has the kernels `users` use its function `name` in place of the right one."""

    def make(module: str, old: str, new: str, name: str = "", users: tuple[str, ...] = ()) -> ModuleType:
        loaded = mutant(module, old, new, tmp_path)
        for user in users:
            monkeypatch.setattr(sys.modules[f"forebay.gpu.kernels.{user}"], name, getattr(loaded, name))
        return loaded

    return make


class Programs:
    """Counts programs that the interpreter runs."""

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
