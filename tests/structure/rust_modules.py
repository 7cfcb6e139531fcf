"""The files of a Rust crate, and which file uses names that another file defines.

The text is read, not compiled. So names made by macros and method calls on values are not found.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.structure.repository import rust_code

Names = tuple[str, ...]
"""The segments of a Rust path, or of a module's path below the crate's root."""

_MODULE_OF_TESTS = re.compile(
    r"#\[cfg\((?:test|all\(test[^\]]*)\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*([;{])"
)
_MODULE = re.compile(r"^\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;", re.MULTILINE)
_ITEM = re.compile(r"\b(?:(?:fn|struct|enum|union|trait|type|const|static|mod)\s+(?:mut\s+)?|macro_rules!\s*)(\w+)")
_USE = re.compile(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);")
_PATH = re.compile(r"(?<![\w:])(?:\w+\s*::\s*)+\w+")


@dataclass
class Module:
    """A file of a crate."""

    file: Path
    children: set[str] = field(default_factory=set)
    items: set[str] = field(default_factory=set)
    uses: dict[str, Names] = field(default_factory=dict)
    """The path that a `use` gives to each name."""
    globs: list[Names] = field(default_factory=list)
    paths: set[Names] = field(default_factory=set)
    """The paths in the code. Those in a `pub use` are left out, because they only re-export names."""


def without_tests(code: str) -> tuple[str, set[str]]:
    """`code` without its test modules, and the names of test modules that have their own files."""
    files = set()
    while found := _MODULE_OF_TESTS.search(code):
        end = found.end()
        if found[2] == ";":
            files.add(found[1])
        else:
            depth = 1
            while depth and end < len(code):
                depth += {"{": 1, "}": -1}.get(code[end], 0)
                end += 1
        code = code[: found.start()] + code[end:]
    return code, files


def leaves(tree: str, prefix: Names = ()) -> Iterator[tuple[Names, str]]:
    """Each path of a `use` tree, with the name that it brings into scope (`*` for `a::*`)."""
    depth, start, parts = 0, 0, []
    for at, char in enumerate(tree):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append(tree[start:at])
            start = at + 1
    for part in [*parts, tree[start:]]:
        head, brace, rest = part.partition("{")
        path, _, alias = (word.strip() for word in head.partition(" as "))
        names = (*prefix, *(name for name in re.split(r"\s*::\s*", path) if name))
        if brace:
            yield from leaves(rest.rpartition("}")[0], names)
        elif names:
            names = names[:-1] if names[-1] == "self" and len(names) > 1 else names
            yield names, alias or names[-1]


def read_module(file: Path, text: str) -> tuple[Module, set[str]]:
    """The module in `text`, and the names of its test modules that have their own files."""
    code, tests = without_tests(rust_code(text))
    module = Module(file)
    module.children = set(_MODULE.findall(code))
    for use in _USE.finditer(code):
        for path, name in leaves(use[2]):
            if name == "*":
                module.globs.append(path[:-1])
            elif name != path[0]:
                module.uses[name] = path
            if not use[1]:
                module.paths.add(path[:-1] if name == "*" else path)
    code = _USE.sub("", code)
    module.items = set(_ITEM.findall(code)) - module.children
    module.paths |= {tuple(re.split(r"\s*::\s*", found)) for found in _PATH.findall(code)}
    return module, tests


def modules(root: Path, texts: Mapping[Path, str]) -> dict[Names, Module]:
    """The modules of the crate with the root file `root`, by path. Test modules are left out."""
    found: dict[Names, Module] = {}

    def enter(place: Names, file: Path, folder: Path) -> None:
        found[place], tests = read_module(file, texts[file])
        for child in found[place].children - tests:
            for path in (folder / f"{child}.rs", folder / child / "mod.rs"):
                if path in texts:
                    enter((*place, child), path, folder / child)

    enter((), root, root.parent)
    return found


def defined(
    crate: Mapping[Names, Module], place: Names, path: Names, seen: frozenset[tuple[Names, Names]]
) -> Path | None:
    """The file that defines `path` as used in the module at `place`. None if another crate defines it."""
    if (place, path) in seen:
        return None
    seen |= {(place, path)}
    first = path[0]
    if first == "crate":
        return inside(crate, (), path[1:], seen)
    if first == "self":
        return inside(crate, place, path[1:], seen)
    if first == "super":
        return inside(crate, place[:-1], path[1:], seen) if place else None
    module = crate[place]
    if first in module.children or first in module.items or first in module.uses:
        return inside(crate, place, path, seen)
    return None


def inside(
    crate: Mapping[Names, Module], place: Names, path: Names, seen: frozenset[tuple[Names, Names]]
) -> Path | None:
    """The file that defines `path` as another module would name it, relative to the module at `place`."""
    module = crate.get(place)
    if module is None:
        return None
    if not path:
        return module.file
    first, rest = path[0], path[1:]
    if first == "super":
        return inside(crate, place[:-1], rest, seen)
    if (*place, first) in crate:
        return inside(crate, (*place, first), rest, seen)
    if first in module.items:
        return module.file
    if first in module.uses:
        return defined(crate, place, (*module.uses[first], *rest), seen)
    for glob in module.globs:
        if found := defined(crate, place, (*glob, *path), seen):
            return found
    return None


def arrows(crate: Mapping[Names, Module]) -> dict[Path, set[Path]]:
    """For each file of the crate, the files whose definitions it uses."""
    graph: dict[Path, set[Path]] = {}
    for place, module in crate.items():
        targets = {defined(crate, place, path, frozenset()) for path in module.paths}
        graph[module.file] = {target for target in targets if target} - {module.file}
    return graph


def circles(graph: Mapping[Path, set[Path]]) -> list[set[Path]]:
    """The largest sets of files that all reach each other, by Tarjan's algorithm."""
    order: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[set[Path]] = []

    def visit(file: Path) -> None:
        order[file] = lowest[file] = len(order)
        stack.append(file)
        for target in sorted(graph[file]):
            if target not in order:
                visit(target)
            if target in stack:
                lowest[file] = min(lowest[file], lowest[target])
        if lowest[file] == order[file]:
            at = stack.index(file)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for file in sorted(graph):
        if file not in order:
            visit(file)
    return found


def folder(file: Path, files: Iterable[Path]) -> Path:
    """The folder of a module. `a/mod.rs`, and `a.rs` beside `a/`, are in the folder `a`."""
    own = file.with_suffix("")
    return own if any(other.is_relative_to(own) for other in files) else file.parent
