"""Every file of examples/ and every docstring example of the library runs, and prints what it demonstrates."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import LLM
from tests.e2e.conftest import Models
from tests.e2e.embedders import CrossEncoder, MiniLM
from tests.e2e.models import CHAT_TEMPLATE, Model
from tests.e2e.processes import descendants, is_hand
from tests.e2e.server import ROOT

EXAMPLES = ROOT / "examples"
MODULES = ["asynchronous", "flags", "offline", "params"]


def example(name: str, *arguments: str | Path) -> list[str]:
    """The lines that an example prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_offline_batch() -> None:
    lines = example("offline_batch.py")
    assert lines[0].startswith("'The capital of France is' -> ' Paris.")
    assert lines[1].startswith("'1, 2, 3, 4,' -> ' 5, 6")
    assert lines[3].startswith("'What is the capital of Norway?' -> 'The capital of Norway is Oslo")


def test_batch_file() -> None:
    norway, colour = example("batch_file.py")
    assert norway.startswith("norway: 'The capital of Norway is Oslo")
    assert len(colour) > len("colour: ''")


def test_streaming() -> None:
    lines = example("streaming.py")
    for number in ("0", "1"):
        own = [line for line in lines if line.startswith(number)]
        assert len(own) > 10
        assert own[-1] == f"{number} finished: length"
    # Both streams run at the same time.
    assert {line[0] for line in lines[:12]} == {"0", "1"}


def test_structured_output() -> None:
    review, landing, _, legs = example("structured_output.py")
    assert review.endswith((" good", " bad"))
    assert re.search(r"-> \d{4}-\d{2}-\d{2}$", landing)
    assert 0 <= int(legs.removeprefix("legs: ")) <= 8


def test_tools() -> None:
    call, answer = example("tools.py")
    assert re.fullmatch(r"call: temperature\((Oslo|Rome)\) -> (4|19) degrees", call)
    assert len(answer) > len("answer: ''")


def test_prefix_caching() -> None:
    found = [re.search(r"(\d+) of (\d+) tokens were cached", line) for line in example("prefix_caching.py")]
    numbers = [(int(one[1]), int(one[2])) for one in found if one]
    assert numbers[0][0] == 0
    assert all(cached > all_tokens // 2 for cached, all_tokens in numbers[1:])


def test_router_of_two() -> None:
    lines = example("router_of_two.py")
    assert len(lines) == 6
    assert [line.rpartition("answered ")[2] for line in lines[4:]] == ["2 requests", "2 requests"]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> MiniLM:
    return MiniLM(tmp_path_factory.mktemp("models") / "minilm")


def test_embeddings_search(minilm: MiniLM) -> None:
    dough, water, pet = example("embeddings_search.py", minilm.path)
    assert "Bread" in dough
    assert "forebay" in water
    assert "cat" in pet


def test_classification(tmp_path: Path, minilm: MiniLM) -> None:
    chosen = [re.fullmatch(r".* -> (sport|food|weather) \((\d\.\d\d)\)", line) for line in example("classification.py")]
    assert len(chosen) == 3
    assert all(chosen)
    labels = example("classification.py", CrossEncoder(tmp_path / "cross", minilm).path)
    assert len(labels) == 6
    assert all(0 <= one <= 1 for line in labels[:3] for one in json.loads(line.rpartition("-> ")[2]))


def test_images(models: Models) -> None:
    lines = example("images.py", models("qwen3-vl").path)
    # The prompt has 64 positions of the image, and the text.
    assert [int(line.split()[0]) > 64 for line in lines] == [True, True]


def of_weights(lines: list[str]) -> tuple[list[tuple[str, str]], str]:
    """The steps of an RL loop with the weights that answered each, and the last line of output."""
    steps = [re.fullmatch(r"step (\d): mean reward (-\d+\.\d\d) by weights '(.*)'", line) for line in lines]
    return [(one[1], one[3]) for one in steps if one], lines[-1]


def test_rl_loop(tiny: Model) -> None:
    """Each step is answered with the weights of the previous step."""
    lines = example("rl_loop.py", tiny.path, "3")
    assert of_weights(lines) == ([("1", "default"), ("2", "step 1"), ("3", "step 2")], "weights: step 3")


def test_rl_loop_goes_on_after_a_hand_has_died(tiny: Model) -> None:
    """Answers and versions equal those of a run without a death."""
    undisturbed = example("rl_loop.py", tiny.path, "5")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-u", str(EXAMPLES / "rl_loop.py"), str(tiny.path), "5"]
    lines = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as loop:
        assert loop.stdout is not None
        for line in loop.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith(("step 1:", "step 3:")):
                [hand] = [pid for pid in descendants(loop.pid) if is_hand(pid)]
                os.kill(hand, signal.SIGKILL)
    assert loop.returncode == 0
    assert lines == undisturbed
    assert of_weights(lines)[1] == "weights: step 5"


def test_rl_loop_of_the_default_model(models: Models, tmp_path: Path) -> None:
    """The trained model gives another answer in the end."""
    smollm2 = models("smollm2")
    smollm2.reference.save_pretrained(tmp_path)
    smollm2.tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    lines = example("rl_loop.py", tmp_path, "2")
    assert of_weights(lines) == ([("1", "default"), ("2", "step 1")], "weights: step 2")
    answers = [line.partition(": ")[2] for line in lines if line.startswith(("before:", "after:"))]
    assert len(set(answers)) == 2


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r'example\("(\w+\.py)"', text))
    assert names == set(re.findall(r"\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))


@pytest.fixture(scope="module")
def names(minilm: MiniLM) -> Iterator[dict[str, LLM]]:
    """The names that examples in docstrings may use."""
    with LLM("smollm2", max_model_len=512) as llm, LLM(str(minilm.path)) as embedder:
        yield {"llm": llm, "embedder": embedder}


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str, names: dict[str, LLM], capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.import_module(f"forebay.llm.{module}")
    results = doctest.testmod(found, extraglobs=names)
    assert results.attempted
    assert not results.failed, capsys.readouterr().out


def test_all_docstrings_with_examples_are_run() -> None:
    modules = {path.stem for path in (ROOT / "python/forebay/llm").glob("*.py") if ">>> " in path.read_text()}
    assert modules == set(MODULES)


def test_the_page_runs(names: dict[str, LLM]) -> None:
    """The first program of docs/python.md, and of the README."""
    page = (ROOT / "docs/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) > 2
    for block in blocks:
        compile(block, "docs/python.md", "exec")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", blocks[0]], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
