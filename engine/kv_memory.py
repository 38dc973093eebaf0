"""How many KV blocks fit: fixed at start from total, not free, memory.

The number of blocks is part of every compiled program's key, so it must come out the same at
the next start. Temporaries are therefore measured once per model and version, kept on
disk, and the result is rounded down.
"""

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable

import jax
import numpy as np

from octavo.configs.cache import KVSpec
from octavo.configs.engine import ResolvedConfig
from octavo.engine.errors import KVCacheMemoryError
from octavo.pallas_kernels.ragged_paged_attention.api import MakeCacheSpec

logger = logging.getLogger(__name__)

ROUNDING = 256  # blocks
MARGIN = 64  # one part in so many stays free for what is small and uncounted: batches, results, fragments
CPU_CACHE_LIMIT = 4 << 30  # bytes: a host has other work
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a device has and what is taken before the cache, in bytes."""

    usable: int
    weights: int
    state: int
    temporaries: int

    @property
    def left(self) -> int:
        """For KV blocks."""
        return self.usable - self.usable // MARGIN - self.weights - self.state - self.temporaries


def block_bytes(specs: tuple[KVSpec, ...], block_size: int, dtype: np.dtype, cache_spec: MakeCacheSpec) -> int:
    """One block in every layer."""
    return sum(int(np.prod(cache_spec(spec, 1, block_size).shape)) for spec in specs) * dtype.itemsize


def usable_bytes(device: jax.Device, utilization: float) -> int:
    """What this engine may take of the device: the allocator's limit on a GPU, a part of the host's memory on CPU."""
    if device.platform == "cpu":
        return int(host_bytes() * utilization)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise KVCacheMemoryError(f"{device.device_kind} does not tell its memory; set num_gpu_blocks_override")
    return int(stats["bytes_limit"])


def host_bytes() -> int:
    """The host's memory, or what a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def solve(memory: Memory, bytes_per_block: int, block_size: int, resolved: ResolvedConfig) -> int:
    """The number of blocks, the null block included.

    Raises:
      KVCacheMemoryError: not even one sequence of max_model_len tokens fits.
    """
    needed = 1 + -(-resolved.max_model_len // block_size)
    left = memory.left
    if resolved.platform == "cpu":
        all_rows = (1 + resolved.max_num_seqs * (needed - 1)) * bytes_per_block
        left = min(left, CPU_CACHE_LIMIT, -(-all_rows // (ROUNDING * bytes_per_block)) * ROUNDING * bytes_per_block)
    blocks = max(left, 0) // bytes_per_block
    if blocks >= ROUNDING:
        blocks = blocks // ROUNDING * ROUNDING
    if blocks < needed:
        raise KVCacheMemoryError(
            f"no room for the KV cache: one sequence of max_model_len {resolved.max_model_len} needs {needed} blocks "
            f"of {block_size} tokens ({needed * bytes_per_block / GIB:.2f} GiB), and {blocks} fit: usable memory "
            f"{memory.usable / GIB:.2f} GiB less weights {memory.weights / GIB:.2f}, state {memory.state / GIB:.2f}, "
            f"temporaries {memory.temporaries / GIB:.2f}. Lower max_model_len or raise gpu_memory_utilization"
        )
    return int(blocks)


def remembered_temporaries(folder: pathlib.Path | None, key: object, measure: Callable[[], int]) -> int:
    """`measure()` the first time, the stored answer after that.

    Args:
      folder: where answers are kept; None keeps none.
      key: everything that the answer depends on; its repr is hashed.
      measure: compiles a program and reads its temporary size in bytes.
    """
    if folder is None:
        return measure()
    path = folder / "temporaries" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json"
    if path.exists():
        try:
            return int(json.loads(path.read_text())["bytes"])
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged; measuring again", path)
    size = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"bytes": size}, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot keep %s, the next start measures again: %s", path, error)
    return size
