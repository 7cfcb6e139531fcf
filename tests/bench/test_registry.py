"""Benchmarks by name: their commands, and the process that runs them."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import cells, compare, registry, tables
from benchmarks.registry import ROOT, Benchmark, UsageError, command_lines

MODULES = sorted(
    {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for row in registry.benchmarks().values()
        for line in row.commands
        if (path := registry.module_file(line))
    }
)


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM, because benchmarks set one when they read their flags."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("module", MODULES)
def test_variables_are_the_flags_of_the_module(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sigterm: None
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert ended.value.code == 0
    flags = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
    expected = {name for name in registry.VARIABLES if f"--{name.lower()}" in flags}
    assert registry.variables_of(f"python -m {module}") == expected


def test_every_benchmark_with_a_table_has_a_name() -> None:
    """A module that registers a table and is a command appears even without a row."""
    tables.registered()
    measuring = {
        table.__module__ for table in cells.TABLES.values() if not table.__module__.startswith("benchmarks.gpu")
    }
    # The command `gsm8k_reference` measures the results that this module prints.
    assert measuring - set(MODULES) == {"benchmarks.studies.gsm8k_results"}


def test_rows_have_one_name_each_and_a_line() -> None:
    names = [row.name for row in registry.ROWS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[A-Z`a-z].{20,}\.", row.about) for row in registry.benchmarks().values())


def test_the_page_has_the_list() -> None:
    page = tables.LIST.read_text(encoding="utf-8")
    assert page == tables.fill(page, {"list": registry.markdown()}), "python -m benchmarks.tables"
    assert registry.markdown() in page


def test_peers_are_what_make_installs() -> None:
    named = {peer for row in registry.ROWS for peer in row.peers.split()}
    assert named <= {path.stem for path in (ROOT / "benchmarks/requirements").glob("*.txt")}


def test_flags_go_to_the_one_module_behind_its_own() -> None:
    egress = registry.named("egress")
    assert command_lines(egress, ["--streams", "64,128", "ROUNDS=2"]) == [
        "python -m benchmarks.egress --rounds 2 --streams 64,128",
        "cargo bench --locked -p forebay-server --bench socket_writes",
    ]
    assert command_lines(registry.named("coder"), ["PEERS=vllm llama"])[0].endswith(
        "--prefill-concurrency 1 --peers 'vllm llama'"
    )


def test_several_modules_take_what_they_share() -> None:
    servers = registry.named("servers")
    asked = ["python -m benchmarks.host_ceiling --rounds 1 --streams 64", "python -m benchmarks.cpu_model --rounds 1"]
    assert command_lines(servers, ["--rounds", "1", "--streams=64"]) == asked
    assert command_lines(servers, ["ROUNDS=1", "STREAMS=64", "TEXT=", "TRACE=x"]) == asked
    for words, message in [
        (["--model", "x"], "servers runs several modules, and --model is for one of them"),
        (["--text", "x"], "servers takes no --text"),
        (["--rounds"], "--rounds needs a value"),
        (["ROUND=1"], "ROUND is no variable of a benchmark"),
    ]:
        with pytest.raises(UsageError, match=message):
            command_lines(servers, words)


def test_a_module_without_a_row_is_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "benchmarks/studies").mkdir(parents=True)
    main = '\nif __name__ == "__main__":\n    pass\n'
    table = '"""What it measures.\n\nMore."""\n\n@table_of("two_words")\ndef table(): ...\n'
    (tmp_path / "benchmarks/two_words.py").write_text(table + main)
    (tmp_path / "benchmarks/table_alone.py").write_text(table)
    (tmp_path / "benchmarks/helper.py").write_text('"""No table."""\n' + main)
    (tmp_path / "benchmarks/studies/asked.py").write_text('"""A study."""\n' + main)
    assert registry.benchmarks(tmp_path, []) == {
        "asked": Benchmark("asked", None, ("python -m benchmarks.studies.asked",), about="A study."),
        "two-words": Benchmark("two-words", None, ("python -m benchmarks.two_words",), about="What it measures."),
    }
    line = "python -m benchmarks.two_words"
    assert set(registry.benchmarks(tmp_path, [Benchmark("other", 1, (line,))])) == {"other", "asked"}
    assert set(registry.benchmarks(tmp_path, [Benchmark("more", 1, (f"{line} --x 1",))])) == {
        "more",
        "two-words",
        "asked",
    }


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert re.search(r"^startup +15  From the command to the first token", capsys.readouterr().out, re.MULTILINE)
    assert command.main(["--needs", "first-minute"]) == 0
    assert command.main(["--dry-run", "micro", "ROUNDS=1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "bench-build wheel tarball",
        "cargo bench --locked -p forebay-scheduler -p forebay-kvcache -p forebay-engine",
        "python -m benchmarks.studies.micro --rounds 1",
    ]
    for words in (["no-such"], ["--rounds", "1"], ["--needs"]):
        assert command.main(words) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_command_gives_its_status() -> None:
    assert command.run('X=1 python -c \'import os; raise SystemExit(os.environ["X"] != "1")\'') == 0
    assert command.run("python -c 'raise SystemExit(7)'") == 7
    assert command.run("no-such-program") == 127
    assert command.run("python -c 'import os; os.kill(os.getpid(), 9)'") == 137


def test_what_ends_the_run_ends_the_command_first(tmp_path: Path) -> None:
    """A benchmark stops its servers on SIGTERM. So the run passes the signal on, and waits until the benchmark ends."""
    ended, child = tmp_path / "ended", tmp_path / "child.py"
    child.write_text(f"""
import pathlib, signal, sys
def end(number, frame):
    pathlib.Path({str(ended)!r}).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
signal.pause()
""")
    run = f"from benchmarks.__main__ import run; raise SystemExit(run('python {child}'))"
    with subprocess.Popen(
        [sys.executable, "-c", run], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "begun\n"
            process.terminate()
            assert process.wait(60) == 143
            assert ended.exists()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_peers_narrow_the_servers() -> None:
    flags = compare.parser("x", rounds=1)
    compare.add_servers(flags, ["forebay-sim", "forebay", "vllm", "llama"])
    assert flags.parse_args([]).servers == ["forebay-sim", "forebay", "vllm", "llama"]
    assert flags.parse_args(["--peers", "llama coder"]).servers == ["forebay-sim", "forebay", "llama"]
    assert flags.parse_args(["--servers", "forebay,vllm", "--peers", ""]).servers == ["forebay"]
    with pytest.raises(SystemExit):
        flags.parse_args(["--peers", "lama"])
