"""8-bit floats (e4m3), whose codes are bytes in memory.

Conversions are done with bit operations, since Triton's interpreter rounds them wrongly and Ampere lacks the
instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from forebay.gpu.kernels.launch import INTERPRETED

LARGEST = tl.constexpr(448.0)
_UP = tl.constexpr(2.0**120)
_DOWN = tl.constexpr(2.0**-120)
"""The factor that corrects the exponents' biases: 7 in an 8-bit float, and 127 in float32."""
_NO_NUMBER = tl.constexpr(0x7F)
"""The code of NaN, without its sign: all bits."""


@triton.jit
def of_eight_bits(code):
    """float32 of 8-bit floats (e4m3). Bits are moved to their places in float32. NaN becomes 480."""
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * _UP


@triton.jit
def to_eight_bits(x):
    """8-bit floats (e4m3), as int32, of float32 up to 448. They are rounded to nearest, ties to even."""
    bits = (x * _DOWN).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) | ((bits >> 24) & 0x80)


@triton.constexpr_function
def has_casts():
    """True if the target GPU has an instruction that converts these floats: Ada, Hopper and later."""
    return not INTERPRETED and cuda_capability_geq(8, 9)


@triton.jit
def kept(x, pool):
    """float32 x in the form of a pool's elements: bytes are 8-bit floats, up to 448. NaN stays NaN."""
    if pool.dtype.element_ty == tl.uint8:
        code = to_eight_bits(tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
        # A minimum of NaN and a number may be either of them.
        form = tl.where(x == x, code, _NO_NUMBER).to(tl.uint8)
    else:
        form = x
    return form


@triton.jit
def load_kept(at, mask, DOT: tl.constexpr):
    """Elements of a pool in the type DOT, 0 outside of the mask. Bytes are 8-bit floats, all of which DOT has."""
    if at.dtype.element_ty == tl.uint8:
        code = tl.load(at, mask=mask, other=0)
        if has_casts():
            # Through float32: the direct instruction from float16 to bfloat16 is slow.
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(DOT)
        else:
            value = tl.where((code & _NO_NUMBER) == _NO_NUMBER, float("nan"), of_eight_bits(code)).to(DOT)
    else:
        value = tl.load(at, mask=mask, other=0.0).to(DOT)
    return value
