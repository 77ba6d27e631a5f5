"""The element types that a repository can hold, by the names torch gives them, and how their bytes are laid out.

Torch and numpy objects are converted to and from these names at the edges; the format knows only the names and this table.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  gives numpy the names of bfloat16 and fp8
import numpy as np

from ..errors import Unsupported


@dataclass(frozen=True)
class DType:
    """``itemsize``: bytes per element. ``width``: bytes per word of the plane transform. ``rotate``: whether words are floats
    whose sign bit is moved out of the exponent's way."""

    name: str
    itemsize: int
    width: int
    rotate: bool

    @property
    def is_float(self) -> bool:
        """Whether words have exponents."""
        return self.rotate or self.name.startswith("float8")


_FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_COMPLEX = {"complex32": 4, "complex64": 8, "complex128": 16}
_INTS = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
_BYTES = (
    "bool",
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
    *("bits8", "bits1x8", "bits2x4", "bits4x2"),
)

DTYPES: dict[str, DType] = {
    **{name: DType(name, size, size, True) for name, size in _FLOATS.items()},
    **{name: DType(name, size, size // 2, True) for name, size in _COMPLEX.items()},
    **{name: DType(name, size, size, False) for name, size in _INTS.items()},
    **{name: DType(name, 1, 1, False) for name in _BYTES},
    "bits16": DType("bits16", 2, 2, False),
}
"""Every dtype that format version 1 defines."""

MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
"""What can be rounded, and the bits of its mantissas. Integers, booleans and what has fewer bits stay as they are."""


def dtype(name: str) -> DType:
    """The entry for ``name``. Raises ``Unsupported`` if format version 1 has none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise Unsupported(f"dtype {name!r} is not known to format version 1", remedy="upgrade raystow") from None


def to_numpy(name: str) -> np.dtype[np.generic]:
    """The numpy type of ``name`` (bfloat16 and fp8 through ml_dtypes). For types that numpy lacks, such as complex32 or the
    packed ones, the unsigned integer of that size."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(f"u{dtype(name).itemsize}")


def of_numpy(array_dtype: np.dtype[np.generic]) -> str | None:
    """The name of a numpy dtype, or None if the format has no such type (objects, strings, dates, long double, records)."""
    name = str(array_dtype.name)
    if name not in DTYPES or array_dtype.itemsize != DTYPES[name].itemsize or not array_dtype.isnative:
        return None
    return name
