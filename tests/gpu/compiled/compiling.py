"""Has Triton compile launches for a GPU that is not there, on the way that a GPU's own launches go."""

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
    """Bytes: what registers do not hold is spilled there."""
    local: int
    shared: int
    warps: int
    ptx: str

    @classmethod
    def of(cls, name: str, kernel: Any, folder: Path) -> Compiled:
        """What the tools say of a compiled kernel."""
        binary = folder / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        said = subprocess.run([_TOOL, "-res-usage", binary], check=True, capture_output=True, text=True).stdout
        found = _USAGE.search(said)
        assert found, said
        registers, stack, local = map(int, found.groups())
        return cls(name, registers, stack, local, kernel.metadata.shared, kernel.metadata.num_warps, kernel.asm["ptx"])

    @property
    def together(self) -> int:
        """Programs that a processor of a Hopper holds at a time, by their registers, shared memory and warps."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        return min((64 << 10) // registers, (228 << 10) // (self.shared + 1024), 64 // self.warps, 32)


class Absent:
    """A driver of a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Kernels are kept by device: an architecture is one.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiler:
    """Keeps what was compiled, by the kernel that Triton keeps."""

    folder: Path
    _known: dict[int, Compiled] = field(default_factory=dict)
    _kernels: list[Any] = field(default_factory=list)

    @classmethod
    @contextmanager
    def begin(cls, folder: Path) -> Iterator[Compiler]:
        """With an empty cache in a folder; nothing that an earlier run has left says anything."""
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(folder)
            yield cls(folder)

    def compile(self, arch: int, operators: Callable[[], object]) -> list[Compiled]:
        """Every variant that operators on tensors of the device `meta` would launch on a GPU."""
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
            # Kept, so that no other gets the same id.
            self._kernels.append(kernel)
            self._known[id(kernel)] = Compiled.of(name, kernel, self.folder)
        return self._known[id(kernel)]


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
