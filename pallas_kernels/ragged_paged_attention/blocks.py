"""Whole blocks of a cache, in and out: for moving them between sequences, devices and hosts. Attends to nothing."""

from jaxtyping import Array, Int, Shaped


def copy_blocks(
    cache: Shaped[Array, "blocks ..."], source: Int[Array, " n"], target: Int[Array, " n"]
) -> Shaped[Array, "blocks ..."]:
    """The cache with block source[i] also at target[i]; in place where it is donated.

    All are read before any is written.
    """
    return write_blocks(cache, target, read_blocks(cache, source))


def read_blocks(cache: Shaped[Array, "blocks ..."], blocks: Int[Array, " n"]) -> Shaped[Array, "n ..."]:
    """The contents of blocks, in their order."""
    return cache.at[blocks].get(mode="promise_in_bounds")


def write_blocks(
    cache: Shaped[Array, "blocks ..."], blocks: Int[Array, " n"], contents: Shaped[Array, "n ..."]
) -> Shaped[Array, "blocks ..."]:
    """The cache with these contents; in place where it is donated. A block named twice holds either."""
    return cache.at[blocks].set(contents.astype(cache.dtype), mode="promise_in_bounds")
