"""Flags of simulated devices: the time that their steps take, and their scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.client import Json

SIM = ("--device", "sim")


def profile(folder: Path, step_us: float, kv_tokens: int = 4096, load_s: float = 0.0, token_us: float = 0.0) -> Path:
    """Writes a profile: loading takes `load_s`, and a step `step_us` plus `token_us` for each of its tokens."""
    path = folder / "profile.toml"
    facts = 'origin = "made up for a test"\ndevice = "a test\'s"\nmodel = "any"\n'
    sizes = f"kv_tokens = {kv_tokens}\nload_s = {load_s:.1f}\n"
    path.write_text(f"{facts}{sizes}\n[time]\nstep_us = {step_us:.1f}\ntoken_us = {token_us:.1f}\n")
    return path


def paced(folder: Path, step_us: float, kv_tokens: int = 4096, load_s: float = 0.0) -> tuple[str, str]:
    """Flags of a device with this profile."""
    return "--sim-profile", str(profile(folder, step_us, kv_tokens, load_s))


def scripted(folder: Path, text: str) -> tuple[str, str]:
    """Flags of a device that follows a script; each line of `text` has one answer."""
    file = folder / "script.jsonl"
    file.write_text(text)
    return "--sim-script", str(file)


def lines(values: Iterable[Json]) -> str:
    """JSON lines of the values."""
    return "".join(json.dumps(value) + "\n" for value in values)
