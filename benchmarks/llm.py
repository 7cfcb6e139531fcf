"""The library beside the load generator: 2000 short prompts on the tiny model, by `LLM.generate` and by `bench serve`.

    python -m benchmarks.llm --rounds 3

Both keep 512 requests in flight at a server that runs 256 of them. About 16 tokens in and exactly 16 out, greedy. The
load generator reads streams over TCP; the library reads whole answers over a Unix socket, with token ids. The clock of
the library begins with the call and ends with the list of results.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import SEED, Workload
from benchmarks.load import measure as measure_server
from benchmarks.records import Results
from benchmarks.servers import FOREBAY, FOREBAY_CPU, Forebay, Server, Setting
from forebay import LLM, SamplingParams

PROMPTS = 2000
TOKENS = 16
RUNNING = 256
AT_A_TIME = 512
"""The requests that the library keeps in flight: those that run, and as many that wait."""
SETTING = Setting(model="tiny", streams=RUNNING, context=512, threads=1)
WORKLOAD = Workload(
    f"{PROMPTS} prompts",
    SETTING,
    TOKENS,
    TOKENS,
    requests=PROMPTS,
    arguments=("--max-concurrency", str(AT_A_TIME)),
)
LIBRARY = Forebay("LLM.generate", "")
GENERATOR = Forebay("bench serve", FOREBAY_CPU.backend)


def flags(setting: Setting) -> dict[str, Any]:
    """The flags of the server that is measured, as keyword arguments."""
    given = LIBRARY.command(setting, 0)[3:]
    found: dict[str, Any] = {}
    for at, word in enumerate(given):
        if word.startswith("--"):
            switch = at + 1 == len(given) or given[at + 1].startswith("--")
            found[word.removeprefix("--").replace("-", "_")] = True if switch else given[at + 1]
    # The library has its own socket.
    del found["port"]
    return found


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets environment variables within a block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def prompts(llm: LLM, count: int) -> Sequence[str]:
    """Texts of random tokens; the same in every run."""
    numbers = random.Random(SEED)
    return [llm.detokenize(numbers.choices(range(256, models.TINY_VOCABULARY), k=TOKENS)) for _ in range(count)]


def generate() -> dict[str, Any]:
    """Measures the library once, warm."""
    setting = WORKLOAD.setting
    params = SamplingParams(temperature=0, max_tokens=WORKLOAD.output_tokens, ignore_eos=True)
    with (
        variables(FOREBAY_BINARY=str(FOREBAY), FOREBAY_CACHE=str(models.CACHE)),
        LLM(models.directory(setting.model), **flags(setting)) as llm,
    ):
        texts = prompts(llm, WORKLOAD.requests + WORKLOAD.warmup)
        llm.generate(texts[WORKLOAD.requests :], params, use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(texts[: WORKLOAD.requests], params, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "requests": len(outputs),
        "duration": seconds,
        "total_input_tokens": sum(len(output.prompt_token_ids or []) for output in outputs),
        "total_output_tokens": tokens,
        "output_throughput": tokens / seconds,
    }


def measure(server: Server, workload: Workload) -> dict[str, Any]:
    """Measures the library or the load generator once."""
    return generate() if server.name == LIBRARY.name else measure_server(server, workload)


@table_of("llm")
def table(found: Results) -> str:
    """Prompts and tokens a second of each, and the library's ratio to the load generator."""
    rows = []
    for server in found.servers(WORKLOAD.name):
        seconds = found.median(WORKLOAD.name, server, "duration")
        rate = found.median(WORKLOAD.name, server, "output_throughput")
        share = found.ratio(WORKLOAD.name, server, GENERATOR.name, "output_throughput")
        rows.append([server, number(seconds), number(seconds and PROMPTS / seconds), number(rate), spread(share)])
    return markdown([WORKLOAD.name, "seconds", "prompts/s", "tokens/s", f"/ {GENERATOR.name}"], rows)


def main() -> None:
    """Runs the command line."""
    asked = compare.parser("LLM.generate beside the load generator.", rounds=3).parse_args()
    models.build(force=False)
    found = records.new("llm", asked.rounds)
    compare.measure_in_turn(found, WORKLOAD, [GENERATOR, LIBRARY], asked.rounds, measure)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
