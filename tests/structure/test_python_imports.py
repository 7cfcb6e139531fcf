"""Imports between the parts of the Python package point one way."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read

SOURCE = "python"
# The packages that the modules of each package may import, besides their own.
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "device": set(),
    "gpu": {"protocol"},
    "attention": {"gpu"},
    "weights": {"device"},
    "distributed": {"protocol"},
    "layers": {"attention", "distributed", "weights"},
    "models": {"attention", "layers", "weights"},
    "state": {"attention", "device", "gpu", "protocol", "weights"},
    "compute": {
        "attention",
        "device",
        "distributed",
        "gpu",
        "layers",
        "models",
        "protocol",
        "state",
        "weights",
    },
    "runner": {"compute", "device", "distributed", "layers", "models", "protocol", "state", "weights"},
    "worker": {"device", "distributed", "protocol", "runner", "state", "weights"},
    "place": set(),
    "llm": set(),
}
# No module of the first package may reach a module of the second one, through any number of imports.
FORBIDDEN = [
    ("forebay.models", "forebay.worker"),
    ("forebay.models", "forebay.runner"),
    ("forebay.layers", "forebay.worker"),
    ("forebay.layers", "forebay.runner"),
    ("forebay.layers", "forebay.models"),
    ("forebay.weights", "forebay.models"),
    ("forebay.weights", "forebay.runner"),
    ("forebay.weights", "forebay.worker"),
    ("forebay.compute", "forebay.runner"),
    ("forebay.runner", "forebay.worker"),
]


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(text: str, module: str, is_package: bool) -> Iterator[str]:
    """The dotted names that `text` imports. A name may be a module, or an object in a module."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def resolve(name: str, modules: set[str]) -> str | None:
    """The module of Forebay that `name` is, or is in. Packages above it are imported too, but do not count."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def build_graph(texts: Mapping[Path, str]) -> dict[str, set[str]]:
    modules = {module_name(path) for path in texts}
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        module = module_name(path)
        names = imported_names(text, module, path.name == "__init__.py")
        graph[module] = {found for name in names if (found := resolve(name, modules))} - {module}
    return graph


@cache
def graph() -> dict[str, set[str]]:
    paths = [path for path in files() if path.suffix == ".py" and inside(path, [f"{SOURCE}/forebay"])]
    return build_graph({path: read(path) for path in paths})


def chain(edges: dict[str, set[str]], source: str, target: str) -> list[str]:
    """A shortest chain of imports from a module of `source` to a module of `target`, or an empty list."""
    queue = [[module] for module in sorted(edges) if belongs(module, source)]
    seen = {path[0] for path in queue}
    for path in queue:
        if belongs(path[-1], target):
            return path
        for following in sorted(edges[path[-1]] - seen):
            seen.add(following)
            queue.append([*path, following])
    return []


def package_of(module: str) -> str:
    """The folder of a module below `forebay`, or an empty text."""
    _, _, rest = module.partition(".")
    return rest.split(".")[0] if "." in rest or rest in ALLOWED else ""


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """A circle of imports that begins and ends with the same node, or an empty list."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for following in sorted(edges.get(path[-1], set())):
            if following in path:
                return [*path[path.index(following) :], following]
            if following not in done and (found := walk([*path, following])):
                return found
        done.add(path[-1])
        return []

    return next((found for start in sorted(edges) if start not in done and (found := walk([start]))), [])


def test_every_package_has_its_rule() -> None:
    packages = {package_of(module) for module in graph()} - {""}
    assert packages == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_what_is_below_it(package: str) -> None:
    found = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        if package_of(module) == package
        for target in sorted(targets)
        if package_of(target) not in {"", package, *ALLOWED[package]}
    ]
    assert not found


def test_packages_have_floors() -> None:
    assert not circle(ALLOWED)


def test_no_module_imports_itself_by_others() -> None:
    found = circle(graph())
    assert not found, " imports ".join(found)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize(("source", "target"), FORBIDDEN)
def test_arrows_point_down(source: str, target: str) -> None:
    found = chain(graph(), source, target)
    assert not found, " imports ".join(found)


def test_a_chain_is_found_through_any_form_of_import() -> None:
    edges = build_graph(
        {
            Path("python/forebay/__init__.py"): "",
            Path("python/forebay/models/__init__.py"): "",
            Path("python/forebay/models/llama.py"): "import torch\nfrom ..layers import norm",
            Path("python/forebay/layers/__init__.py"): "",
            Path("python/forebay/layers/norm.py"): "def f() -> None:\n    from forebay.worker.wire import Frame",
            Path("python/forebay/worker/__init__.py"): "",
            Path("python/forebay/worker/wire.py"): "from . import loop",
            Path("python/forebay/worker/loop.py"): "import forebay.runner",
            Path("python/forebay/runner/__init__.py"): "class Forward: ...",
        }
    )
    assert chain(edges, "forebay.models", "forebay.runner") == [
        "forebay.models.llama",
        "forebay.layers.norm",
        "forebay.worker.wire",
        "forebay.worker.loop",
        "forebay.runner",
    ]
    assert not chain(edges, "forebay.runner", "forebay.models")


def test_only_kernels_import_triton() -> None:
    """PyTorch for CPUs comes without Triton."""
    found = [
        module_name(path)
        for path in files()
        if path.suffix == ".py" and inside(path, [f"{SOURCE}/forebay"])
        if any(name.split(".")[0] == "triton" for name in imported_names(read(path), module_name(path), False))
    ]
    assert found
    assert all(belongs(module, "forebay.gpu.kernels") for module in found)


def test_a_hand_starts_without_triton() -> None:
    """A hand chooses its operators after it knows the device."""
    modules = "forebay.worker.loop, forebay.attention.triton, forebay.gpu.ops, forebay.gpu.reference"
    code = f"import sys, {modules}; sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "triton was imported"


def test_a_tokenizer_is_found_without_torch() -> None:
    code = "import sys, forebay.models.describe; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"
