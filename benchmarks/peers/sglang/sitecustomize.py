"""Lets SGLang run on a CPU without its kernels, which PyPI has for GPUs only.

Python imports this module by itself where its folder is on PYTHONPATH. It answers every import from the package
`sgl_kernel` with placeholders that may be passed around but not called. A dense Llama in bfloat16 with PyTorch's own
attention calls none of them on a processor without AMX, where SGLang computes with plain PyTorch. A model that does
call one fails with the kernel's name and not with a wrong answer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

PACKAGE = "sgl_kernel"


class MissingKernel:
    """A placeholder for a missing function or class."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is a kernel for GPUs")

    def __getattr__(self, name: str) -> MissingKernel:
        # Names with double underscores are looked up by Python itself.
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class MissingModule(ModuleType):
    """A module in which every name is a missing kernel."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # A path makes it a package, in which further modules are looked up.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class Finder(MetaPathFinder, Loader):
    """Finds the package and everything in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
