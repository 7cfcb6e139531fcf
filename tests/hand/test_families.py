"""Every family has tests: the tests' lists of models are compared with the table that is made from `families::ALL`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.hand import image_models, recurrent_models
from tests.hand.named_files import ARCHITECTURES
from tests.hand.named_models import NAMED
from tests.hand.support import FAMILIES
from tests.hand.test_gguf_experts import MODELS
from tests.hand.test_rust_hand import PARITY
from tests.hand.torch_models import TORCH_NAMED
from tests.hand.whole_models import WHOLE
from tests.structure.repository import ROOT

_ROW = re.compile(r"\| [^|]+ \| `(\w+)` \| [^|]+ \| [^|]+ \| ([^|]+) \| ([^|]+) \| \w+ \|")
CONFIGS = FAMILIES | image_models.FAMILIES | image_models.GEMMAS | NAMED | TORCH_NAMED | recurrent_models.MODELS | WHOLE
"""Test configs by name, each with its class of transformers."""
OF_TINY_FILES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Families whose GGUF files tests/hand/test_quantised.py writes."""


@dataclass(frozen=True)
class Row:
    """A family's row in the table."""

    gguf: bool
    compiled: bool


def table() -> dict[str, Row]:
    """The families of docs/features.md by architecture. A test of crates/weights compares them with the code."""
    page = (ROOT / "docs/features.md").read_text()
    rows = page.split("<!-- families:")[1].split("<!-- end -->")[0]
    return {
        name: Row("GGUF" in weights, computed == "compiled kernels") for name, weights, computed in _ROW.findall(rows)
    }


def own_names(kind: type) -> set[str]:
    """The architecture names of a class of transformers. The hub may leave out underscores."""
    return {kind.__name__, kind.__name__.replace("_", "")}


@pytest.mark.parametrize("architecture", table())
def test_each_family_is_held_against_transformers(architecture: str) -> None:
    configs = [config for kind, config in CONFIGS.values() if architecture in own_names(kind)]
    assert configs, "tests/hand/support.py has no config of this family"


@pytest.mark.parametrize("architecture", [name for name, row in table().items() if row.compiled])
def test_each_compiled_family_is_held_against_the_other_hand(architecture: str) -> None:
    models = [NAMED, TORCH_NAMED, WHOLE, recurrent_models.MODELS]
    named = [model for of in models for model in of.values()]
    kinds = [(FAMILIES | MODELS)[name][0].__name__ for name in PARITY] + [kind.__name__ for kind, _ in named]
    assert any(architecture in (kind, kind.replace("_", "")) for kind in kinds), "no test compares the hands"


@pytest.mark.parametrize("architecture", [name for name, row in table().items() if row.gguf])
def test_each_family_with_gguf_files_is_read_from_one(architecture: str) -> None:
    named = {(NAMED | TORCH_NAMED)[name][0].__name__ for name in ARCHITECTURES}
    named |= {WHOLE["gemma-file"][0].__name__}
    named |= {recurrent_models.MODELS[name][0].__name__ for name in recurrent_models.GGUF}
    assert architecture in OF_TINY_FILES | {kind.__name__ for kind, _ in MODELS.values()} | named
