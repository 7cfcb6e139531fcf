"""A scripted engine, and the events of the live feed about it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

PAGE = 16
"""The number of tokens in a page."""
PLAN_US = 180


@dataclass
class Request:
    """A request of the feed: its tokens and its events."""

    id: str
    replica: int
    prompt: int
    cached: int
    most: int
    since: int
    computed: int = 0
    generated: int = 0
    state: str = "queued"
    events: list[Json] = field(default_factory=list)

    def happened(self, at: int, what: str, **facts: Any) -> None:
        self.events.append({"at_us": at, "what": what, **facts})

    def row(self) -> Json:
        return {
            "id": self.id,
            "replica": self.replica,
            "state": self.state,
            "prompt": self.prompt,
            "cached": self.cached,
            "computed": self.computed,
            "generated": self.generated,
            "max_tokens": self.most,
            "since_us": self.since,
        }


@dataclass
class Replica:
    """A replica of the feed, which computes its requests in steps of up to `chunk` positions."""

    index: int
    pages: int = 1024
    host_pages: int = 0
    slots: int = 24
    chunk: int = 1024
    state: str = "ready"
    respawns: int = 0
    preemptions: int = 0
    replayed: int = 0
    queries: int = 0
    hits: int = 0
    device: int = 0
    gap: int = 0
    number: int = 0
    kept: int = 0
    """The number of cached pages that no request holds."""
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    """The steps that no tick has reported yet."""
    busy: int = 0
    """The time at which the device finishes its present work."""

    @property
    def held(self) -> int:
        return sum(-(-(item.computed + item.generated) // PAGE) for item in self.running)


class Engine:
    """Replicas with a simulated clock. Call `advance`, and then `tick`."""

    def __init__(self, replicas: int = 1, *, seed: int = 7, model: str = "scripted", host_pages: int = 0) -> None:
        self.now = 5_000_000
        self.model = model
        self.replicas = [Replica(index, host_pages=host_pages) for index in range(replicas)]
        self.random = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.changed: set[str] = set()
        self.ended: list[str] = []
        self.next_id = 1
        self.arrivals = 0.0
        """The number of requests a second that arrive without a call of `add`."""
        self._due = 0.0

    def add(self, prompt: int, most: int, *, replica: int = 0, cached: int = 0) -> Request:
        """Adds a request, which waits from now on."""
        item = Request(str(self.next_id), replica, prompt, cached, most, self.now - 310)
        self.next_id += 1
        item.happened(self.now - 400, "received")
        item.happened(self.now - 310, "queued")
        self.requests[item.id] = item
        self.replicas[replica].waiting.append(item)
        self.changed.add(item.id)
        return item

    def kill(self, replica: int) -> None:
        """Kills the hand of a replica. Nothing runs until `recover`."""
        target = self.replicas[replica]
        target.state = "restarting"
        for item in target.running:
            item.state = "queued"
            item.computed = item.cached = 0
            item.happened(self.now, "replayed")
            self.changed.add(item.id)
        target.replayed += len(target.running)
        target.waiting = target.running + target.waiting
        target.running = []
        target.kept = 0

    def recover(self, replica: int) -> None:
        self.replicas[replica].state = "ready"
        self.replicas[replica].respawns += 1

    def advance(self, seconds: float) -> None:
        """Runs all replicas for `seconds` of simulated time."""
        end = self.now + int(seconds * 1e6)
        self._due += self.arrivals * seconds
        while self._due >= 1:
            self._due -= 1
            prompt = self.random.randint(60, 1800)
            shared = self.random.random() < 0.6
            self.add(
                prompt,
                self.random.choice([64, 128, 256]),
                replica=self.random.randrange(len(self.replicas)),
                cached=prompt * self.random.randint(2, 8) // 10 // PAGE * PAGE if shared else 0,
            )
        for replica in self.replicas:
            at = max(self.now, replica.busy)
            while at < end and replica.state == "ready" and (replica.running or replica.waiting):
                at = replica.busy = self._step(replica, at)
        self.now = end

    def _step(self, replica: Replica, at: int) -> int:
        while replica.waiting and len(replica.running) < replica.slots:
            item = replica.waiting.pop(0)
            item.state = "prefill"
            item.computed = item.cached
            replica.queries += item.prompt
            replica.hits += item.cached
            item.happened(at, "admitted", cached=item.cached)
            replica.running.append(item)
        room = replica.chunk
        decode = prefill = tokens = 0
        for item in list(replica.running):
            self.changed.add(item.id)
            if item.state == "decode":
                decode += 1
                tokens += 1
                room -= 1
            elif room > 0:
                part = min(room, item.prompt - item.computed)
                item.computed += part
                item.happened(at, "prefill", tokens=part)
                prefill += 1
                tokens += part
                room -= part
        late = self.random.random() < 0.06
        gap = self.random.randint(300, 1800) if late else self.random.randint(0, 12)
        device = 6000 + 14 * tokens + 60 * decode + self.random.randint(0, 400)
        done = at + gap + device
        ahead = 0 if late or replica.number == 0 else 1
        planned = at - 2600 if ahead else at + gap - 60
        plan = PLAN_US + 3 * (decode + prefill) + self.random.randint(0, 90)
        replica.number += 1
        replica.steps.append([replica.number, planned, done, device, gap, decode, prefill, tokens, plan, ahead])
        replica.device += device
        replica.gap += gap
        self._apply(replica, done)
        return done

    def _apply(self, replica: Replica, done: int) -> None:
        for item in list(replica.running):
            if item.state == "prefill" and item.computed >= item.prompt:
                item.state = "decode"
                item.generated += 1
                item.happened(done, "first_token")
            elif item.state == "decode":
                item.generated += 1
                item.computed += 1
                if item.generated % 16 == 0:
                    item.happened(done, "tokens", count=16)
            if item.generated >= item.most:
                item.happened(done, "finished", reason="length")
                replica.running.remove(item)
                replica.kept = min(replica.pages // 2, replica.kept + item.computed // PAGE)
                self.changed.discard(item.id)
                self.ended.append(item.id)

    def start(self) -> Json:
        """The first event of the feed."""
        for replica in self.replicas:
            replica.steps.clear()
            self.changed |= {item.id for item in replica.running + replica.waiting}
        return {
            "version": 1,
            "server": "forebay 0.1.0",
            "model": self.model,
            "now_us": self.now,
            "interval_ms": 250,
            "replicas": [
                {
                    "index": replica.index,
                    "slots": replica.slots,
                    "max_running": replica.slots,
                    "page_size": PAGE,
                    "pages": replica.pages,
                    "host_pages": replica.host_pages,
                    "lookahead": 1,
                }
                for replica in self.replicas
            ],
        }

    def tick(self) -> Json:
        """The changes since the last tick."""
        made: Json = {
            "now_us": self.now,
            "replicas": [self._replica(replica) for replica in self.replicas],
            "requests": [self.requests[name].row() for name in sorted(self.changed, key=int)],
            "ended": list(self.ended),
        }
        self.changed.clear()
        self.ended.clear()
        return made

    def _replica(self, replica: Replica) -> Json:
        held = min(replica.held, replica.pages)
        cached = min(replica.kept, replica.pages - held)
        host = replica.host_pages
        steps = [step for step in replica.steps if step[2] <= self.now]
        del replica.steps[: len(steps)]
        return {
            "index": replica.index,
            "state": replica.state,
            "respawns": replica.respawns,
            "running": len(replica.running),
            "waiting": len(replica.waiting),
            "pages": {"free": replica.pages - held - cached, "cached": cached, "held": held},
            "host": {"size": host, "held": host // 40, "cached": min(host // 2, replica.kept * 2)},
            "prefix": {"queries": replica.queries, "hits": replica.hits},
            "preemptions": replica.preemptions,
            "replayed": replica.replayed,
            "device_us": replica.device,
            "gap_us": replica.gap,
            "lost": 0,
            "steps": steps,
        }

    def trace(self) -> Json:
        return {"traceEvents": [{"name": "step", "ph": "X", "ts": self.now, "dur": 10, "pid": 0, "tid": 0}]}


class Router:
    """A router's feed: the backends and their state."""

    def __init__(self, backends: int = 3) -> None:
        self.now = 5_000_000
        self.backends: list[Json] = [
            {
                "index": index,
                "ready": True,
                "breaker": "closed",
                "in_flight": 3 + index,
                "waiting": index,
                "running": 3,
                "tokens": 4000 + 700 * index,
                "pages_free": None if index else 812,
                "sent": 1000 + 40 * index,
                "failed": 0,
            }
            for index in range(backends)
        ]

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e6)
        for backend in self.backends:
            if backend["ready"]:
                backend["sent"] += 2

    def start(self) -> Json:
        return {
            "version": 1,
            "server": "forebay route 0.1.0",
            "router": True,
            "now_us": self.now,
            "interval_ms": 250,
            "backends": [
                {"index": backend["index"], "url": f"http://127.0.0.1:{8001 + backend['index']}"}
                for backend in self.backends
            ],
        }

    def tick(self) -> Json:
        return {"now_us": self.now, "backends": self.backends}
