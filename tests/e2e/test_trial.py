"""A setting that is tried: it arrives."""

from __future__ import annotations

from tests.e2e.conftest import Serve
from tests.e2e.models import Model


def test_what_is_tried_arrives(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--trial-steps", "5")
    assert server.http.get("/server_info").json()["config"]["trial_steps"] == 5
