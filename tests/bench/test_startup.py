from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import startup, tables
from benchmarks.records import Results, Run
from benchmarks.servers import BY_KEY, FOREBAY, ROOT


def test_the_table_compares_with_the_first_server_round_by_round() -> None:
    machine = {"cpu": "c", "cores": 2, "memory_gib": 1, "kernel": "6", "python": "3", "torch": "2", "forebay": "0"}
    found = Results(benchmark="startup", machine={**machine, "commit": "abc"}, rounds=2)
    for number, slow in ((1, 1.0), (2, 3.0)):
        for state, seconds in ((startup.COLD, 8.0), (startup.WARM, 2.0)):
            for server, factor in (("a", 1.0), ("b", 4.0)):
                taken = seconds * slow * factor
                values = {"ready_seconds": taken - 1.0, "first_token_seconds": taken}
                found.runs.append(Run(state, server, number, values))
    table = tables.render(found)
    assert "| on disk | b | 63.0 | 64.0 | 4.00 |" in table
    assert "| in memory | a | 3.00 | 4.00 | 1.00 |" in table


def test_what_is_forgotten_is_the_environment_of_the_program_and_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, weights = tmp_path / ".venv", tmp_path / "models"
    for path in (environment / "bin/forebay", environment / "lib/torch.so", weights / "x", tmp_path / "python/a.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "elsewhere").write_bytes(b"x")
    (environment / "lib/link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(startup, "ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.models.MODELS", weights)
    monkeypatch.setattr("benchmarks.servers.FOREBAY", tmp_path / FOREBAY.relative_to(ROOT))
    found = list(startup.files(BY_KEY["forebay"]))
    assert {str(path.relative_to(tmp_path)) for path in found} == {
        ".venv/bin/forebay",
        ".venv/lib/torch.so",
        "models/x",
        "python/a.py",
    }
    startup.evict(iter(found))
    assert found[0].read_bytes() == b"x"
