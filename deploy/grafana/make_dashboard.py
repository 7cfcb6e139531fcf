"""Writes forebay.json, the dashboard, from the table of its panels.

usage: make_dashboard.py [--check]

With --check nothing is written, and the status is 1 where the file differs from the table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).with_name("forebay.json")
BRAIN = 'job=~"$job",instance=~"$instance",model_name=~"$model_name"'
REPLICA = f'{BRAIN},engine=~"$engine"'
ROUTER = 'job=~"$router_job"'
RATE = "[$__rate_interval]"
WIDTH = 24
HEIGHT = 8
STAT_HEIGHT = 4


@dataclass(frozen=True)
class Panel:
    """A panel: what it is called and says, and an expression for each legend."""

    title: str
    text: str
    series: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A headline with panels below it."""

    title: str
    panels: list[Panel]


def rate(name: str, labels: str = REPLICA, by: str = "") -> str:
    """The sum of the rates of a counter, over all or by labels."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{{{labels}}}{RATE}))"


def total(name: str, labels: str = REPLICA, by: str = "") -> str:
    """The sum of a gauge, over all or by labels."""
    return f"sum{f' by ({by}) ' if by else ''}({name}{{{labels}}})"


def share(part: str, whole: str) -> str:
    """`part` of `whole`, both sums of rates; nothing where there was none."""
    return f"{part} / ({whole} > 0)"


def percentiles(name: str) -> dict[str, str]:
    """The median, the 95th and 99th percentile and the mean of a histogram."""
    buckets = f"sum by (le) (rate({name}_bucket{{{BRAIN}}}{RATE}))"
    found = {f"p{100 * q:.0f}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.95, 0.99)}
    return found | {"mean": share(rate(f"{name}_sum", BRAIN), rate(f"{name}_count", BRAIN))}


GAPS = rate("forebay:device_gap_seconds_total")
BUSY = rate("forebay:device_busy_seconds_total")
FIRST_TOKEN = "vllm:time_to_first_token_seconds"
BETWEEN_TOKENS = "vllm:inter_token_latency_seconds"

ROWS = [
    Row(
        "Now",
        [
            Panel(
                "Requests ended", "A second.", {"all": rate("vllm:request_success_total", BRAIN)}, "reqps", "stat", 3
            ),
            Panel("Prompt tokens", "A second.", {"all": rate("vllm:prompt_tokens_total")}, "count:tok/s", "stat", 3),
            Panel(
                "Output tokens", "A second.", {"all": rate("vllm:generation_tokens_total")}, "count:tok/s", "stat", 3
            ),
            Panel("First token, p99", "Since arrival.", {"p99": percentiles(FIRST_TOKEN)["p99"]}, "s", "stat", 3),
            Panel("Waiting", "Requests in the queue.", {"all": total("vllm:num_requests_waiting")}, "none", "stat", 3),
            Panel(
                "KV pages in use",
                "Of the replica with the fewest free.",
                {"most": f"max(vllm:kv_cache_usage_perc{{{REPLICA}}})"},
                "percentunit",
                "stat",
                3,
            ),
            Panel(
                "Gaps between steps",
                "Share of the device's time with work. Kernels of a step may wait for each other too.",
                {"all": share(GAPS, f"({GAPS} + {BUSY})")},
                "percentunit",
                "stat",
                3,
            ),
            Panel(
                "Replicas that serve",
                "Their hands take plans.",
                {"all": total("forebay:replica_up")},
                "none",
                "stat",
                3,
            ),
        ],
    ),
    Row(
        "Traffic",
        [
            Panel(
                "Requests by how they ended",
                "`abort`: the client went away. `error`: the server gave up.",
                {"{{finished_reason}}": rate("vllm:request_success_total", BRAIN, "finished_reason")},
                "reqps",
            ),
            Panel(
                "Tokens",
                "Prompt tokens include those found in caches.",
                {
                    "prompt": rate("vllm:prompt_tokens_total"),
                    "output": rate("vllm:generation_tokens_total"),
                    "computed again": rate("forebay:recomputed_tokens_total"),
                },
                "count:tok/s",
            ),
            Panel(
                "Tokens of a request",
                "95th percentiles.",
                {
                    name: f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket{{{BRAIN}}}{RATE})))"
                    for name, metric in (
                        ("prompt", "vllm:request_prompt_tokens"),
                        ("output", "vllm:request_generation_tokens"),
                    )
                },
            ),
        ],
    ),
    Row(
        "Latency",
        [
            Panel("Time to first token", "From arrival to the first token.", percentiles(FIRST_TOKEN), "s"),
            Panel("Between tokens", "From one token of a request to the next.", percentiles(BETWEEN_TOKENS), "s"),
            Panel("Whole requests", "From arrival to the end.", percentiles("vllm:e2e_request_latency_seconds"), "s"),
            Panel("Time in the queue", "Until the first step.", percentiles("vllm:request_queue_time_seconds"), "s"),
            Panel(
                "Prefill",
                "From the first step to the first token.",
                percentiles("vllm:request_prefill_time_seconds"),
                "s",
            ),
            Panel(
                "Decode",
                "From the first token to the last.",
                percentiles("vllm:request_decode_time_seconds"),
                "s",
            ),
        ],
    ),
    Row(
        "Scheduling",
        [
            Panel(
                "Running and waiting",
                "`arriving`: its blocks are being copied back from host memory.",
                {
                    "running": total("vllm:num_requests_running"),
                    "waiting": total("vllm:num_requests_waiting"),
                    "arriving": total("forebay:requests_arriving"),
                },
            ),
            Panel(
                "Before the queue",
                "Prompts that wait for a text thread, forms of answers for a compiler, large bodies for the arena.",
                {
                    "prompts": total("forebay:text_inputs_waiting", BRAIN),
                    "forms of answers": total("forebay:grammars_waiting", BRAIN),
                    "bodies": total("forebay:intake_bodies_waiting", BRAIN),
                    "requests for the arena": total("forebay:intake_requests_waiting", BRAIN),
                    "images": total("forebay:images_waiting"),
                },
            ),
            Panel(
                "Requests by replica",
                "Sent to it and not ended.",
                {"{{instance}} {{engine}}": total("forebay:replica_requests", REPLICA, "instance, engine")},
            ),
            Panel("Preemptions", "A second.", {"preemptions": rate("vllm:num_preemptions_total")}),
            Panel(
                "Bytes of requests in flight",
                "",
                {"{{instance}}": total("forebay:request_bytes_in_flight", BRAIN, "instance")},
                "bytes",
            ),
            Panel(
                "Log lines dropped",
                "Because they were not read in time.",
                {"dropped": rate("forebay:log_lines_dropped_total", BRAIN)},
            ),
        ],
    ),
    Row(
        "Device",
        [
            Panel(
                "Device",
                "Shares of the time. What is missing to 1 is time without work.",
                {
                    "steps {{instance}} {{engine}}": rate("forebay:device_busy_seconds_total", by="instance, engine"),
                    "gaps {{instance}} {{engine}}": rate("forebay:device_gap_seconds_total", by="instance, engine"),
                },
                "percentunit",
            ),
            Panel(
                "Steps", "A second.", {"{{instance}} {{engine}}": rate("forebay:steps_total", by="instance, engine")}
            ),
            Panel(
                "Time of a step",
                "Device time and gap, for each step.",
                {
                    "step": share(BUSY, rate("forebay:steps_total")),
                    "gap": share(GAPS, rate("forebay:steps_total")),
                },
                "s",
            ),
            Panel(
                "Hands that died",
                "They are respawned, and their requests replayed.",
                {
                    "deaths": f"sum(increase(forebay:hand_deaths_total{{{REPLICA}}}{RATE}))",
                    "requests replayed": f"sum(increase(forebay:requests_replayed_total{{{REPLICA}}}{RATE}))",
                },
                width=12,
            ),
            Panel(
                "Replicas that serve",
                "1: its hand takes plans.",
                {"{{instance}} {{engine}}": f"forebay:replica_up{{{REPLICA}}}"},
                width=12,
            ),
        ],
    ),
    Row(
        "Memory",
        [
            Panel(
                "KV in use by tier",
                "Pages that requests hold on the device, and host pages with blocks.",
                {
                    "device {{instance}} {{engine}}": f"vllm:kv_cache_usage_perc{{{REPLICA}}}",
                    "host {{instance}} {{engine}}": f"vllm:hisparse_host_cache_usage_perc{{{REPLICA}}}",
                },
                "percentunit",
            ),
            Panel(
                "Prefix hits",
                "Share of prompt tokens found on the device, and of the rest in host memory.",
                {
                    "device": share(rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")),
                    "host": share(
                        rate("vllm:external_prefix_cache_hits_total"), rate("vllm:external_prefix_cache_queries_total")
                    ),
                },
                "percentunit",
            ),
            Panel(
                "Host tier",
                "Tokens that it holds, and has room for.",
                {
                    "used": total("sglang:hicache_host_used_tokens"),
                    "room": total("sglang:hicache_host_total_tokens"),
                },
            ),
            Panel(
                "Copies between tiers",
                "Bytes a second, by direction.",
                {"{{transfer_type}}": rate("vllm:kv_offload_total_bytes_total", by="transfer_type")},
                "Bps",
            ),
            Panel(
                "Copies under way, and waits for them",
                "Waits are seconds a second, over all requests.",
                {
                    "under way": total("forebay:copies_outstanding"),
                    "waits": rate("forebay:copy_wait_seconds_total"),
                    "failed": rate("forebay:copies_failed_total"),
                },
            ),
            Panel(
                "Text and images found in caches",
                "Share of prompts' bytes that were encoded before; image pages in use.",
                {
                    "text": share(
                        rate("forebay:text_cache_hits_total", BRAIN), rate("forebay:text_cache_queries_total", BRAIN)
                    ),
                    "image pages": f"max(forebay:image_pages_used_perc{{{REPLICA}}})",
                },
                "percentunit",
            ),
        ],
    ),
    Row(
        "Router",
        [
            Panel(
                "Requests",
                "A second.",
                {
                    "requests": rate("forebay_router_requests_total", ROUTER),
                    "errors": rate("forebay_router_errors_total", ROUTER),
                    "retries": rate("forebay_router_retries_total", ROUTER),
                    "streams taken over": rate("forebay_router_failovers_total", ROUTER),
                    "given up": rate("forebay_router_given_up_total", ROUTER),
                },
                "reqps",
            ),
            Panel(
                "Requests of backends",
                "Everybody's, as far as the router knows.",
                {"{{backend}}": total("forebay_router_backend_requests", ROUTER, "backend")},
            ),
            Panel(
                "Backends that take requests",
                "1: it does.",
                {"{{backend}}": f"min by (backend) (forebay_router_backend_up{{{ROUTER}}})"},
            ),
            Panel(
                "Dispatched",
                "A second, by backend.",
                {"{{backend}}": rate("forebay_router_backend_dispatched_total", ROUTER, "backend")},
                "reqps",
            ),
            Panel(
                "Failed",
                "A second, by backend.",
                {"{{backend}}": rate("forebay_router_backend_failed_total", ROUTER, "backend")},
                "reqps",
            ),
            Panel(
                "Bodies held",
                "Bytes of requests that may have to be sent again.",
                {"{{instance}}": total("forebay_router_body_bytes", ROUTER, "instance")},
                "bytes",
            ),
        ],
    ),
]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(spec: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel as Grafana has it."""
    lines = spec.kind == "timeseries"
    refs = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    defaults: dict[str, Any] = {"unit": spec.unit, "min": 0}
    if lines:
        defaults["custom"] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "colorMode": "none",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    return {
        "id": number,
        "type": spec.kind,
        "title": spec.title,
        "description": spec.text,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT if lines else STAT_HEIGHT, "w": spec.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options | spec.options,
        "targets": [
            {"refId": refs[i], "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(spec.series.items())
        ],
    }


def panels() -> list[dict[str, Any]]:
    """All panels and headlines, from left to right and top to bottom."""
    made: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        )
        x, y = 0, y + 1
        for spec in row.panels:
            if x + spec.width > WIDTH:
                x, y = 0, y + made[-1]["gridPos"]["h"]
            made.append(panel(spec, len(made) + 1, x, y))
            x += spec.width
        y += made[-1]["gridPos"]["h"]
    return made


def variable(name: str, title: str, query: str) -> dict[str, Any]:
    """A variable with the values of a label, all of them at first."""
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    running = 'vllm:num_requests_running{job=~"$job"'
    return {
        "uid": "forebay",
        "title": "Forebay",
        "description": "Traffic, latency, queues, device, memory and routers of Forebay servers.",
        "tags": ["forebay", "llm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                variable("job", "Servers", "label_values(vllm:num_requests_running, job)"),
                variable("model_name", "Model", f"label_values({running}}}, model_name)"),
                variable("instance", "Instance", f'label_values({running},model_name=~"$model_name"}}, instance)'),
                variable("engine", "Replica", f'label_values({running},instance=~"$instance"}}, engine)'),
                variable("router_job", "Routers", "label_values(forebay_router_requests_total, job)"),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def main() -> None:
    """Writes the file, or checks it."""
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--check"]:
        if OUTPUT.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {OUTPUT.name} differs from its table: run deploy/grafana/make_dashboard.py")
    elif sys.argv[1:]:
        sys.exit(f"error: {__doc__}")
    else:
        OUTPUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
