"""Every operator's kernels on a GPU at the shapes of published models, with new inputs in each run."""

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
    # pytest shows this line with a failure. The variable repeats the inputs.
    print(f"FOREBAY_TEST_SEED={SEED}")
    case.check(kernels, torch.device("cuda", 0), SEED)
    # A wrong address fails here, and not in a later test.
    torch.cuda.synchronize()
