"""The library's server lives as long as the interpreter that started it, however that interpreter ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay import LLM, EngineDeadError, SamplingParams
from tests.e2e.models import Model
from tests.e2e.processes import alive, children, command_line
from tests.e2e.server import ROOT
from tests.e2e.test_llm import GREEDY, start
from tests.e2e.waiting import eventually

LONG = SamplingParams(max_tokens=None, ignore_eos=True)

HEAD = """
import os, sys
from forebay import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

def started():
    return LLM(sys.argv[1], dtype="float32", threads=1)

def answer(llm):
    return llm.generate([[5, 6, 7], [8, 9]], greedy, use_tqdm=False)

def said(*words):
    print(*words, flush=True)
"""
MAIN = """
if __name__ == "__main__":
    main()
"""


class Script:
    """A Python program that uses the library and prints lines as signals."""

    def __init__(self, folder: Path, model: Model, text: str) -> None:
        path = folder / "program.py"
        path.write_text(HEAD + text + MAIN)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TMPDIR": str(folder)}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, path, str(model.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> list[str]:
        """The words of the next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.error()
        return line.split()

    def error(self) -> str:
        """The program's standard error, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self) -> int:
        """Lets the program run to its end; returns the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

    def servers(self) -> list[int]:
        """The process ids of the servers that the program started."""
        return [pid for pid in children(self.process.pid) if "serve" in command_line(pid)]

    def folders(self) -> list[str]:
        """The library's entries in the folder for temporary files."""
        return [path.name for path in self.folder.glob("forebay-llm-*")]


@pytest.fixture
def script(tmp_path: Path, tiny: Model) -> Iterator[Callable[[str], Script]]:
    """Makes programs, which are killed when the test ends."""
    running: list[Script] = []

    def made(text: str) -> Script:
        running.append(Script(tmp_path, tiny, text))
        return running[-1]

    yield made
    for one in running:
        one.process.kill()
        one.process.wait()


def all_of(server: int) -> list[int]:
    """The process ids of a server and its hands."""
    hands = children(server)
    assert hands
    return [server, *hands]


def gone(pids: list[int]) -> None:
    eventually(lambda: not any(map(alive, pids)), "server and hands have ended")


ENDS = {
    "returns": "",
    "closes": "    llm.close()",
    "raises": "    raise SystemExit(3)",
    "is busy": "    import threading; threading.Thread(target=answer, args=[llm], daemon=True).start()",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_server_ends_with_the_program(script: Callable[[str], Script], end: str) -> None:
    program = script(f"def main():\n    llm = started(); answer(llm); said('ready'); sys.stdin.read()\n{ENDS[end]}\n")
    program.line()
    (server,) = program.servers()
    pids = all_of(server)
    assert program.end() == (3 if end == "raises" else 0), program.error()
    gone(pids)
    assert program.folders() == []
    assert program.error() == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_a_program_that_is_killed(script: Callable[[str], Script], number: signal.Signals) -> None:
    """Also in the middle of a long answer, and while a forked child of the program keeps running."""
    program = script(
        "def main():\n    llm = started(); said(os.getpid())\n"
        "    if os.fork() == 0:\n        said(os.getpid()); sys.stdin.read(); os._exit(0)\n"
        "    llm.generate([[5, 6]] * 40, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)\n"
    )
    program.line()
    (server,) = program.servers()
    pids = all_of(server)
    fork = int(program.line()[0])
    program.process.send_signal(number)
    program.process.wait(60)
    gone(pids)
    assert alive(fork)


def test_a_server_outlives_the_thread_that_made_it(tiny: Model) -> None:
    """The parent-death signal follows the starting thread, so that thread's end must not end the server."""
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(start(tiny)))
    thread.start()
    thread.join()
    with made[0] as llm:
        assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert llm._server.is_alive()


def test_a_library_that_nobody_holds_ends_its_server(tiny: Model) -> None:
    llm = start(tiny)
    llm.generate("x", GREEDY, use_tqdm=False)
    pids = [pid for pid in children(os.getpid()) if llm._server.socket in command_line(pid)]
    assert len(pids) == 1
    del llm
    gc.collect()
    gone(pids)


def test_a_server_that_dies_ends_all_requests(tiny: Model) -> None:
    llm = start(tiny)
    (pid,) = [pid for pid in children(os.getpid()) if llm._server.socket in command_line(pid)]
    seen: list[int] = []

    class Killer:
        """Kills the server when the first request has ended."""

        def __init__(self, **options: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            if not seen:
                os.kill(pid, signal.SIGKILL)
            seen.append(1)

        def __enter__(self) -> Killer:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    params = [GREEDY, *[LONG] * 20]
    with pytest.raises(EngineDeadError, match="the server ended by signal 9") as caught:
        llm.generate([[5, 6, 7]] * 21, params, Killer)
    assert caught.value.outputs is not None
    assert len(caught.value.outputs) == len(seen) < 21
    with pytest.raises(EngineDeadError, match="signal 9"):
        llm.generate("x", GREEDY, use_tqdm=False)
    llm.close()


def test_an_interrupt_stops_the_requests(tiny: Model) -> None:
    with start(tiny) as llm:
        # A terminal interrupts a process group, so the server must be in another group than its program.
        (pid,) = [pid for pid in children(os.getpid()) if llm._server.socket in command_line(pid)]
        assert os.getpgid(pid) != os.getpgid(0)

        class Interrupt:
            def __init__(self, **options: object) -> None:
                pass

            def update(self, n: float | None = 1) -> None:
                raise KeyboardInterrupt

            def __enter__(self) -> Interrupt:
                return self

            def __exit__(self, *error: object) -> None:
                pass

        with contextlib.suppress(KeyboardInterrupt):
            llm.generate([[5, 6, 7]] * 21, [GREEDY, *[LONG] * 20], Interrupt)
            pytest.fail("nothing was interrupted")

        def requests() -> int:
            info = llm._background.ask(lambda client: client.ask("GET", "/server_info"))
            return int(info["internal_states"][0]["requests"])

        eventually(lambda: requests() == 0, "the server computes nothing")
        assert llm.generate("x", GREEDY, use_tqdm=False)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_use_the_server(script: Callable[[str], Script], method: str) -> None:
    """A child process gets the same answers from its parent's server, and does not end that server."""
    program = script(
        "def ids(llm):\n    return [output.outputs[0].token_ids for output in answer(llm)]\n"
        "def main():\n"
        "    import multiprocessing\n"
        "    llm = started(); own = ids(llm)\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    with context.Pool(2) as pool:\n"
        "        assert pool.map(ids, [llm] * 6) == [own] * 6\n"
        "    child = context.Process(target=ids, args=[llm]); child.start(); child.join()\n"
        "    assert child.exitcode == 0\n"
        "    assert ids(llm) == own\n"
        "    said('equal')\n"
    )
    assert program.line() == ["equal"]
    assert program.end() == 0


def test_a_fork_uses_and_leaves_what_it_inherits(script: Callable[[str], Script]) -> None:
    program = script(
        "def main():\n"
        "    llm = started(); own = answer(llm)[0].outputs\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        assert answer(llm)[0].outputs == own\n"
        "        sys.exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert os.path.exists(llm._server.socket)\n"
        "    assert answer(llm)[0].outputs == own\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        with started() as second:\n"
        "            assert answer(second)[0].outputs == own\n"
        "        llm.close()\n"
        "        sys.exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert os.path.exists(llm._server.socket)\n"
        "    assert answer(llm)[0].outputs == own\n"
        "    said('equal')\n"
    )
    assert program.line() == ["equal"]
    assert program.end() == 0
