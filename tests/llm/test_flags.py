"""Keyword arguments become flags of `forebay serve`."""

import re
from pathlib import Path
from typing import Any

import pytest

from forebay.llm.flags import ON_BY_DEFAULT, command_line
from tests.structure.repository import ROOT


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"max_model_len": 512}, ["--max-model-len=512"]),
        ({"enforce_eager": True, "trust_remote_code": False, "seed": None}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name=a", "--served-model-name=b"]),
        ({"hisparse_config": {"top_k": 4}}, ['--hisparse-config={"top_k": 4}']),
        (
            {"chat_template": Path("x.jinja"), "mem_fraction_static": 0.5},
            ["--chat-template=x.jinja", "--mem-fraction-static=0.5"],
        ),
    ],
)
def test_values(flags: dict[str, Any], line: list[str]) -> None:
    assert command_line(flags) == line


@pytest.mark.parametrize("name", ["port", "uds", "host", "api_key", "ssl_certfile", "parent"])
def test_the_socket_is_the_librarys_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        command_line({name: "x"})


def test_a_value_that_is_no_flags_value_is_named() -> None:
    with pytest.raises(ValueError, match="`dtype`"):
        command_line({"dtype": object()})


def test_every_switch_that_is_on_can_be_turned_off() -> None:
    """The switches of the command line, and those of other servers that it accepts."""
    page = (ROOT / "docs/cli.md").read_text().split("## forebay serve")[1].split("## forebay route")[0]
    own = set(re.findall(r"--no-([a-z-]+)", page))
    foreign = set(re.findall(r'"--no-([a-z-]+)"', (ROOT / "crates/forebay/src/flags/foreign.rs").read_text()))
    assert own | foreign == ON_BY_DEFAULT
