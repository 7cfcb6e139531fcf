"""`forebay doctor`: its checks, and when it reports that nothing can be served."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.installed import PACKAGES, installed
from tests.e2e.hub_server import Hub, serve
from tests.e2e.server import BINARY

LOOKED_AT = [
    "system", "processor", "CPU kernels", "cgroup limits", "memory", "huge pages", "GPU", "open files",
    "Python", "PyTorch", "models", "cache", "hub",
]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(Hub("org/name", tmp_path)) as hub:
        yield hub


def doctor(hub: Hub, home: Path, *flags: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    kept |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "FOREBAY_CACHE": str(home), "NO_PROXY": "127.0.0.1"}
    command = [str(BINARY), "doctor", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, env=kept | variables, timeout=60, check=False)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_a_machine_that_runs_the_tests_serves(hub: Hub, tmp_path: Path) -> None:
    done = doctor(hub, tmp_path, "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["serves"] is True
    found = findings(done)
    assert list(found) == LOOKED_AT
    assert found["Python"]["says"].startswith(str(installed()["python"]))
    assert found["PyTorch"]["says"] == installed()["torch"]
    assert str(tmp_path) in found["models"]["says"]
    assert found["hub"] == {"what": "hub", "state": "ok", "says": f"{hub.endpoint} answers; no HF_TOKEN is set"}
    assert all(finding["advice"] for finding in found.values() if finding["state"] != "ok")


def test_it_is_a_table_for_people(hub: Hub, tmp_path: Path) -> None:
    lines = doctor(hub, tmp_path).stdout.splitlines()
    assert [line[6:20].strip() for line in lines if line[:4] in ("ok  ", "note", "FAIL")] == [
        what[:14].strip() for what in LOOKED_AT
    ]


def test_a_token_is_tried(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    assert findings(doctor(hub, tmp_path, "--json", HF_TOKEN="secret"))["hub"]["says"].endswith("takes HF_TOKEN")
    refused = findings(doctor(hub, tmp_path, "--json", HF_TOKEN="other"))["hub"]
    assert (refused["state"], refused["says"]) == ("note", f"{hub.endpoint} answers, and does not take HF_TOKEN")


def test_a_hub_that_is_away_keeps_nobody_from_serving(hub: Hub, tmp_path: Path) -> None:
    with serve(Hub("org/name", tmp_path)) as gone:
        nowhere = gone.endpoint
    done = doctor(hub, tmp_path, "--json", HF_ENDPOINT=nowhere)
    assert done.returncode == 0
    assert findings(done)["hub"]["state"] == "note"
    hub.requests.clear()
    assert findings(doctor(hub, tmp_path, "--json", "--offline"))["hub"]["says"].endswith("offline")
    assert not hub.requests


def test_a_processor_needs_no_python(hub: Hub, tmp_path: Path) -> None:
    done = doctor(hub, tmp_path, "--json", "--python", "/nowhere/python3")
    assert (done.returncode, done.stderr) == (0, "")
    assert findings(done)["Python"]["state"] == "note"

    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\necho '" + json.dumps({**dict.fromkeys(PACKAGES), "python": "3.9.1"}) + "'\n")
    bare.chmod(0o755)
    done = doctor(hub, tmp_path, "--json", "--python", bare)
    assert (done.returncode, done.stderr) == (0, "")
    found = findings(done)
    assert [found[what]["state"] for what in ("Python", "PyTorch")] == ["note", "note"]
