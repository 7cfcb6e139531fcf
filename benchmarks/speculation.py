"""Answers that repeat their prompt, and others, with and without drafts from earlier text.

    python -m benchmarks.speculation --rounds 2  # 30 minutes

A model on the CPU answers requests of five kinds greedily, 1 and 8 at a time, and chats 32 at a time. Each round has a
fresh process for each server, in turn. Forebay's texts are the same with and without drafts, which the command checks.
llama.cpp's server and vLLM, where they are installed, run without and with their own n-gram drafts.

- edit: a file with one change;
- quote: a passage, word by word;
- json: records of a table as JSON;
- form: the same with a JSON schema, whose keys and punctuation are drafts too;
- chat: questions whose answers repeat nothing.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks import coder, compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import LLAMA, SERVED_NAME, VLLM, Forebay, Server, Setting

STREAMS = (1, 8, 32)
CROWD = STREAMS[-1]
"""Streams that only chat: with as many there are few drafts, which must cost nothing."""
MOST_TOKENS = 160
SECONDS = 600.0
KEY = "output_throughput"
WITHOUT, WITH, FIXED = "without", "with drafts", "every draft"
OURS = [
    Forebay(WITHOUT, "forebay-chat"),
    Forebay(WITH, "forebay-chat", flags=("--speculative-algorithm", "ngram")),
    Forebay(FIXED, "forebay-chat", flags=("--speculative-algorithm", "ngram", "--speculative-unpriced")),
]
NGRAMS_OF_LLAMA = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16")
"""Of five tried settings, the fastest on edits and quotes; the defaults look up 12 tokens."""
NGRAM_OF_VLLM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PEERS: dict[str, tuple[Server, Server]] = {
    "llama": (LLAMA, replace(LLAMA, name=f"{LLAMA.name}, n-grams", flags=NGRAMS_OF_LLAMA)),
    "vllm": (
        VLLM,
        replace(VLLM, name=f"{VLLM.name}, n-grams", flags=("--speculative-config", json.dumps(NGRAM_OF_VLLM))),
    ),
}
"""Each peer without and with drafts. Peers take part in the first round only, with some of the requests."""
PEER_KINDS = ("edit", "chat")
NAMES = ["basket", "ledger", "garden", "engine"]
PASSAGES = [
    (
        "The tide came in over the flats before noon, and the boats that had lain on their sides all morning stood up"
        " one after another. Men walked out to them with oars on their shoulders. By one o'clock the harbour was empty."
    ),
    (
        "A kettle boils sooner with its lid on, because the steam that would carry heat away is kept inside. The lid"
        " also keeps the air above the water warm, so less heat is lost by convection than from an open pot."
    ),
    (
        "On Tuesday the committee met for the third time. It read the minutes of the second meeting, found two errors"
        " in them, corrected both, and adjourned until Friday, when the chair promised that the vote would be held."
    ),
    (
        "Copper conducts electricity better than iron and worse than silver. It is soft, does not rust in dry air, and"
        " can be drawn into wires thinner than a hair, which is why most cables are made of it."
    ),
]
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "records",
        "strict": True,
        "schema": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer"},
                    "name": {"type": "string"},
                    "price": {"type": "integer"},
                    "state": {"enum": ["open", "closed"]},
                },
                "required": ["id", "name", "price", "state"],
                "additionalProperties": False,
            },
        },
    },
}
QUESTIONS = [
    "Why is the sky blue at noon and red in the evening?",
    "Tell me a short story about a lighthouse keeper and a whale.",
    "What should one think of before buying a second-hand bicycle?",
    "How would you explain compound interest to a child?",
]


def code(name: str) -> str:
    """A Python file."""
    return f'''class {name.title()}:
    """Things in a {name}, by their name."""

    def __init__(self) -> None:
        self.items: dict[str, int] = {{}}

    def add(self, item: str, count: int = 1) -> None:
        if count < 1:
            raise ValueError("count must be at least 1")
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item: str) -> int:
        return self.items.pop(item, 0)

    def total(self) -> int:
        return sum(self.items.values())
'''


def asked() -> dict[str, list[str]]:
    """The requests of each kind."""
    table = "\n".join(f"{n},{name},{10 * n + 5},open" for n, name in enumerate([*NAMES, *NAMES]))
    objects = [
        f"Write this table of the {name} as a JSON list of objects with the keys id, name, price, state.\n\n{table}"
        for name in NAMES
    ]
    return {
        "edit": [
            f"Rename the method `total` to `count` in this file. Answer with the whole file.\n\n{code(name)}"
            for name in NAMES
        ],
        "quote": [f"Repeat this passage word by word:\n\n{passage}" for passage in PASSAGES],
        "json": objects,
        "form": objects,
        "chat": QUESTIONS,
    }


def ask(url: str, text: str, kind: str) -> tuple[str, int]:
    """An answer, and its number of tokens."""
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": MOST_TOKENS,
    }
    if kind == "form":
        body["response_format"] = FORM
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def measure(url: str, prompts: list[str], streams: int, kind: str) -> tuple[list[str], float]:
    """Answers to prompts, this many at a time, and tokens a second."""
    with ThreadPoolExecutor(streams) as pool:
        begun = time.perf_counter()
        answers = list(pool.map(lambda prompt: ask(url, prompt, kind), prompts))
        seconds = time.perf_counter() - begun
    return [text for text, _ in answers], sum(tokens for _, tokens in answers) / seconds


@table_of("speculation")
def table(found: Results) -> str:
    """Tokens a second, and ratios of the same round: the gain from drafts, and Forebay to the peer."""
    peers = [pair for pair in PEERS.values() if any(pair[0].name in found.servers(each) for each in found.workloads())]
    head = ["requests", WITHOUT, WITH, "ratio", FIXED, "ratio"]
    for peer, _ in peers:
        head += [peer.name, "n-grams", "ratio", "Forebay with drafts beside it"]
    rows = []
    for workload in found.workloads():
        cells = [workload, number(found.median(workload, WITHOUT, KEY))]
        for server in (WITH, FIXED):
            cells += [number(found.median(workload, server, KEY)), spread(found.ratio(workload, server, WITHOUT, KEY))]
        for plain, drafting in peers:
            cells += [number(found.median(workload, server.name, KEY)) for server in (plain, drafting)]
            cells += [spread(found.ratio(workload, drafting.name, plain.name, KEY))]
            cells += [spread(found.ratio(workload, WITH, drafting.name, KEY))]
        rows.append(cells)
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Answers with and without drafts from earlier text.", rounds=3)
    flags.add_argument("--model", default=models.NAMES[1] if coder.missing() else coder.NAME, help="[%(default)s]")
    flags.add_argument(
        "--peers", type=compare.peers, default=["llama", "vllm"], help="peers beside Forebay [llama vllm]"
    )
    chosen = flags.parse_args()
    if chosen.model == coder.NAME:
        if reason := coder.missing():
            raise SystemExit(reason)
        coder.build()
    else:
        models.build(force=False)
    found = records.new("speculation", chosen.rounds)
    found.notes = {"Model": f"{chosen.model}, bfloat16, greedy, at most {MOST_TOKENS} tokens an answer"}
    by_name: dict[str, Server] = {server.name: server for server in OURS}
    for pair in (PEERS[name] for name in PEERS if name in chosen.peers):
        if reason := pair[0].missing():
            found.skipped[pair[0].name] = reason
        else:
            by_name |= {server.name: server for server in pair}
            found.notes[pair[0].name] = pair[0].note
    setting = Setting(model=chosen.model, streams=max(STREAMS), context=2048)
    texts: dict[str, list[str]] = {}
    for turn, name in records.in_turn(chosen.rounds, list(by_name)):
        if turn > 1 and not isinstance(by_name[name], Forebay):
            continue
        try:
            running = start(by_name[name], setting)
        except ServerError as error:
            compare.leave_out(found, name, error)
            continue
        with running:
            ours = isinstance(by_name[name], Forebay)
            # The scheduler learns the times of steps from the first ones.
            measure(running.url, asked()["chat"], 1, "chat")
            for streams in STREAMS:
                for kind, prompts in asked().items():
                    if (not ours and kind not in PEER_KINDS) or (streams == CROWD and (kind != "chat" or not ours)):
                        continue
                    answers, rate = measure(running.url, prompts * max(1, streams // 4), streams, kind)
                    workload = f"{kind}, {streams} at a time"
                    if ours and texts.setdefault(workload, answers) != answers:
                        raise SystemExit(f"{workload}: {name} gave another text")
                    found.runs.append(Run(workload, name, turn, {KEY: rate}))
                    compare.say(f"  round {turn} {workload} {name}: {rate:.1f} tokens/s")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
