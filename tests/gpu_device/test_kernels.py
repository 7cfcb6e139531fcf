"""Every operator's kernels on a GPU at the shapes of published models, with other inputs in each run."""

from __future__ import annotations

import os
import random

import pytest
import torch

from forebay.gpu import kernels
from tests.gpu.checks.real import Case, cases

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.randrange(1 << 31)))
CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case) -> None:
    # Shown with a failure, which the variable brings back.
    print(f"FOREBAY_TEST_SEED={SEED}")
    case.check(kernels, torch.device("cuda", 0), SEED)
    # A wrong address is told here, and not by a later test.
    torch.cuda.synchronize()
