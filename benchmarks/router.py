"""Routers in front of simulated backends: their latency, their capacity, and how evenly they spread requests.

    python -m benchmarks.router --rounds 3 [--scenes latency,ceiling,seed,...]

*latency*, *ceiling* and *merged-ceiling* compare a backend with and without a router in front of it. nginx, which does
not know models, shows the cost of any proxy on the machine. The other scenes have four backends without a limit of
running requests, so the choice of a backend matters. `most` is the most requests that any backend had at a time while
all clients were busy; a quarter of them is perfect. Each backend is polled every 20 ms.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import LOGS, SEED, Workload, client_command, kept, run_client, start
from benchmarks.processes import Running, ServerError, free_port
from benchmarks.records import Results
from benchmarks.servers import (
    FOREBAY,
    STEPS_OF_5_MS,
    TOKEN_EVERY_30_US,
    VENVS,
    Forebay,
    Setting,
    Target,
)

BACKENDS = 4
SAMPLE_SECONDS = 0.02
START_SECONDS = 60.0
SLOW = str(Path(__file__).parent / "profiles/steps-of-15-ms.toml")
"""A simulated device whose steps take three times as long as the others'."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Scene(Workload):
    """A workload, and the backends behind the router."""

    profiles: tuple[str, ...] = (STEPS_OF_5_MS,) * BACKENDS
    """One profile for each backend."""
    policies: bool = True
    """True if every policy is tried, and not only the default one."""


@dataclass(frozen=True)
class Front(Target):
    """The server that clients talk to: a router, or the first backend itself."""

    flags: tuple[str, ...] = ()

    def missing(self) -> str | None:
        return None if FOREBAY.is_file() else "make build"

    def start(self, backends: Sequence[Running]) -> Running | None:
        """Starts the router; None if the first backend is the front."""
        return None


@dataclass(frozen=True)
class ForebayRouter(Front):
    """`forebay route`."""

    def start(self, backends: Sequence[Running]) -> Running | None:
        urls = ",".join(backend.url for backend in backends)
        command = [str(FOREBAY), "route", "--backends", urls, "--log-level", "warn", *self.flags]
        return _ready(lambda port: [*command, "--host", "127.0.0.1", "--port", str(port)], self.name)


@dataclass(frozen=True)
class SglangRouter(Front):
    """SGLang's router from its wheel."""

    python: Path = field(default=VENVS / "sglang-router/bin/python", repr=False)

    def missing(self) -> str | None:
        return None if self.python.is_file() else "make bench-setup PEERS=sglang-router installs it"

    def start(self, backends: Sequence[Running]) -> Running | None:
        urls = [backend.url for backend in backends]
        launch = [str(self.python), "-m", "sglang_router.launch_router", "--worker-urls", *urls]
        # The metrics port has to be free.
        metrics = ["--prometheus-port", str(free_port()), "--log-level", "warn"]
        command = [*launch, *metrics, *self.flags, "--host", "127.0.0.1"]
        return _ready(lambda port: [*command, "--port", str(port)], self.name)


