"""Parses GGUF files (versions 2 and 3, little endian) that nobody vouches for.

Every count, length and offset is compared with what is left of the file before it is
used, so a hostile header costs neither memory nor time. Refuses types that we cannot
unpack, by name, and headers far larger than any model's.
"""

import dataclasses
import math
import pathlib
import struct
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.configs.errors import LoadError
from octavo.models_flax.checkpoint.gguf_unpack import PACKED
from octavo.models_flax.checkpoint.tensors import DTYPES, map_file

SUPPORTED = (*DTYPES, *PACKED)
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_ENTRIES = 1 << 22  # of all arrays together; a vocabulary of 262,144 with its scores and merges has 1.3 million
MAX_DIMS = 4
MAX_DEPTH = 4  # of arrays in arrays
MAX_NAME = 65535  # characters of a key or tensor name
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor's place in the file; `shape` is row-major, as Hugging Face writes it."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


class GGUFFile:
    """One file, its header parsed and checked.

    Attributes:
      metadata: key -> number, string, bool or list of those.
      tensors: by the file's own names.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._memory = map_file(path)
        self._position = 0
        self._entries_left = MAX_ENTRIES
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except LoadError as error:
            raise LoadError(f"{path.name}: {error}") from error

    def data(self, name: str) -> np.ndarray:
        """The bytes of one tensor: a read-only view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._memory, np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _parse(self) -> None:
        if self._take(4) != b"GGUF":
            raise LoadError("not a GGUF file")
        version = self._number("<u4")
        if version not in (2, 3):
            raise LoadError(f"GGUF version {version} is not supported; supported: 2 and 3, little endian")
        num_tensors, num_keys = self._number("<u8"), self._number("<u8")
        # The smallest key takes 8 + 1 + 4 + 1 bytes, the smallest tensor entry 8 + 1 + 4 + 4 + 8.
        self._fits(num_keys, 14, "metadata keys")
        self._fits(num_tensors, 25, "tensors")
        if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
            raise LoadError(
                f"the header claims {num_keys} metadata keys and {num_tensors} tensors, "
                f"at most {MAX_KEYS} and {MAX_TENSORS} are allowed"
            )
        for _ in range(num_keys):
            key = self._name("a metadata key")
            if key in self.metadata:
                raise LoadError(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._number("<u4"), key, 0)
        entries = {}
        for _ in range(num_tensors):
            name = self._name("a tensor")
            if name in entries:
                raise LoadError(f"tensor {name!r} appears twice")
            entries[name] = self._entry(name)
        self._place(entries)

    def _entry(self, name: str) -> tuple[tuple[int, ...], str, int, int]:
        """(shape, type, bytes, offset into the data) of one tensor."""
        num_dims = self._number("<u4")
        if num_dims > MAX_DIMS:
            raise LoadError(f"tensor {name} has {num_dims} dimensions, at most {MAX_DIMS} are allowed")
        dims = [self._number("<u8") for _ in range(num_dims)]
        kind, offset = self._number("<u4"), self._number("<u8")
        try:
            kind_name = GGMLQuantizationType(kind).name
        except ValueError:
            raise LoadError(f"tensor {name} has the unknown type {kind}") from None
        if kind_name not in SUPPORTED:
            raise LoadError(f"tensor {name} has type {kind_name}, not supported; supported: {', '.join(SUPPORTED)}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        row = dims[0] if dims else 1
        if row % block:
            raise LoadError(f"tensor {name}: rows of {row} do not divide into {kind_name} blocks of {block}")
        return tuple(reversed(dims)), kind_name, math.prod(dims) // block * block_bytes, offset

    def _place(self, entries: dict[str, tuple[tuple[int, ...], str, int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise LoadError(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, got {alignment!r}")
        start = -(-self._position // alignment) * alignment
        available = len(self._memory) - start
        last_name, last_end = "", 0
        for name, (shape, kind, num_bytes, offset) in sorted(entries.items(), key=lambda item: item[1][3]):
            if offset % alignment:
                raise LoadError(f"tensor {name}: offset {offset} is not a multiple of the alignment {alignment}")
            if offset + num_bytes > available:
                raise LoadError(
                    f"tensor {name} of shape {shape} needs bytes {offset} to {offset + num_bytes}, "
                    f"the file holds {max(available, 0)} bytes of data"
                )
            if offset < last_end:
                raise LoadError(f"tensors {last_name} and {name} overlap")
            last_name, last_end = name, offset + num_bytes
            self.tensors[name] = GGUFTensor(shape, kind, start + offset, num_bytes)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            return self._number(_dtype(kind, key))
        if depth >= MAX_DEPTH:
            raise LoadError(f"metadata {key}: arrays are nested more than {MAX_DEPTH} deep")
        item, count = self._number("<u4"), self._number("<u8")
        if item in (_STRING, _ARRAY):
            self._count(count, 8 if item == _STRING else 12, key)
            if item == _STRING:
                return [self._text(key) for _ in range(count)]
            return [self._value(item, key, depth + 1) for _ in range(count)]
        dtype = np.dtype(_dtype(item, key))
        self._count(count, dtype.itemsize, key)
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _name(self, what: str) -> str:
        name = self._text(f"the name of {what}")
        if not 0 < len(name) <= MAX_NAME:
            raise LoadError(f"the name of {what} has {len(name)} characters, it must have 1 to {MAX_NAME}")
        return name

    def _text(self, what: str) -> str:
        start = self._position + 8
        length = int.from_bytes(self._memory[self._position : start], "little")
        end = start + length
        if end > len(self._memory):
            left = len(self._memory) - start
            if left < 0:
                raise LoadError(f"the file ends inside its header (at {len(self._memory)} bytes)")
            raise LoadError(f"the header claims {length} bytes of {what}, but only {left} bytes are left")
        self._position = end
        try:
            return self._memory[start:end].decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{what} is not UTF-8") from error

    def _number(self, dtype: str) -> Any:
        if dtype == "|b1":
            return self._take(1) != b"\0"
        return struct.unpack(_STRUCT[dtype], self._take(int(dtype[2])))[0]

    def _count(self, count: int, size: int, key: str) -> None:
        self._fits(count, size, f"entries of {key}")
        self._entries_left -= count
        if self._entries_left < 0:
            raise LoadError(f"metadata {key}: the arrays of the header have more than {MAX_ENTRIES} entries")

    def _fits(self, count: int, size: int, what: str) -> None:
        left = len(self._memory) - self._position
        if count * size > left:
            raise LoadError(f"the header claims {count} {what}, but only {left} bytes are left")

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._memory):
            raise LoadError(f"the file ends inside its header (at {len(self._memory)} bytes)")
        taken = self._memory[self._position : end]
        self._position = end
        return taken


_STRUCT = {
    "<u1": "<B", "<i1": "<b", "<u2": "<H", "<i2": "<h", "<u4": "<I", "<i4": "<i",
    "<u8": "<Q", "<i8": "<q", "<f4": "<f", "<f8": "<d",
}  # fmt: skip


def _dtype(kind: int, key: str) -> str:
    if kind not in _NUMBERS:
        raise LoadError(f"metadata {key} has the unknown value type {kind}")
    return _NUMBERS[kind]
