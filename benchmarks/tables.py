"""Tables of results, and the sections of the pages in docs/performance that hold them.

    python -m benchmarks.tables          # puts benchmarks/results/*.json into docs/performance/*.md
    python -m benchmarks.tables --check  # exits 1 if that would change it

A section is what stands between `<!-- bench:NAME -->` and `<!-- /bench -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks import gsm8k_results, records
from benchmarks.cells import markdown, number, spread
from benchmarks.records import Results, median_of, paired_ratio
from benchmarks.servers import FOREBAY_CPU, FOREBAY_SIM, LLAMA, ROOT

PAGES = ROOT / "docs/performance"
_SECTION = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_ROUTER_KEYS = (
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "output_throughput",
    "most",
    "mean_spread",
    "router_us_per_token",
    "backend_us_per_token",
)
_ACCURACY_KEYS = ("perplexity", "loss_over_base", "loss_error", "answers", "answers_equal", "median_agreed")
_PROCESSES = 4
"""As many processes as a cell shows."""


def processes(found: Results, workload: str, server: str) -> str:
    """Who used the CPU: the largest first."""
    rows = [
        run.values["processes_us_per_token"] for run in found.runs if (run.workload, run.server) == (workload, server)
    ]
    largest = sorted(median_of(rows).items(), key=lambda item: -item[1])[:_PROCESSES]
    return ", ".join(f"{name} {number(value)}" for name, value in largest)


def client_share(found: Results, workload: str, server: str) -> str:
    """The load generator's CPU time as a share of the server's; a mark where it is over a third."""
    ours = found.median(workload, server, "client_cpu_us_per_token")
    theirs = found.median(workload, server, "server_cpu_us_per_token")
    if ours is None or not theirs:
        return "-"
    share = ours / theirs
    return f"{share:.0%}" + (" (!)" if share > 1 / 3 else "")


def chunks_per_second(found: Results, workload: str, server: str) -> str:
    """Pieces that were sent: a server that puts several tokens into one does less for each token."""
    tokens = found.median(workload, server, "output_throughput")
    chunks = found.median(workload, server, "chunks_per_token")
    return number(None if tokens is None or chunks is None else tokens * chunks)


def servers_table(found: Results, ours: Sequence[str], first: str, throughput: str) -> str:
    """A row for each workload and server; the last columns are the ratios of our throughput to the row's."""
    measured = {run.server for run in found.runs}
    ours = [name for name in ours if name in measured]
    head = [first, "server", "tokens/s", "TTFT ms", "TPOT ms", "ITL ms", "chunks/token", "CPU us/token", "of which"]
    head += ["chunks/s", "client CPU/server CPU", *(f"{name} / this" for name in ours)]
    rows = []
    for workload in found.workloads():
        for server in found.servers(workload):
            keys = (
                throughput,
                "mean_ttft_ms",
                "mean_tpot_ms",
                "mean_itl_ms",
                "chunks_per_token",
                "server_cpu_us_per_token",
            )
            row = [workload, server, *(number(found.median(workload, server, key)) for key in keys)]
            row += [
                processes(found, workload, server),
                chunks_per_second(found, workload, server),
                client_share(found, workload, server),
            ]
            row += [spread(found.ratio(workload, name, server, throughput)) for name in ours]
            rows.append(row)
    return markdown(head, rows)


def host_ceiling(found: Results) -> str:
    """Streams against servers."""
    return servers_table(found, [FOREBAY_SIM.name, FOREBAY_CPU.name], "streams", "output_throughput")


def cpu_model(found: Results) -> str:
    """Generation, and then prompts only, where input tokens count."""
    prefill = {workload for workload in found.workloads() if workload.startswith("prefill")}
    parts = []
    for names, throughput, title in (
        (set(found.workloads()) - prefill, "output_throughput", "Output tokens per second:"),
        (prefill, "input_throughput", "Input tokens per second (CPU still per output token):"),
    ):
        part = Results(**{**vars(found), "runs": [run for run in found.runs if run.workload in names]})
        if part.runs:
            parts.append(f"{title}\n\n{servers_table(part, [FOREBAY_CPU.name], 'workload', throughput)}")
    return "\n\n".join(parts)


