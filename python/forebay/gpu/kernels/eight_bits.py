"""8-bit floats (e4m3), stored as bytes.

Conversions use bit operations, because Triton's interpreter rounds them wrongly, and Ampere lacks the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from forebay.gpu.kernels.launch import INTERPRETED

LARGEST = tl.constexpr(448.0)
_UP = tl.constexpr(2.0**120)
_DOWN = tl.constexpr(2.0**-120)
"""The factors that correct the exponent bias: 7 in an 8-bit float, and 127 in float32."""
_NO_NUMBER = tl.constexpr(0x7F)
"""The code of NaN without its sign: all bits are 1."""


@triton.jit
def of_eight_bits(code):
    """Converts 8-bit floats (e4m3) to float32, by moving the bits to their positions in float32. NaN becomes 480."""
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * _UP


@triton.jit
def to_eight_bits(x):
    """Converts float32 up to 448 to 8-bit floats (e4m3), as int32, rounded to nearest even."""
    bits = (x * _DOWN).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) | ((bits >> 24) & 0x80)


@triton.constexpr_function
def has_casts():
    """True if the target GPU has an instruction that converts 8-bit floats: Ada, Hopper and later."""
    return not INTERPRETED and cuda_capability_geq(8, 9)


@triton.jit
def kept(x, pool):
    """Converts float32 x to a pool's element type: bytes are 8-bit floats, clamped to 448. NaN stays NaN."""
    if pool.dtype.element_ty == tl.uint8:
        code = to_eight_bits(tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
        # The minimum of NaN and a number may be either of the two.
        form = tl.where(x == x, code, _NO_NUMBER).to(tl.uint8)
    else:
        form = x
    return form


@triton.jit
def load_kept(at, mask, DOT: tl.constexpr):
    """Loads elements of a pool as type DOT, 0 outside of the mask. DOT represents 8-bit floats exactly."""
    if at.dtype.element_ty == tl.uint8:
        code = tl.load(at, mask=mask, other=0)
        if has_casts():
            # Converted through float32, because the direct instruction from float16 to bfloat16 is slow.
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(DOT)
        else:
            value = tl.where((code & _NO_NUMBER) == _NO_NUMBER, float("nan"), of_eight_bits(code)).to(DOT)
    else:
        value = tl.load(at, mask=mask, other=0.0).to(DOT)
    return value
