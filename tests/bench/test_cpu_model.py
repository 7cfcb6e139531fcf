from __future__ import annotations

import pytest

from benchmarks import cpu_model, tables

XEON = "flags\t\t: fpu avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [(XEON, "cpu_model_amx"), (XEON.replace("amx", "anx"), "cpu_model"), ("", "cpu_model")],
)
def test_processors_with_and_without_tiles_have_tables_of_their_own(cpuinfo: str, name: str) -> None:
    assert cpu_model.results_name("smollm2", cpuinfo) == name
    assert name in tables.registered()
