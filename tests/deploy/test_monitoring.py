"""The dashboard, the alerts, and how Prometheus and Grafana find them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import dashboard, dashboard_expressions, rules
from tests.deploy.tools import DEPLOY, run

GRAFANA = DEPLOY / "grafana"
PROMETHEUS = DEPLOY / "prometheus"
# Values in place of Grafana's variables, so that Prometheus can parse the expressions.
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*", "$model_name": ".*", "$engine": ".*"}
VARIABLES["$router_job"] = ".*"


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_dashboard_is_what_its_table_says() -> None:
    done = subprocess.run([sys.executable, GRAFANA / "make_dashboard.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_panels_lie_beside_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, panel["title"]
        cells |= mine


def test_the_dashboard_has_what_operators_look_for() -> None:
    text = " ".join(expression for _, expression in dashboard_expressions())
    for part in (
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:hisparse_host_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "forebay:device_gap_seconds_total",
        "forebay:steps_total",
        "forebay:hand_deaths_total",
        "sglang:hicache_host_used_tokens",
        "forebay_router_backend_requests",
    ):
        assert part in text


def test_variables_of_the_dashboard_are_known_to_it() -> None:
    names = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert names - {"datasource"} == {name[1:] for name in VARIABLES if not name.startswith("$__")}


def test_prometheus_understands_every_panel(tmp_path: Path) -> None:
    records = []
    for number, (_, expression) in enumerate(dashboard_expressions()):
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        assert "$" not in expression, expression
        records.append({"record": f"panel:{number}", "expr": expression})
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    assert f"{len(records)} rules found" in run("promtool", "check", "rules", file)


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 10
    for rule in alerts:
        assert rule["labels"]["severity"] in {"warning", "critical"}, rule
        assert set(rule["annotations"]) == {"summary", "description"}, rule


def test_each_alert_has_a_case_for_and_one_against() -> None:
    tested: dict[str, set[bool]] = {}
    for test in loaded(PROMETHEUS / "rules_test.yml")["tests"]:
        for case in test["alert_rule_test"]:
            tested.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert tested == {rule["alert"]: {True, False} for rule in rules() if "alert" in rule}


def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in run("promtool", "test", "rules", "rules_test.yml", cwd=PROMETHEUS)


def test_prometheus_takes_its_configuration() -> None:
    run("promtool", "check", "config", "prometheus.yml", cwd=PROMETHEUS)


def test_jobs_are_those_that_the_alerts_name() -> None:
    jobs = {job["job_name"] for job in loaded(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    assert jobs == {"forebay", "forebay-router"}
    assert loaded(PROMETHEUS / "prometheus.yml")["rule_files"] == ["rules.yml"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = loaded(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus"
    interval = loaded(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    compose = loaded(DEPLOY / "docker/compose.yaml")["services"]
    assert source["url"] in {f"http://{name}:9090" for name in compose}
    (provider,) = loaded(GRAFANA / "provisioning/dashboards/forebay.yaml")["providers"]
    mounted = [volume.split(":")[1] for volume in compose["grafana"]["volumes"] if "forebay.json" in volume]
    assert [str(Path(path).parent) for path in mounted] == [provider["options"]["path"]]


@pytest.mark.parametrize("name", ["forebay.json", "make_dashboard.py"])
def test_the_dashboard_names_no_server(name: str) -> None:
    text = (GRAFANA / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "localhost" not in text
