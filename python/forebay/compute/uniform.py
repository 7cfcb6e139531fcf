"""The only source of random numbers: a pure function of a request's seed and a position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014), elementwise, modulo 2^64."""
    z = x + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


def uniform(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns numbers in [0, 1), one for each (seed, position)."""
    bits = splitmix64(seed + position.astype(np.uint64) * _GOLDEN) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53, np.float64)
