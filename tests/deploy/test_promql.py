"""The reader of expressions finds their metrics and labels."""

from __future__ import annotations

import pytest

from tests.deploy.promql import deployed, uses


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("up", [("up", set())]),
        ('vllm:x{job=~"a",engine="0"}', [("vllm:x", {"engine"})]),
        ("sum by (le, kind) (rate(a_bucket[5m]))", [("a_bucket", {"kind"})]),
        ('sum(rate(a{b!="{x}"}[$__rate_interval])) / (sum(c) > 0)', [("a", {"b"}), ("c", set())]),
        ("a and on (job) b or vector(0)", [("a", set()), ("b", set())]),
        ("histogram_quantile(0.99, sum(a_bucket)) > 5", [("a_bucket", set())]),
        ("max(a) - min (b)", [("a", set()), ("b", set())]),
        ("a == bool 0", [("a", set())]),
    ],
)
def test_metrics_and_labels(expression: str, expected: list[tuple[str, set[str]]]) -> None:
    assert [(use.metric, set(use.labels)) for use in uses(expression, "")] == expected


def test_much_is_deployed() -> None:
    names = {use.metric for use in deployed()}
    assert {"vllm:num_requests_waiting", "forebay:hand_deaths_total", "forebay_router_backend_up"} <= names
    assert {use.where.split()[0] for use in deployed()} == {"panel", "variable", "rule", "adapter"}
    assert len(names) > 40
