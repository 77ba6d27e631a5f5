"""The safetensors format: which tensors go into which file, where, and under what dtype. Pure; reads and writes nothing.

A file is 8 bytes of little-endian header length, a JSON header, and the tensors' bytes without a gap
(https://github.com/huggingface/safetensors#format). Tensors lie in the order of falling element size, as the reference
implementation writes them, so that each is aligned for its type.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.format.groups import group as group_of
from ...storage.limits import MAX_DIMENSIONS
from ...storage.version import TensorInfo

_SAME = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_PAIRS = {"complex128": "F64", "complex32": "F16"}  # a last dimension of 2 is added: real and imaginary part
_FP4 = "float4_e2m1fn_x2"  # two elements in a byte: torch's shape counts bytes, the file's counts elements
_OPAQUE = {1: "U8", 2: "U16"}
_RESERVED = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes; the reference implementation takes no more


@dataclass(frozen=True)
class Placed:
    """A tensor in a file. ``form`` and ``shape`` are what the header says; ``start`` counts from the end of the header."""

    name: str
    info: TensorInfo
    form: str
    shape: tuple[int, ...]
    start: int

    @property
    def mapped(self) -> bool:
        """Whether it is stored under another type than its own, since the format has none for it."""
        return self.info.dtype not in _SAME and not (self.info.dtype == _FP4 and self.form == "F4")


@dataclass(frozen=True)
class File:
    """One file of a group of tensors, ``nbytes`` of them after the header."""

    name: str
    group: str
    tensors: tuple[Placed, ...]
    nbytes: int

    def header(self, about: Mapping[str, str]) -> bytes:
        """The file's beginning; ``about`` becomes its metadata, beside what tells mapped dtypes."""
        mapped = {placed.name: placed.info.dtype for placed in self.tensors if placed.mapped}
        fields: dict[str, object] = {
            _RESERVED: {"format": "pt", **about, **({"raystow.dtypes": json.dumps(mapped)} if mapped else {})}
        }
        for placed in self.tensors:
            offsets = [placed.start, placed.start + placed.info.nbytes]
            fields[placed.name] = {"dtype": placed.form, "shape": placed.shape, "data_offsets": offsets}
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def files(tensors: Mapping[str, TensorInfo], *, limit: int) -> list[File]:
    """Files for all tensors: one for each group, or several numbered ones of at most ``limit`` bytes (or a single tensor)."""
    if _RESERVED in tensors:
        raise StateError(
            "a safetensors file cannot hold a tensor of this name", subject=_RESERVED, remedy="read it with raystow.open"
        )
    made = []
    for group in sorted(set(map(group_of, tensors))):  # by their names: what weights are derived from shares their packs
        parts = list(_split({name: info for name, info in tensors.items() if group_of(name) == group}, limit))
        for number, part in enumerate(parts, 1):
            name = f"{group}.safetensors" if len(parts) == 1 else f"{group}-{number:05d}-of-{len(parts):05d}.safetensors"
            made.append(_file(name, group, part))
    return made


def _split(tensors: Mapping[str, TensorInfo], limit: int) -> Iterator[dict[str, TensorInfo]]:
    part: dict[str, TensorInfo] = {}
    used = 0
    for name, info in tensors.items():
        if part and used + info.nbytes > limit:
            yield part
            part, used = {}, 0
        part[name] = info
        used += info.nbytes
    yield part


def _file(name: str, group: str, tensors: Mapping[str, TensorInfo]) -> File:
    placed, end = [], 0
    for key, info in sorted(tensors.items(), key=lambda item: (-dtypes.dtype(item[1].dtype).itemsize, item[0])):
        form, shape = _form(info)
        placed.append(Placed(key, info, form, shape, end))
        end += info.nbytes
    return File(name, group, tuple(placed), end)


def _form(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape in the file."""
    if info.dtype in _SAME:
        return _SAME[info.dtype], info.shape
    if info.dtype in _PAIRS:
        return _PAIRS[info.dtype], (*info.shape, 2)
    if info.dtype == _FP4 and info.shape:
        return "F4", (*info.shape[:-1], 2 * info.shape[-1])
    return _OPAQUE[dtypes.dtype(info.dtype).itemsize], info.shape


@dataclass(frozen=True)
class Listed:
    """A tensor of a file that is read: its own dtype by torch's name, its shape, and its bytes, counted from the file's begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_size(begin: bytes, nbytes: int) -> int:
    """The bytes of the header after the first 8, of a file of ``nbytes``; ``StateError`` if it cannot be such a file."""
    size = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
    if not 2 <= size <= min(_MAX_HEADER, nbytes - 8):
        raise StateError("is not a safetensors file")
    return int(size)


def listed(header: bytes, nbytes: int) -> list[Listed]:
    """The tensors of a file of ``nbytes`` in the order of their bytes, as ``File.header`` has written them; ``StateError`` unless
    they fill the file."""
    try:
        fields = json.loads(header)
        about = fields.pop(_RESERVED, {})
        mapped = json.loads(about.get("raystow.dtypes", "{}"))
        found = [_listed(name, entry, mapped.get(name), 8 + len(header)) for name, entry in fields.items()]
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise StateError(f"the header of the file makes no sense: {error!r:.200}") from error
    found.sort(key=lambda tensor: (tensor.start, tensor.end))
    ends = [8 + len(header), *(tensor.end for tensor in found)]
    if [tensor.start for tensor in found] != ends[:-1] or ends[-1] != nbytes:
        raise StateError("the tensors that the header lists do not fill the file", remedy="copy it again: it may have been cut")
    return found


def _listed(name: str, entry: Mapping[str, Any], mapped: str | None, base: int) -> Listed:
    form, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape!r:.80}")
    if mapped in _PAIRS and form == _PAIRS[mapped] and shape[-1:] == [2]:
        own, shape = mapped, shape[:-1]
    elif mapped is not None:
        own = mapped
    elif form == "F4" and shape:
        own, shape = _FP4, [*shape[:-1], shape[-1] // 2]
    else:
        own = {file: ours for ours, file in _SAME.items()}.get(str(form), "")
    if own not in dtypes.DTYPES or type(start) is not int or type(end) is not int:
        raise ValueError(f"dtype {form!r:.40} of {name!r:.80} is not known")
    if end - start != math.prod(shape) * dtypes.dtype(own).itemsize:
        raise ValueError(f"{name!r:.80} does not fill its bytes")
    return Listed(name, own, tuple(shape), base + start, base + end)
