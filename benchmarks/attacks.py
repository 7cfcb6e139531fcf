"""The effect of a hostile client on others: the largest gap of a stream, a short chat and /health, during each attack.

    python -m benchmarks.attacks --rounds 5

The device is simulated, and its every step takes 5 ms. A client with its own key streams an answer, sends a short chat
four times a second and asks for /health twenty times a second. Another client attacks (`benchmarks.hostile`). Each
round has the same minutes without the attack, in a fresh process too. Attacks on a start (files) are tests, judged by
exit status, message and bytes.

The watching client is a separate process. On a machine with few cores, the attacker also takes CPU time from the
server, so its threads get a low priority, as if it were on another machine.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import compare, images, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.hostile import ATTACKS, Attack, Client
from benchmarks.intake import stand_back
from benchmarks.load import LOGS
from benchmarks.processes import Running, ServerError, below, free_port, processes
from benchmarks.records import Results, Run
from benchmarks.servers import SERVED_NAME, STEPS_OF_5_MS, Forebay, Setting

OURS, THEIRS = "innocent", "hostile"
"""Keys of the watching and of the attacking client."""
ATTACKED, UNDISTURBED = "attacked", "undisturbed"
TOKENS = 3000
"""Tokens of the watched stream: 15 seconds of steps."""
QUIET_SECONDS = 4.0
"""Seconds of watching without an attack."""
LEAST_SECONDS = 4.0
"""The shortest time of watching during an attack, in seconds."""
CHAT_EVERY_SECONDS = 0.25
HEALTH_EVERY_SECONDS = 0.05
PATIENCE_SECONDS = 120.0
GOAL = 3.0
"""The largest permitted ratio of a gap during an attack to one without an attack."""


@dataclass
class Watched:
    """The times that the watching client measured, in milliseconds."""

    gaps: list[float]
    chats: list[float]
    healths: list[float]
    failures: int = 0


def _json(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> int:
    """Sends a request of the watching client; returns its status, or 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {OURS}"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), head)
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return response.status
    finally:
        connection.close()


def _chat(stream: bool, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Count."}]
    return {"model": SERVED_NAME, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


def _stream(port: int, gaps: list[float], over: threading.Event, found: Watched) -> None:
    """Records the gaps between the events of streams, one stream after the other, until `over` is set."""
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {OURS}"}
    while not over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(_chat(True, TOKENS)), head)
            response = connection.getresponse()
            if response.status != 200:
                found.failures += 1
                over.wait(CHAT_EVERY_SECONDS)
                continue
            last = None
            while not over.is_set() and (line := response.readline()):
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(1e3 * (now - last))
                    last = now
            # A gap that is still open at the end counts too.
            if last is not None and over.is_set():
                gaps.append(1e3 * (time.monotonic() - last))
        except (OSError, http.client.HTTPException):
            found.failures += 1
            over.wait(CHAT_EVERY_SECONDS)
        finally:
            connection.close()


def _ask(every: float, times: list[float], over: threading.Event, found: Watched, *request: Any) -> None:
    """Sends a request at this interval, and records its milliseconds."""
    while not over.wait(every):
        began = time.monotonic()
        if _json(*request) != 200:
            found.failures += 1
        times.append(1e3 * (time.monotonic() - began))


def _watch(port: int, pipe: Connection) -> None:
    """The watching process: watches from the first message to the second, and then sends its results."""
    found, over = Watched([], [], []), threading.Event()
    work = [
        threading.Thread(target=_stream, args=(port, found.gaps, over, found)),
        threading.Thread(
            target=_ask,
            args=(CHAT_EVERY_SECONDS, found.chats, over, found, port, "POST", "/v1/chat/completions", _chat(False, 4)),
        ),
        threading.Thread(target=_ask, args=(HEALTH_EVERY_SECONDS, found.healths, over, found, port, "GET", "/health")),
    ]
    for thread in work:
        thread.start()
    while not found.gaps:
        time.sleep(0.01)
    pipe.send("watching")
    pipe.recv()
    over.set()
    for thread in work:
        thread.join()
    pipe.send(found)


def server(attack: Attack) -> tuple[Forebay, Setting]:
    """The attacked server: default flags, two keys, and the simulated device."""
    flags = ("--api-key", OURS, "--api-key", THEIRS, *attack.flags)
    setting = Setting(model=attack.model, streams=256, context=attack.context)
    return Forebay("attacked", "forebay-chat", flags=flags, profile=STEPS_OF_5_MS), setting


def resident_mib(pid: int) -> float:
    """The largest resident size so far, in MiB, of the process `pid` and its descendants."""
    total = 0
    for stat in below(pid, processes()):
        try:
            with open(f"/proc/{stat.pid}/status", encoding="utf-8") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))
        except OSError:
            continue
    return total / 1024


