"""Kernels for float32 values that are bfloat16 values times one number.

A row of a table: address of the values, their number. ``factor``: the bits of a float32 number.
"""

import triton
import triton.language as tl

from .words import rounded


@triton.jit
def _quotients(x, factor):
    """Divide float32 values, as int32, by a number; the quotients are bfloat16, in the lower half of an int32."""
    quotient = tl.math.div_rn(x.to(tl.float32, bitcast=True), factor.to(tl.float32, bitcast=True))
    return rounded(quotient.to(tl.int32, bitcast=True), True)


@triton.jit
def check(table, found, factor, LANES: tl.constexpr, SPAN: tl.constexpr):
    """Set the first number of a row of ``found`` to 1 if some value is not zero, and the second if one is not such a product."""
    row = table + tl.program_id(1) * 2
    n = tl.load(row + 1)
    start = tl.program_id(0).to(tl.int64) * SPAN
    if start < n:
        values = tl.load(row).to(tl.pointer_type(tl.int32))
        some = tl.zeros((LANES,), tl.int32)
        misses = tl.zeros((LANES,), tl.int32)
        for i in range(SPAN // LANES):
            at = start + i * LANES + tl.arange(0, LANES)
            x = tl.load(values + at, mask=at < n, other=0)
            widened = (_quotients(x, factor) << 16).to(tl.float32, bitcast=True)
            product = (widened * factor.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
            nan = (x & 0x7FFFFFFF) > 0x7F800000  # the product of a NaN depends on the device
            misses = misses | ((product != x) | nan).to(tl.int32)
            some = some | (x != 0).to(tl.int32)
        result = found + tl.program_id(1) * 2
        if tl.max(some) > 0:
            tl.store(result, 1)
        if tl.max(misses) > 0:
            tl.store(result + 1, 1)


@triton.jit
def narrow(table, factor, first, last, SPAN: tl.constexpr):
    """Replace the values from ``first`` to ``last`` by quotients, which begin at the address of the row.

    They overwrite values before ``first`` only, unless ``first`` is 0: then one program has read all before it writes.
    """
    row = table + tl.program_id(0) * 2
    n = tl.minimum(tl.load(row + 1), last)
    start = first + tl.program_id(1).to(tl.int64) * SPAN
    if start < n:
        values = tl.load(row)
        at = start + tl.arange(0, SPAN)
        x = tl.load(values.to(tl.pointer_type(tl.int32)) + at, mask=at < n, other=0)
        tl.debug_barrier()
        tl.store(values.to(tl.pointer_type(tl.int16)) + at, _quotients(x, factor).to(tl.int16), mask=at < n)
