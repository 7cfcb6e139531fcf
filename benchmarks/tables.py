"""Tables of results, the sections of the pages in docs/performance that hold them, and the list of benchmarks.

    python -m benchmarks.tables          # puts results/*.json into docs/performance/*.md, the list into README.md
    python -m benchmarks.tables --check  # exits 1 if that would change it

A section lies between `<!-- bench:NAME -->` and `<!-- /bench -->`. The module of a benchmark registers its table with
`@table_of(NAME)` before the function.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from benchmarks import cells, records, registry
from benchmarks.cells import Table
from benchmarks.records import Results
from benchmarks.servers import ROOT

PAGES = ROOT / "docs/performance"
LIST = ROOT / "benchmarks/README.md"
"""The page with the list of benchmarks, whose section is named `list`."""
FOLDERS = ("benchmarks", "benchmarks/gpu", "benchmarks/studies")
"""The folders of modules with tables."""
_SECTION = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def registered() -> Mapping[str, Table]:
    """The tables of all benchmarks, by name: every module below FOLDERS is imported."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            import_module(f"{folder.replace('/', '.')}.{path.stem}")
    return cells.TABLES


def table(found: Results) -> str:
    """The table of a benchmark. A running benchmark has registered its own table, so nothing else is imported."""
    made = cells.TABLES.get(found.benchmark) or registered()[found.benchmark]
    return made(found)


def render(found: Results) -> str:
    """The table of a benchmark, followed by its machine, date and notes."""
    about = found.machine
    card = f"{about['gpu']}, " if "gpu" in about else ""
    processor = card + about["cpu"] + (" with AMX" if "amx_bf16" in about.get("features", ()) else "")
    lines = [table(found), ""]
    lines.append(
        f"{found.date}, {processor}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, torch {about['torch']}, Forebay {about['forebay']} ({about['commit']})."
    )
    if found.rounds:
        of = "One round" if found.rounds == 1 else f"Medians of {found.rounds} alternating rounds"
        lines[-1] += f" {of}; ratios are of the same round (least-most)."
    lines += [f"{name}: {note}." for name, note in found.notes.items()]
    lines += [f"Left out: {name} ({reason})." for name, reason in found.skipped.items()]
    return "\n".join(lines)


def fill(document: str, rendered: dict[str, str]) -> str:
    """The document with new tables in all sections that have results."""

    def section(match: re.Match[str]) -> str:
        text = rendered.get(match["name"])
        return match[0] if text is None else f"{match[1]}{text}\n{match[3]}"

    return _SECTION.sub(section, document)


def committed(folder: Path) -> dict[str, str]:
    """The rendered table of every benchmark that has a file of results."""
    return {name: render(records.read(path)) for name in registered() if (path := folder / f"{name}.json").is_file()}


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="Put the committed results into docs/performance.")
    flags.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    check: bool = flags.parse_args().check
    rendered = {**committed(records.RESULTS), "list": registry.markdown()}
    for page in [LIST, *sorted(PAGES.glob("*.md"))]:
        before = page.read_text(encoding="utf-8")
        after = fill(before, rendered)
        if check and after != before:
            name = page.relative_to(ROOT)
            raise SystemExit(f"{name} is not what the benchmarks and their results say: python -m benchmarks.tables")
        page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
