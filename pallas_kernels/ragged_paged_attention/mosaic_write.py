"""Writes a step's keys and values into their blocks, in place: a token's heads are rows a block apart."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic

BLOCKS = 16  # for each multiprocessor: each is a few kilobytes and waits most of the time


def write(
    cache: Any, k: jax.Array, v: jax.Array, block: jax.Array, offset: jax.Array, *, blocks: int, interpret: bool
) -> None:
    """Copies k and v to the tokens' places.

    Args:
      cache: a reference to [blocks, 2, K, S, H].
      k, v: [T, K, H] in the cache's dtype.
      block, offset: i32[T].
      blocks: multiprocessors.
      interpret: run in Pallas' interpreter.
    """
    num_tokens = k.shape[0]
    grid = min(num_tokens, blocks * BLOCKS)

    def body(k: Any, v: Any, block: Any, offset: Any, cache: Any, k_token: Any, v_token: Any, here: Any) -> None:
        first = lax.axis_index("block")

        def one_token(i: jax.Array, _: Any) -> None:
            token = first + i * grid
            mosaic.store_done(reads_only=True)
            mosaic.copy_in(k.at[token], k_token, here)
            mosaic.copy_in(v.at[token], v_token, here)
            to = block[token], offset[token]
            mosaic.wait(here)
            for half, source in enumerate((k_token, v_token)):
                mosaic.copy_out(source, cache.at[to[0], half, :, to[1], :])

        lax.fori_loop(0, lax.div(num_tokens - first + (grid - 1), jnp.int32(grid)), one_token, None)
        mosaic.store_done()

    mosaic.run(
        body,
        k,
        v,
        block,
        offset,
        cache,
        out=(),
        scratch={
            "k_token": mosaic.plain(k.shape[1:], k.dtype),
            "v_token": mosaic.plain(v.shape[1:], v.dtype),
            "here": mosaic.Barrier(num_arrivals=2),
        },
        grid={"block": grid},
        warpgroups=1,
        interpret=interpret,
        name="paged_write",
    )