@dataclass(frozen=True)
class Nginx(Front):
    """nginx as a proxy with one worker, persistent connections and no buffering."""

    def missing(self) -> str | None:
        return None if _nginx() else "nginx is not installed (Debian's package nginx-light)"

    def start(self, backends: Sequence[Running]) -> Running | None:
        folder = Path(tempfile.mkdtemp(prefix="forebay-nginx-"))
        servers = " ".join(f"server 127.0.0.1:{backend.port};" for backend in backends)
        temporary = " ".join(
            f"{what}_temp_path {folder}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )

        def command(port: int) -> list[str]:
            config = folder / "nginx.conf"
            text = NGINX_CONFIG.format(folder=folder, servers=servers, temporary=temporary, port=port)
            config.write_text(text, encoding="utf-8")
            return [str(_nginx()), "-c", str(config)]

        try:
            return _ready(command, self.name)
        finally:
            # nginx has read its configuration, and keeps its other files open.
            shutil.rmtree(folder)


def _nginx() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


NGINX_CONFIG = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr;
events {{ worker_connections 8192; }}
http {{
    access_log off; {temporary}
    upstream backends {{ {servers} keepalive 1024; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port}; tcp_nodelay on; keepalive_requests 1000000;
        location / {{
            proxy_pass http://backends; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""


def _ready(command: Callable[[int], Sequence[str]], name: str) -> Running:
    port = free_port()
    log = LOGS / f"router-{name.replace(' ', '-').replace(',', '')}.log"
    return Running.ready(command(port), {}, port, log, START_SECONDS)


def _policy(name: str, *flags: str) -> ForebayRouter:
    return ForebayRouter(f"{name}{' '.join(['', *flags])}", "forebay-chat", flags=("--policy", name, *flags))


def _sglang(policy: str) -> SglangRouter:
    return SglangRouter(f"sglang-router {policy}", "forebay-chat", flags=("--policy", policy))


DIRECT = Front("direct", "forebay-chat")
DEFAULT = _policy("cache_aware")
PLAIN = _policy("round_robin")
PEER = _sglang("cache_aware")
PROXY = Nginx("nginx", "forebay-chat")
FRONTS: list[Front] = [
    DEFAULT,
    _policy("shortest_queue"),
    _policy("shortest_queue", "--no-load-acknowledgement"),
    _policy("shortest_queue", "--load-watch-interval", "0.02"),
    _policy("power_of_two"),
    PLAIN,
    _policy("random"),
    PEER,
    _sglang("power_of_two"),
    _sglang("round_robin"),
]

CLIENTS = 100
SPREAD = Setting(model="smollm2", streams=CLIENTS, context=4096)
CEILING = Scene(
    "ceiling: 512 streams",
    Setting(model="tiny", streams=512),
    input_tokens=32,
    output_tokens=400,
    requests=1024,
    profiles=(TOKEN_EVERY_30_US,),
    policies=False,
)
SCENES = [
    Scene(
        "latency: one stream, one token",
        Setting(model="tiny", streams=1),
        input_tokens=64,
        output_tokens=1,
        requests=1000,
        profiles=(TOKEN_EVERY_30_US,),
        policies=False,
    ),
    CEILING,
    replace(
        CEILING,
        name="merged ceiling: 512 streams, a device that takes no time",
        requests=2 * CEILING.requests,
        profiles=("instant",),
    ),
    Scene("seed: 500 in, 1500 out, rounds that end together", SPREAD, 500, 1500, requests=400),
    Scene("heavy tails", SPREAD, 200, 200, requests=800),
    Scene("shared prefixes", replace(SPREAD, context=8192), 0, 0, requests=800),
    Scene("one slow backend", SPREAD, 200, 200, requests=1000, profiles=(STEPS_OF_5_MS,) * 3 + (SLOW,)),
    Scene("bursts", SPREAD, 200, 200, requests=800),
]


def key_of(scene: Scene) -> str:
    """The name of the scene on the command line."""
    return scene.name.partition(":")[0].replace(" ", "-")


def prompts(seed: int, count: int) -> str:
    """A file of prompts with heavy-tailed lengths: most answers are short, some fifty times as long (Pareto, 1.2)."""
    draw = random.Random(seed)
    words = ["river", "stone", "lamp", "seven", "green", "under", "walk", "paper"]
    rows = []
    for _ in range(count):
        prompt = " ".join(draw.choices(words, k=min(1500, int(40 * draw.paretovariate(1.2)))))
        rows.append(json.dumps({"prompt": prompt, "output_tokens": min(2000, int(40 * draw.paretovariate(1.2)))}))
    return "\n".join(rows) + "\n"


def arguments(scene: Scene, folder: Path) -> tuple[str, ...]:
    """Further arguments of the load generator, beside lengths and numbers."""
    match key_of(scene):
        case "heavy-tails":
            file = folder / "prompts.jsonl"
            file.write_text(prompts(SEED, scene.requests), encoding="utf-8")
            return ("--dataset-name", "custom", "--dataset-path", str(file))
        case "shared-prefixes":
            groups = ("--gsp-num-groups", "40", "--gsp-prompts-per-group", str(scene.requests // 40))
            lengths = ("--gsp-system-prompt-len", "2048", "--gsp-question-len", "64", "--gsp-output-len", "100")
            return ("--dataset-name", "generated-shared-prefix", *groups, *lengths)
        case "bursts":
            return ("--request-rate", "60", "--burstiness", "0.05")
        case _:
            return ()


class Sampler(threading.Thread):
    """A thread that polls the number of requests of backends."""

    def __init__(self, backends: Sequence[Running]) -> None:
        super().__init__(daemon=True)
        self._ports = [backend.port for backend in backends]
        self._done = threading.Event()
        self.counts: list[list[int]] = []
        """A list for each sample: the requests of each backend."""

    def run(self) -> None:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=10) for port in self._ports]
        while not self._done.wait(SAMPLE_SECONDS):
            looks = []
            for connection in connections:
                connection.request("GET", "/v1/loads")
                looks.append(int(json.loads(connection.getresponse().read())["requests"]))
            self.counts.append(looks)
        for connection in connections:
            connection.close()

    def stop(self) -> None:
        """Stops polling."""
        self._done.set()
        self.join()


def evenness(counts: Sequence[Sequence[int]], clients: int) -> dict[str, float]:
    """The most requests of a backend, and the mean difference of most and least, while 95 % of clients were busy."""
    busy = [looks for looks in counts if sum(looks) >= 0.95 * clients]
    if not busy:
        return {}
    return {
        "most": max(max(looks) for looks in busy),
        "mean_spread": round(statistics.mean(max(looks) - min(looks) for looks in busy), 2),
        "looks": len(busy),
    }


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process and its children, with all their threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(cpu_seconds(int(child)) for child in children)


def measure(front: Front, scene: Workload) -> dict[str, Any]:
    """Starts backends and the front, and runs the load. Raises ServerError."""
    assert isinstance(scene, Scene)
    with ExitStack() as running, tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        backends = []
        for number, profile in enumerate(scene.profiles):
            backend = Forebay(f"backend {number}", "forebay-chat", profile=profile, prefix_cache=True)
            backends.append(running.enter_context(start(backend, scene.setting)))
        router = front.start(backends)
        if router is not None:
            running.enter_context(router)
        entrance = router or backends[0]
        processes = {"router": router.pid} if router else {}
        processes["backend"] = backends[0].pid
        before = {name: cpu_seconds(pid) for name, pid in processes.items()}
        output = Path(folder) / "run.jsonl"
        workload = replace(scene, arguments=arguments(scene, Path(folder)))
        sampler = Sampler(backends)
        if scene.policies:
            sampler.start()
        run_client(client_command(front, workload, entrance.url, entrance.pid, output))
        if scene.policies:
            sampler.stop()
        used = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"]:
        raise ServerError(f"{front.name}: {run['failed']} requests failed: {run['errors']}")
    tokens = max(run["total_output_tokens"], 1)
    costs = {f"{name}_us_per_token": round(seconds * 1e6 / tokens, 3) for name, seconds in used.items()}
    return kept(run) | evenness(sampler.counts, scene.setting.streams) | costs


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


@table_of("router")
def table(found: Results) -> str:
    """The values of each kind of front; ratios are of the first row to each row."""
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


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Routers in front of simulated backends.", rounds=3)
    keys = [key_of(scene) for scene in SCENES]
    flags.add_argument("--scenes", default=",".join(keys), help="of %(default)s")
    asked = flags.parse_args()
    wanted = asked.scenes.replace(",", " ").split()
    if unknown := [name for name in wanted if name not in keys]:
        raise SystemExit(f"no scene is called {', '.join(unknown)}: there are {', '.join(keys)}")
    found = records.new("router", asked.rounds)
    models.build(force=False)
    for scene in SCENES:
        if key_of(scene) not in wanted:
            continue
        fronts = FRONTS if scene.policies else [DIRECT, DEFAULT, PLAIN, PEER, PROXY]
        there = [front for front in fronts if not front.missing()]
        for front in fronts:
            if reason := front.missing():
                found.skipped[front.name] = reason
        compare.measure_in_turn(found, scene, there, asked.rounds, measure)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