def ablations(found: Results) -> str:
    """On by off for every switch: throughput and latency."""
    head = [
        "switch",
        "workload",
        "tokens/s on",
        "off",
        "throughput on/off",
        "TTFT on/off",
        "ITL on/off",
        "CPU/token on/off",
        "P99 TTFT on/off",
        "P99 ITL on/off",
        "published elsewhere",
    ]
    keys = (
        *("output_throughput", "mean_ttft_ms", "mean_itl_ms", "server_cpu_us_per_token"),
        *("p99_ttft_ms", "p99_itl_ms"),
    )
    rows = []
    for case in found.workloads():
        switch, _, workload = case.partition(": ")
        throughputs = [number(found.median(case, state, "output_throughput")) for state in ("on", "off")]
        ratios = [spread(found.ratio(case, "on", "off", key)) for key in keys]
        rows.append([switch, workload, *throughputs, *ratios, found.elsewhere.get(switch, "-")])
    return markdown(head, rows)


def egress(found: Results) -> str:
    """CPU time of a chunk for each way of writing it; the ratios are of the others to the first."""
    head = ["streams", "chunks written by", "CPU us/token", "user", "kernel", "chunks/token", "ITL ms", "p99 ITL ms"]
    keys = ("server_cpu_us_per_token", "server_user_us_per_token", "server_kernel_us_per_token", "chunks_per_token")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in (*keys, "mean_itl_ms", "p99_itl_ms")]
            rows.append([workload, server, *cells, spread(found.ratio(workload, server, first, keys[0]))])
    return markdown([*head, "CPU / direct"], rows)


def profile(found: Results) -> str:
    """Microseconds of each group of samples, and their sum."""
    rows = []
    for workload in found.workloads():
        runs = [run.values for run in found.runs if run.workload == workload]
        groups = median_of(values["groups_us_per_token"] for values in runs)
        total = sum(groups.values())
        ordered = sorted(groups.items(), key=lambda item: -item[1])
        rows += [[name, f"{value:.2f}", f"{value / total:.0%}"] for name, value in ordered if value >= total / 200]
        rows.append([f"all, {workload}", f"{total:.2f}", ""])
    return markdown(["where", "CPU us/token", "share"], rows)


def micro(found: Results) -> str:
    """A row for each operation, a column for each size, and what the largest costs beside the smallest."""
    sizes = sorted({run.server for run in found.runs if run.server.isdigit()}, key=int)
    rows = []
    for operation in found.workloads():
        costs = [found.median(operation, size, "ns_per_element") for size in sizes]
        measured = [cost for cost in costs if cost is not None]
        if measured:
            rows.append([operation, *(number(cost) for cost in costs), f"{measured[-1] / measured[0]:.2f}"])
    return markdown(["nanoseconds", *sizes, "largest / smallest"], rows)


def agreement(found: Results) -> str:
    """What several clients say of the same server; in brackets our number by theirs."""
    keys = {
        "output_throughput": "tokens/s",
        "mean_ttft_ms": "mean TTFT ms",
        "mean_tpot_ms": "mean TPOT ms",
        "mean_itl_ms": "mean ITL ms",
    }
    rows = []
    for workload in found.workloads():
        ours, *others = found.servers(workload)
        rows.append([workload, ours, *(number(found.median(workload, ours, key)) for key in keys)])
        for client in others:
            cells = [
                f"{number(found.median(workload, client, key))} [{spread(found.ratio(workload, ours, client, key))}]"
                for key in keys
            ]
            rows.append([workload, client, *cells])
    return markdown(["workload", "client", *keys.values()], rows)


def host_tier(found: Results) -> str:
    """What the tier gives a second turn and an overload, and what saving costs."""
    rows = [
        [
            "second turn, TTFT ms",
            number(found.median("turn", "off", "median_ttft_ms")),
            number(found.median("turn", "tier", "median_ttft_ms")),
            spread(found.ratio("turn", "tier", "off", "median_ttft_ms")),
        ],
        [
            "of that copying, ms",
            "-",
            number(found.median("turn", "tier", "copy_ms_per_restore")),
            "-",
        ],
        [
            "brain, CPU us a token, nothing to reuse",
            number(found.median("write", "off", "server_cpu_us_per_token")),
            number(found.median("write", "tier", "server_cpu_us_per_token")),
            spread(found.ratio("write", "tier", "off", "server_cpu_us_per_token")),
        ],
        [
            "overload, tokens computed again a preemption",
            number(found.median("overload", "recompute", "recomputed_per_preemption")),
            number(found.median("overload", "tier", "recomputed_per_preemption")),
            "-",
        ],
        [
            "overload, output tokens/s",
            number(found.median("overload", "recompute", "output_throughput")),
            number(found.median("overload", "tier", "output_throughput")),
            spread(found.ratio("overload", "tier", "recompute", "output_throughput")),
        ],
    ]
    return markdown(["", "without", "with the tier", "ratio (least-most)"], rows)


