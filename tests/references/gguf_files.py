"""Writes GGUF files byte by byte, valid or not, without the code under test."""

import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import gguf.quants
import numpy as np

_CODES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "u64": (10, "<Q"), "u8": (0, "<B")}
_KINDS = {"tokenizer.ggml.token_type": "i32"}  # where llama.cpp insists


def string(text: str | bytes) -> bytes:
    """Length and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any, kind: str | None = None) -> bytes:
    """Type code and value of one metadata entry."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, list):
        entries = [value(entry, kind) for entry in item]
        return struct.pack("<I", 9) + entries[0][:4] + struct.pack("<Q", len(item)) + b"".join(e[4:] for e in entries)
    code, form = _CODES[kind or ("f32" if isinstance(item, float) else "u32")]
    return struct.pack("<I", code) + struct.pack(form, item)


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    """A tensor's entry; `dims` as GGUF has them, innermost first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    """Magic, version and counts."""
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def write_gguf(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]],
    version: int = 3,
    alignment: int = 32,
) -> None:
    """Writes float32 arrays in the named types (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1); u8 arrays as they are.

    An array of u8 holds the packed bytes of each row.
    """
    body, data = b"", b""
    for name, (array, kind) in tensors.items():
        quantization = gguf.GGMLQuantizationType[kind]
        if array.dtype == np.uint8:
            packed, shape = array.tobytes(), gguf.quant_shape_from_byte_shape(array.shape, quantization)
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), quantization).tobytes()
            shape = array.shape
        body += tensor(name, list(reversed(shape)), quantization.value, len(data))
        data += packed + bytes(-len(packed) % alignment)
    keys = dict(metadata) | ({"general.alignment": alignment} if alignment != 32 else {})
    head = header(len(tensors), len(keys), version)
    head += b"".join(string(key) + value(item, _KINDS.get(key)) for key, item in keys.items()) + body
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
