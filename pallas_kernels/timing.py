"""How kernels are timed, and what the device can do at most. Knows no op.

A program holds many calls, each fed with what the one before gave, so that it is one CUDA graph in
which calls neither overlap nor wait for the host. Several programs are queued; a time is the median over
repetitions of their whole time divided by the calls.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

POOL_BYTES = 220_000_000  # more than any L2 cache: what a program reads comes from memory
QUEUED = 8
REPEATS = 7


def seconds_per_call(program: Callable[[], Any], calls: int, *, queued: int = QUEUED, repeats: int = REPEATS) -> float:
    """Median time of one of the `calls` calls in `program`."""
    for _ in range(2):
        jax.block_until_ready(program())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(queued):
            last = program()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / (queued * calls))
    return statistics.median(times)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the device reaches on the simplest work: bytes/s copied (read and written) or read, FLOP/s in bfloat16."""

    copy: float
    read: float
    product: float

    @property
    def memory(self) -> float:
        """Bytes/s: the better of the two."""
        return max(self.copy, self.read)


def measure_ceilings(size: int = 2**31, width: int = 8192) -> Ceilings:
    """A copy and a reduction of `size` bfloat16 numbers, a product of two matrices [width, width] of random ones."""
    big = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    copied = jax.jit(lambda x: x.copy())
    reduced = jax.jit(lambda x: jnp.max(jnp.abs(x)))
    copy = 2 * big.nbytes / seconds_per_call(lambda: copied(big), 1, queued=4, repeats=5)
    read = big.nbytes / seconds_per_call(lambda: reduced(big), 1, repeats=5)
    del big
    a, b = (jax.random.normal(jax.random.key(i), (width, width), jnp.bfloat16) for i in range(2))
    multiplied = jax.jit(lambda a, b: a @ b)
    return Ceilings(copy, read, 2 * width**3 / seconds_per_call(lambda: multiplied(a, b), 1, repeats=5))


def versions() -> dict[str, str]:
    """Of what a measured time depends on."""
    platform = jax.devices()[0].client.platform_version.strip().splitlines()
    return {"jax": jax.__version__, "platform": platform[0] if platform else ""}
