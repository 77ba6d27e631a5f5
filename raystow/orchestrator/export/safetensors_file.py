"""The layout of safetensors files: which tensors each contains, at which offsets, and as which dtype. Does no I/O.

A file is 8 bytes of little-endian header length, a JSON header, and the tensors' bytes without a gap
(https://github.com/huggingface/safetensors#format). Tensors are in the order of descending element size, as the reference
implementation writes them, so that each is aligned for its dtype.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ...storage.coding import dtypes
from ...storage.errors import StateError
from ...storage.format.groups import group as group_of
from ...storage.format.json_text import shown, strict_json
from ...storage.limits import MAX_DIMENSIONS, MAX_NAME, MAX_TENSOR
from ...storage.runtime.batches import batches
from ...storage.versions.version import TensorInfo

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
_PAIRS = {"complex128": "F64", "complex32": "F16"}  # with a last dimension of 2: real and imaginary part
_FP4 = "float4_e2m1fn_x2"  # two elements per byte: torch's shape counts bytes, the file's counts elements
_OPAQUE = {1: "U8", 2: "U16"}
_RESERVED = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file to write: ``form`` and ``shape`` as in the header; ``start`` counts from the end of the header."""

    name: str
    info: TensorInfo
    form: str
    shape: tuple[int, ...]
    start: int

    @property
    def mapped(self) -> bool:
        """Whether it is stored as another dtype, since the format lacks its own."""
        return self.info.dtype not in _SAME and not (self.info.dtype == _FP4 and self.form == "F4")


@dataclass(frozen=True)
class SafetensorsFile:
    """One file of a group of tensors, with ``nbytes`` after the header."""

    name: str
    group: str
    tensors: tuple[FileTensor, ...]
    nbytes: int

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the start of the file; its metadata are ``metadata`` and the dtypes of mapped tensors."""
        mapped = {tensor.name: tensor.info.dtype for tensor in self.tensors if tensor.mapped}
        fields: dict[str, object] = {
            _RESERVED: {"format": "pt", **metadata, **({"raystow.dtypes": json.dumps(mapped)} if mapped else {})}
        }
        for tensor in self.tensors:
            offsets = [tensor.start, tensor.start + tensor.info.nbytes]
            fields[tensor.name] = {"dtype": tensor.form, "shape": tensor.shape, "data_offsets": offsets}
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def files(tensors: Mapping[str, TensorInfo], *, limit: int) -> list[SafetensorsFile]:
    """Plan the files for all tensors: one per group, or numbered ones of at most ``limit`` bytes or a single tensor."""
    if _RESERVED in tensors:
        what = "a safetensors file cannot contain a tensor of this name"
        raise StateError(what, subject=_RESERVED, remedy="read it with raystow.open")
    planned = []
    for group in sorted(set(map(group_of, tensors))):  # by name: derived weights share the packs of their sources
        planned += group_files(group, {name: info for name, info in tensors.items() if group_of(name) == group}, limit=limit)
    return planned


def group_files(group: str, tensors: Mapping[str, TensorInfo], *, limit: int) -> list[SafetensorsFile]:
    """Plan the file of one group, or its numbered files of at most ``limit`` bytes or a single tensor."""
    parts = [*batches(tensors.items(), lambda item: item[1].nbytes, limit)] or [[]]
    names = [f"{group}-{number:05d}-of-{len(parts):05d}" for number in range(1, len(parts) + 1)] if len(parts) > 1 else [group]
    return [_file(f"{name}.safetensors", group, dict(part)) for name, part in zip(names, parts, strict=True)]


def _file(name: str, group: str, tensors: Mapping[str, TensorInfo]) -> SafetensorsFile:
    planned, end = [], 0
    for key, info in sorted(tensors.items(), key=lambda item: (-dtypes.dtype(item[1].dtype).itemsize, item[0])):
        planned.append(FileTensor(key, info, *_form(info), end))
        end += info.nbytes
    return SafetensorsFile(name, group, tuple(planned), end)


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
class SourceTensor:
    """A tensor in a file that is read: torch's name of its dtype, shape, and its bytes, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_size(start: bytes, nbytes: int) -> int:
    """Return the bytes of the header after the first 8 of a file of ``nbytes``.

    Raises:
        StateError: it is not a safetensors file.
    """
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= size <= min(_MAX_HEADER, nbytes - 8):
        raise StateError("is not a safetensors file")
    return int(size)


def source_tensors(header: bytes, nbytes: int) -> list[SourceTensor]:
    """Parse the header of a file of ``nbytes``; the tensors in the order of their bytes.

    Raises:
        StateError: the header is invalid, or its tensors do not fill the file.
    """
    try:
        fields = strict_json(header.decode())
        mapped = strict_json(fields.pop(_RESERVED, {}).get("raystow.dtypes", "{}"))
        found = [_source_tensor(name, entry, mapped.get(name), 8 + len(header)) for name, entry in fields.items()]
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise StateError(f"has an invalid header: {error!r:.200}") from error
    found.sort(key=lambda tensor: (tensor.start, tensor.end))
    ends = [8 + len(header), *(tensor.end for tensor in found)]
    if [tensor.start for tensor in found] != ends[:-1] or ends[-1] != nbytes:
        raise StateError("the tensors in the header do not fill the file", remedy="copy it again: it may be truncated")
    return found


def _source_tensor(name: str, entry: Mapping[str, object], mapped: str | None, base: int) -> SourceTensor:
    name.encode()  # a UnicodeEncodeError, which is a ValueError, for half of a surrogate pair
    form, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shown(shape)}")
    if len(name) > MAX_NAME:
        raise ValueError(f"a name of more than {MAX_NAME} characters")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int for n in offsets):
        raise ValueError(f"offsets {shown(offsets)}")
    if mapped in _PAIRS and form == _PAIRS[mapped] and shape[-1:] == [2]:
        own, shape = mapped, shape[:-1]
    elif mapped is not None:
        own = mapped
    elif form == "F4" and shape:
        own, shape = _FP4, [*shape[:-1], shape[-1] // 2]
    else:
        own = {file: ours for ours, file in _SAME.items()}.get(str(form), "")
    if own not in dtypes.DTYPES:
        raise ValueError(f"unknown dtype {form!r:.40} of {name!r:.80}")
    start, end = offsets
    if end - start != math.prod(shape) * dtypes.dtype(own).itemsize:
        raise ValueError(f"{name!r:.80} does not fill its bytes")
    if math.prod(filter(None, shape)) * dtypes.dtype(own).itemsize > MAX_TENSOR:  # numpy checks this of empty tensors, too
        raise ValueError(f"shape {shown(shape)}")
    return SourceTensor(name, own, tuple(shape), base + start, base + end)
