"""What every checkpoint format offers the loader: named tensors, read one at a time."""

import dataclasses
import mmap
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from octavo.configs.errors import LoadError

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor before it is read: Hugging Face shape and the format's own name of its type."""

    shape: tuple[int, ...]
    kind: str


@runtime_checkable
class TensorReader(Protocol):
    """Tensors under their Hugging Face names."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint."""
        ...

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The tensor, possibly a read-only view of the file.

        Float tensors come in the type they are stored in; packed ones come in `dtype`.
        """
        ...


def map_file(path: pathlib.Path) -> mmap.mmap:
    """The file as read-only memory that belongs to the page cache."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise LoadError(f"cannot read {path}: {error}") from error


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: refuses a key that comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise LoadError(f"{key!r} appears twice")
            seen.add(key)
    return result