def once(attack: Attack, attacked: bool) -> dict[str, Any]:
    """Runs one measurement. Raises ServerError."""
    target, setting = server(attack)
    port = free_port()
    log = LOGS / "attacked.log"
    spawn = get_context("spawn")
    with Running.ready(target.command(setting, port), target.environment(setting), port, log, 120.0) as running:
        pipe, theirs = spawn.Pipe()
        watcher = spawn.Process(target=_watch, args=(port, theirs), daemon=True)
        watcher.start()
        try:
            if not pipe.poll(PATIENCE_SECONDS):
                raise ServerError(f"{attack.name}: nothing was streamed")
            pipe.recv()
            statuses, began = [], time.monotonic()
            if attacked:
                with ThreadPoolExecutor(1, initializer=stand_back) as attacker:
                    statuses = attacker.submit(attack.send, Client(port, THEIRS)).result()
            least = LEAST_SECONDS if attacked else QUIET_SECONDS
            time.sleep(max(0.0, least - (time.monotonic() - began)))
            pipe.send("enough")
            if not pipe.poll(2 * PATIENCE_SECONDS):
                raise ServerError(f"{attack.name}: the watching client got no answers")
            found: Watched = pipe.recv()
        finally:
            watcher.kill()
            watcher.join()
        return {
            "max_gap_ms": max(found.gaps),
            "max_chat_ms": max(found.chats, default=None),
            "max_health_ms": max(found.healths, default=None),
            "failures": found.failures,
            "resident_mib": resident_mib(running.pid),
            "statuses": sorted(set(statuses)),
            "seconds": time.monotonic() - began,
        }


@table_of("attacks")
def table(found: Results) -> str:
    """Latencies of the watching client during each attack, and their ratios to those without one."""
    head = ["attack", "answered", "largest gap ms", "by undisturbed", "largest /health ms", "by undisturbed"]
    head += ["slowest chat ms", "by undisturbed", "failures of others", "memory MiB", "undisturbed"]
    rows = []
    for workload in found.workloads():
        runs = [run for run in found.runs if (run.workload, run.server) == (workload, ATTACKED)]
        answered = sorted({status for run in runs for status in run.values["statuses"]})
        row = [workload, ", ".join(str(status) for status in answered) or "-"]
        for key in ("max_gap_ms", "max_health_ms", "max_chat_ms"):
            row.append(number(found.median(workload, ATTACKED, key)))
            row.append(spread(found.ratio(workload, ATTACKED, UNDISTURBED, key)))
        row.append(number(found.median(workload, ATTACKED, "failures")))
        row += [number(found.median(workload, server, "resident_mib")) for server in (ATTACKED, UNDISTURBED)]
        rows.append(row)
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("What a hostile client does to others.", rounds=5)
    flags.add_argument("--only", default="", help="attacks whose name has this text")
    chosen = flags.parse_args()
    found = records.new("attacks", chosen.rounds)
    models.build(force=False)
    images.build()
    attacks = [attack for attack in ATTACKS if chosen.only in attack.name]
    for attack in attacks:
        for number_of_round in range(1, chosen.rounds + 1):
            for kind in (UNDISTURBED, ATTACKED):
                try:
                    values = once(attack, kind == ATTACKED)
                except ServerError as error:
                    compare.leave_out(found, f"{attack.name}: {kind}", error)
                    continue
                found.runs.append(Run(attack.name, kind, number_of_round, values))
                compare.say(f"round {number_of_round} {attack.name}, {kind}: {json.dumps(values)}")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
