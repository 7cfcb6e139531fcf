"""The systemd unit, checked without running systemd as the first process."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from tests.deploy.tools import DEPLOY, tool, unknown_flags

SYSTEMD = DEPLOY / "systemd"
UNIT = (SYSTEMD / "forebay.service").read_text(encoding="utf-8")
# The exposure in `systemd-analyze security`, from 0 (all locked) to 10. Below 2 the command prints OK.
MOST_EXPOSURE = 1.9


def values(name: str, text: str = UNIT) -> list[str]:
    """All values of a setting in the unit."""
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def arguments() -> list[str]:
    """The arguments of the server in the example of an environment file."""
    (line,) = values("FOREBAY_ARGS", (SYSTEMD / "forebay.env").read_text(encoding="utf-8"))
    return shlex.split(line)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Each setting is known and has a valid value."""
    unit = tmp_path / "forebay.service"
    # The program is not installed at its path here.
    unit.write_text(UNIT.replace("/opt/forebay/bin/forebay", "/bin/true"))
    overrides = tmp_path / "forebay.service.d"
    overrides.mkdir()
    (overrides / "gpu.conf").write_bytes((SYSTEMD / "forebay-gpu.conf").read_bytes())
    command = [tool("systemd-analyze"), "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = [line for line in done.stderr.splitlines() if "forebay" in line or "gpu.conf" in line]
    assert (done.returncode, found) == (0, [])


def test_a_wrong_setting_is_seen(tmp_path: Path) -> None:
    unit = tmp_path / "forebay.service"
    unit.write_text(UNIT.replace("/opt/forebay/bin/forebay", "/bin/true").replace("ProtectHome=", "ProtectHouse="))
    command = [tool("systemd-analyze"), "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ProtectHouse" in done.stderr


def test_little_is_exposed() -> None:
    unit = SYSTEMD / "forebay.service"
    command = [tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"Overall exposure level for forebay.service: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= MOST_EXPOSURE


def test_the_environment_file_has_flags_that_are_there() -> None:
    assert values("ExecStart") == ["/opt/forebay/bin/forebay serve $FOREBAY_ARGS"]
    assert unknown_flags("serve", arguments()) == []
    text = (SYSTEMD / "forebay.env").read_text(encoding="utf-8")
    assert {"FOREBAY_API_KEY", "FOREBAY_ADMIN_API_KEY", "FOREBAY_ROUTER_KEY", "HF_TOKEN"} <= set(
        re.findall(r"^#(\w+)=$", text, re.MULTILINE)
    )


def test_a_stop_has_ten_seconds_more_than_the_drain() -> None:
    drain = int(arguments()[arguments().index("--drain-timeout") + 1])
    assert values("TimeoutStopSec") == [str(drain + 10)]
    assert values("KillSignal") == ["SIGTERM"]
    # systemd sends SIGTERM only to the brain, which stops its hands.
    assert values("KillMode") == ["mixed"]


def test_what_is_written_lies_in_the_cache() -> None:
    (cache,) = values("CacheDirectory")
    environment = " ".join(values("Environment"))
    paths = re.findall(r"=(\S+)", environment)
    assert len(paths) == 3
    assert all(path.startswith(f"/var/cache/{cache}") for path in paths)
    assert values("ProtectSystem") == ["strict"]
