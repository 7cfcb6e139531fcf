"""Makes Triton compile launches for a GPU that the machine lacks, in the same way as a GPU's own launches."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel."""

    name: str
    registers: int
    stack: int
    """Bytes of the stack, to which registers are spilled."""
    local: int
    shared: int
    warps: int
    ptx: str

    @classmethod
    def of(cls, name: str, kernel: Any, folder: Path) -> Compiled:
        """The resources of a compiled kernel, as CUDA's tool reports them."""
        binary = folder / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        said = subprocess.run([_TOOL, "-res-usage", binary], check=True, capture_output=True, text=True).stdout
        found = _USAGE.search(said)
        assert found, said
        registers, stack, local = map(int, found.groups())
        return cls(name, registers, stack, local, kernel.metadata.shared, kernel.metadata.num_warps, kernel.asm["ptx"])

    @property
    def together(self) -> int:
        """How many programs a Hopper's multiprocessor holds at once, by their registers, shared memory and warps."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        return min((64 << 10) // registers, (228 << 10) // (self.shared + 1024), 64 // self.warps, 32)


class Absent:
    """A driver of a GPU that the machine lacks."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps kernels by device, so each architecture is a device.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiler:
    """Keeps the report on each kernel that Triton has compiled."""

    folder: Path
    _known: dict[int, Compiled] = field(default_factory=dict)
    _kernels: list[Any] = field(default_factory=list)

    @classmethod
    @contextmanager
    def begin(cls, folder: Path) -> Iterator[Compiler]:
        """Uses an empty cache in a folder, so that no result of an earlier run counts."""
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(folder)
            yield cls(folder)

    def compile(self, arch: int, operators: Callable[[], object]) -> list[Compiled]:
        """Compiles every variant that operators on `meta` tensors would launch on a GPU."""
        found: dict[int, Compiled] = {}

        def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                compiled = kernel.run(*args, grid=grid, warmup=True, **options)
                found[id(compiled)] = self._look(kernel.__name__, compiled)

            return launch

        with patch.object(JITFunction, "__getitem__", getitem), patch.object(driver, "_active", Absent(arch)):
            operators()
        return list(found.values())

    def _look(self, name: str, kernel: Any) -> Compiled:
        if id(kernel) not in self._known:
            # The kernel is kept, so that no other one gets its id.
            self._kernels.append(kernel)
            self._known[id(kernel)] = Compiled.of(name, kernel, self.folder)
        return self._known[id(kernel)]


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
