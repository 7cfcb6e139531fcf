"""The benchmark of encrypted connections: the measured configurations, and how tokens and time are counted."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.load import Workload
from benchmarks.records import Results, Run
from benchmarks.servers import Setting
from benchmarks.studies import tls


def test_only_one_side_is_encrypted_and_the_others_differ_in_who_writes() -> None:
    setting = Setting(model="tiny", streams=2)
    flags = {side.name: side.command(setting, 1) for side in tls.SIDES}
    assert [name for name, command in flags.items() if "--ssl-certfile" in command] == [tls.TLS]
    assert [name for name, command in flags.items() if "tasks" in command] == [tls.TASKS]
    certificate = flags[tls.TLS][flags[tls.TLS].index("--ssl-certfile") + 1]
    assert Path(certificate).is_file()


def test_time_is_that_of_the_process() -> None:
    before = tls.cpu_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert tls.cpu_seconds(os.getpid()) >= before + 0.03


def test_the_table_has_ratios_of_rounds() -> None:
    found = Results("tls")
    setting = Setting(model="tiny", streams=tls.STREAMS)
    name = Workload(str(tls.STREAMS), setting, 1, 1, 1).name
    for number, times in enumerate([(3.0, 2.0, 4.0), (2.0, 1.0, 3.0)], 1):
        for side, value in zip(tls.SIDES, times, strict=True):
            found.runs.append(Run(name, side.name, number, {tls.KEY: value}))
    assert tls.table(found).splitlines()[2:] == [
        "| direct | 2.50 | 1.75 (1.50-2.00) |",
        "| tasks | 1.50 | 1.00 |",
        "| tls | 3.50 | 2.50 (2.00-3.00) |",
    ]
