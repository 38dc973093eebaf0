"""Gumbel noise as a function of (seed, position, id), bit for bit that of `jax.random.gumbel`.

Threefry-2x32 with 20 rounds (Salmon et al. 2011) in the partitionable form: the counter is the id, so
the noise of any subset of ids costs that subset. Everything is elementwise: it runs in kernels too.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = 15.95  # no draw exceeds it: -log(-log(1 - 2 ** -23)), rounded up
LOWEST = -4.48  # nor falls below it: -log(-log(SMALLEST)), rounded down
FREE = -(1 << 31)  # negative counters are no ids


def keys(seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two u32 of the noise's key: those of `jax.random.fold_in(jax.random.key(seed), position)`.

    Args:
      seed, position: i32 of any shape; of the seed the bits count.
    """
    first, second = seed.astype(jnp.uint32), position.astype(jnp.uint32)
    return _cipher(jnp.zeros_like(first), first, second)


def gumbel(first: jax.Array, second: jax.Array, ids: jax.Array) -> jax.Array:
    """f32 noise of u32 ids under the key (first, second), u32; the three have shapes that broadcast."""
    return from_bits(hashed(first, second, ids))


def from_bits(bits: jax.Array) -> jax.Array:
    """f32 noise from u32 of random bits."""
    return -jnp.log(-jnp.log(uniform(bits)))


def uniform(bits: jax.Array) -> jax.Array:
    """f32 in [SMALLEST, 1) from u32."""
    unit = jax.lax.bitcast_convert_type((bits >> np.uint32(9)) | np.uint32(0x3F800000), jnp.float32) - 1.0
    return jnp.maximum(unit, SMALLEST)


def hashed(first: jax.Array, second: jax.Array, ids: jax.Array) -> jax.Array:
    """u32 of random bits: the two halves of the block cipher at (0, id), folded."""
    left, right = _cipher(first, second, ids)
    return left ^ right


def _cipher(first: jax.Array, second: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The block (0, counter), enciphered with the key (first, second)."""
    schedule = (first, second, first ^ second ^ PARITY)
    left, right = first, counter + second
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = (right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + (schedule[(group + 2) % 3] + np.uint32(group + 1))
    return left, right