def intake(found: Results) -> str:
    """Gaps between tokens with and without a burst; the ratios are of the p99 to the first row's."""
    head = ["streams", "beside them", "ITL p50 ms", "p99 ms", "max ms", "p99 / no burst", "slowest of the burst ms"]
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in keys]
            cells.append(spread(found.ratio(workload, server, first, "p99_itl_ms")))
            cells.append(number(found.median(workload, server, "slowest_of_burst_ms")))
            rows.append([workload, server, *cells])
    return markdown(head, rows)


def images(found: Results) -> str:
    """The same with images; the last ratio is of the p99 to that beside the same work done by another server."""
    head = ["beside the streams", "ITL p50 ms", "p99 ms", "max ms", "p99 / no burst", "p99 / another server"]
    head += ["slowest of the burst ms", "images/s"]
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        nothing, other, *_ = found.servers(workload)
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in keys]
            cells += [spread(found.ratio(workload, server, base, "p99_itl_ms")) for base in (nothing, other)]
            cells += [number(found.median(workload, server, key)) for key in ("slowest_of_burst_ms", "images_a_second")]
            rows.append([server, *cells])
    return markdown(head, rows)


def image_prepare(found: Results) -> str:
    """Images a second of one core; the ratios are of the first to the others."""
    head = ["file, 1200 x 1200", "MB", "by", "images/s", "forebay / this"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            megabytes = (found.median(workload, server, "file_bytes") or 0) / 1e6
            rate = number(found.median(workload, server, "images_per_second"))
            ratio = spread(found.ratio(workload, first, server, "images_per_second"))
            rows.append([workload, f"{megabytes:.2f}", server, rate, ratio])
    return markdown(head, rows)


def masks(found: Results) -> str:
    """What forms of answers cost; the ratio is of output rates to the first row."""
    head = ["answers", "output tokens/s", "ratio", "ITL mean ms", "p99 ms", "masks", "us a mask"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            rate = number(found.median(workload, server, "output_throughput"))
            ratio = spread(found.ratio(workload, server, first, "output_throughput"))
            keys = ("mean_itl_ms", "p99_itl_ms", "masks", "mask_us")
            rows.append([server, rate, ratio, *(number(found.median(workload, server, key)) for key in keys)])
    return markdown(head, rows)


def mask_times(found: Results) -> str:
    """Microseconds; a first mask has the compiling of its schema in it."""
    head = ["first mask p50 us", "p99 us", "masks", "p50 us", "p99 us", "max us"]
    keys = ("first_p50_us", "first_p99_us", "masks", "p50_us", "p99_us", "max_us")
    rows = [
        [number(found.median(workload, server, key)) for key in keys]
        for workload in found.workloads()
        for server in found.servers(workload)
    ]
    return markdown(head, rows)


def fan_out(found: Results) -> str:
    """Microseconds of the engine's thread a step, by ranks."""
    head = ["ranks", "plan to all us", "results of all us", "us a further rank"]
    keys = ("submit_us", "collect_us", "more_us_a_rank")
    rows = [
        [ranks, *(number(found.median(workload, ranks, key)) for key in keys)]
        for workload in found.workloads()
        for ranks in found.servers(workload)
    ]
    return markdown(head, rows)


def outposts(found: Results) -> str:
    """Microseconds of a round trip, and what the relay adds."""
    head = ["plan", "hand", "p50 us", "p99 us", "more p50 us", "more p99 us"]
    keys = ("p50_us", "p99_us", "more_p50_us", "more_p99_us")
    rows = [
        [workload, where, *(number(found.median(workload, where, key)) for key in keys)]
        for workload in found.workloads()
        for where in found.servers(workload)
    ]
    return markdown(head, rows)


def outpost_bursts(found: Results) -> str:
    """Gaps beside bursts, with the hand here and behind an outpost; the last ratio is of p99 to the same one here."""
    head = ["hand", "ITL p50 ms", "p99 ms", "max ms", "p99 / no burst", "p99 / here", "slowest of the burst ms"]
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        for server in found.servers(workload):
            where, _, burst = server.partition(", ")
            cells = [number(found.median(workload, server, key)) for key in keys]
            bases = (f"{where}, no burst", f"here, {burst}")
            cells += [spread(found.ratio(workload, server, base, "p99_itl_ms")) for base in bases]
            rows.append([server, *cells, number(found.median(workload, server, "slowest_of_burst_ms"))])
    return markdown(head, rows)


def router(found: Results) -> str:
    """What stands in front of simulated backends; the ratios are the first row's by this row's."""
    head = ["scene", "in front", "TTFT p50 ms", "p99 ms", "p99 ratio", "TPOT ms", "tokens/s", "ratio"]
    head += ["most on one", "mean spread", "router us/token", "backend us/token"]
    rows = []
    for scene in found.workloads():
        servers = found.servers(scene)
        for server in servers:
            median = {key: number(found.median(scene, server, key)) for key in _ROUTER_KEYS}
            slower = spread(found.ratio(scene, servers[0], server, "p99_ttft_ms"))
            faster = spread(found.ratio(scene, servers[0], server, "output_throughput"))
            rows.append(
                [
                    *(scene, server, median["median_ttft_ms"], median["p99_ttft_ms"], slower),
                    *(median["mean_tpot_ms"], median["output_throughput"], faster),
                    *(median["most"], median["mean_spread"]),
                    *(median["router_us_per_token"], median["backend_us_per_token"]),
                ]
            )
    return markdown(head, rows)


def embeddings(found: Results) -> str:
    """Latency by rate; a rate at which the load generator was late does not count."""
    head = ["rate", "server", "inputs/s", "P50 ms", "P90 ms", "P99 ms", "sent late"]
    keys = ("request_throughput", "median_e2e_latency_ms", "p90_e2e_latency_ms", "p99_e2e_latency_ms", "late_sends")
    rows = [
        [workload, server, *(number(found.median(workload, server, key)) for key in keys)]
        for workload in found.workloads()
        for server in found.servers(workload)
    ]
    return markdown(head, rows)


def replicas(found: Results) -> str:
    """How even each policy is, and its latencies; the ratios are to the first policy's."""
    head = [
        "scenario",
        "replica chosen by",
        "most at one",
        "mean spread",
        "P99 TTFT ms",
        "TPOT ms",
        "P99 TPOT ms",
        "tokens/s",
    ]
    head += ["tokens/s / first", "P99 TTFT / first"]
    keys = ("most_at_one", "mean_spread", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "output_throughput")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in keys]
            cells += [spread(found.ratio(workload, server, first, key)) for key in ("output_throughput", "p99_ttft_ms")]
            rows.append([workload, server, *cells])
    return markdown(head, rows)


def accuracy(found: Results) -> str:
    """What each way of computing costs in accuracy, and then its steps; ratios are of bfloat16's time to its own."""
    parts = []
    if ways := found.servers("accuracy"):
        rows = []
        for way in ways:
            median = {key: found.median("accuracy", way, key) for key in _ACCURACY_KEYS}
            over, error = (median[key] or 0.0 for key in ("loss_over_base", "loss_error"))
            same = f"{median['answers_equal']:.0f} of {median['answers']:.0f}"
            perplexity = f"{median['perplexity']:.3f}"
            rows.append([way, perplexity, f"{over:+.4f} ± {error:.4f}", same, number(median["median_agreed"])])
        head = ["computed in", "perplexity", "loss over bfloat16's", "same answers", "median tokens until they differ"]
        parts.append(markdown(head, rows))
    steps = [workload for workload in found.workloads() if workload != "accuracy"]
    rows = [
        [step, way, number(found.median(step, way, "step_ms")), spread(found.ratio(step, "bfloat16", way, "step_ms"))]
        for step in steps
        for way in found.servers(step)
    ]
    if rows:
        parts.append(markdown(["step", "computed in", "ms", "bfloat16 / this"], rows))
    return "\n\n".join(parts)


def tool_calls(found: Results) -> str:
    """How many requests were answered by a call that is valid, and by the right one."""
    head = ["asked for", "calls", "valid", "the right function", "right", "in a fence", "right in a fence"]
    keys = ("requests", "called", "valid", "named", "right", "fenced_called", "fenced_right")
    rows = []
    for workload in found.workloads():
        for way in found.servers(workload):
            values = {key: found.median(workload, way, key) for key in keys}
            of = f" of {values.pop('requests'):.0f}"
            rows.append([f"`{way}`", *(f"{value:.0f}{of}" for value in values.values())])
    return markdown(head, rows)


def startup(found: Results) -> str:
    """Seconds from the command on; the ratios are of each server to the first."""
    head = ["files", "server", "ready s", "first token s", "first token / first server's"]
    keys = ("ready_seconds", "first_token_seconds")
    rows = []
    for state in found.workloads():
        first = found.servers(state)[0]
        for server in found.servers(state):
            cells = [number(found.median(state, server, key)) for key in keys]
            rows.append(
                [state.removeprefix("files "), server, *cells, spread(found.ratio(state, server, first, keys[1]))]
            )
    return markdown(head, rows)


def quantised(found: Results) -> str:
    """A row for each format and workload: tokens a second of both, and their perplexities."""
    ours, theirs = FOREBAY_CPU.name, LLAMA.name
    head = ["file", "workload", f"{ours}, tokens/s", f"{theirs}, tokens/s", f"{ours} / {theirs}"]
    rows = []
    for name in found.workloads():
        kind, _, workload = name.partition(": ")
        if workload == "perplexity":
            cells = [f"{value:.3f}" if (value := found.median(name, who, workload)) else "-" for who in (ours, theirs)]
            rows.append([kind, workload, *cells, "-"])
            continue
        key = "input_throughput" if workload.startswith("prefill") else "output_throughput"
        cells = [number(found.median(name, who, key)) for who in (ours, theirs)]
        rows.append([kind, workload, *cells, spread(found.ratio(name, ours, theirs, key))])
    order = list(dict.fromkeys(row[0] for row in rows))
    return markdown(head, sorted(rows, key=lambda row: order.index(row[0])))


def first_minute(found: Results) -> str:
    """Megabytes and seconds from nothing; the ratios are of each server to the first."""
    head = ["server", "MB downloaded", "MB on disk", "installed s", "ready after s", "first token after s"]
    head += ["from nothing to the first token s", "this / first server's"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        totals = {
            server: {
                run.round: run.values["install_seconds"] + run.values["first_token_seconds"]
                for run in found.runs
                if run.server == server
            }
            for server in found.servers(workload)
        }
        for server, total in totals.items():
            sizes = [found.median(workload, server, key) for key in ("downloaded_bytes", "disk_bytes")]
            keys = ("install_seconds", "ready_seconds", "first_token_seconds")
            cells = [number(None if size is None else size / 1e6) for size in sizes]
            cells += [number(found.median(workload, server, key)) for key in keys]
            cells += [number(median(total.values())), spread(paired_ratio(total, totals[first]))]
            rows.append([server, *cells])
    return markdown(head, rows)


KINDS: dict[str, Callable[[Results], str]] = {
    "host_ceiling": host_ceiling,
    "cpu_model": cpu_model,
    "cpu_model_amx": cpu_model,
    "cpu_coder": cpu_model,
    "cpu_coder_amx": cpu_model,
    "ablations": ablations,
    "egress": egress,
    "profile": profile,
    "micro": micro,
    "agreement": agreement,
    "embeddings": embeddings,
    "host_tier": host_tier,
    "intake": intake,
    "images": images,
    "image_prepare": image_prepare,
    "fan_out": fan_out,
    "outpost_bursts": outpost_bursts,
    "outposts": outposts,
    "masks": masks,
    "mask_times": mask_times,
    "router": router,
    "replicas": replicas,
    "accuracy": accuracy,
    "gsm8k": gsm8k_results.table,
    "startup": startup,
    "first_minute": first_minute,
    "quantised": quantised,
    "tool_calls": tool_calls,
}


def render(found: Results) -> str:
    """The table of a benchmark, and under it what it is of."""
    about = found.machine
    processor = about["cpu"] + (" with AMX" if "amx_bf16" in about.get("features", ()) else "")
    lines = [KINDS[found.benchmark](found), ""]
    lines.append(
        f"{found.date}, {processor}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, torch {about['torch']}, Forebay {about['forebay']} ({about['commit']})"
    )
    if found.rounds:
        lines[-1] += f"; medians of {found.rounds} alternating rounds, ratios of the same round (least-most)"
    lines[-1] += "."
    lines += [f"{name}: {note}." for name, note in found.notes.items()]
    lines += [f"Left out: {name} ({reason})." for name, reason in found.skipped.items()]
    return "\n".join(lines)


def fill(document: str, rendered: dict[str, str]) -> str:
    """The document with the sections replaced that there are results for."""

    def section(match: re.Match[str]) -> str:
        text = rendered.get(match["name"])
        return match[0] if text is None else f"{match[1]}{text}\n{match[3]}"

    return _SECTION.sub(section, document)


def committed(folder: Path) -> dict[str, str]:
    """The rendered table of every benchmark that has a file of results."""
    return {
        name: render(records.read(folder / f"{name}.json")) for name in KINDS if (folder / f"{name}.json").is_file()
    }


def main() -> None:
    """The command."""
    flags = argparse.ArgumentParser(description="Put the committed results into docs/performance.")
    flags.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    check: bool = flags.parse_args().check
    rendered = committed(records.RESULTS)
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = fill(before, rendered)
        if check and after != before:
            name = page.relative_to(ROOT)
            raise SystemExit(f"{name} is not what benchmarks/results says: python -m benchmarks.tables")
        page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
