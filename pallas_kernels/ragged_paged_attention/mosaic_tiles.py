"""What the Hopper kernels share: static sizes, one step of the softmax, and how KV tiles reach shared memory.

A tile is fetched with one bulk copy a block, keys apart from values. A 16-bit cache goes straight
into the ring that the tensor cores read. An fp8 cache goes into a narrow ring first; wgmma takes fp8
only with the contracted axis contiguous, which values are not, so the producer's threads, idle
otherwise, turn each tile into float16 (exact, one instruction for two numbers) in the ring that the
consumers read. They see no difference. Knows no work list.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.parameters import DEFAULT, Parameters

ROWS = 64  # of a wgmma tile
SIDES = ("k", "v")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes and score options, shared by all kernels."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    blocks: int  # of the grid
    interpret: bool
    narrow: bool = False  # the cache is fp8
    parameters: Parameters = DEFAULT

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def decode_tile(self) -> int:
        """Tokens of KV in one tile of a decode row."""
        return self.parameters.decode_tile_for(self.head_size, self.narrow)

    @property
    def q_rows(self) -> int:
        """Rows of q fetched for one item: whole eights, which a swizzled tile is filled in."""
        if 8 % self.group == 0 and self.num_heads % 8 == 0:
            return 8
        if self.group % 8 == 0:
            return self.group
        return (self.group + 14) // 8 * 8

    def softmax(
        self, s: jax.Array, high: jax.Array, total: jax.Array, see: jax.Array | None, k_scale: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """One step of the running softmax.

        Args:
          s: f32[rows, tokens], raw q · k.
          high, total: f32[rows], maximum so far in units of log 2, and the sum of exponentials.
          see: bool[rows, tokens], or None where every query sees every token.
          k_scale: f32[], what stored keys are multiplied with, above 0; None is 1.

        Returns:
          (p, fade, high, total): what to weigh values with, and what to multiply older results with.
        """
        s, factor = self.scaled(s, see, k_scale)
        new_high = jnp.maximum(high, s.max(axis=1) * factor)
        fade = jnp.exp2(high - new_high)
        p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_high, s.shape, [0]))
        return p, fade, new_high, total * fade + p.sum(axis=1)

    def scaled(self, s: jax.Array, see: jax.Array | None, k_scale: jax.Array | None) -> tuple[jax.Array, Any]:
        """(scores, factor) of raw q · k, whose product is in units of log 2; arguments as in `softmax`, any layout."""
        unit: Any = 1.0 if k_scale is None else k_scale
        factor: Any = unit * (self.scale * mosaic.LOG2E)
        if self.soft_cap is not None:
            s, factor = jnp.tanh(s * (unit * (self.scale / self.soft_cap))), self.soft_cap * mosaic.LOG2E
        if see is not None:
            s = jnp.where(see, s, -jnp.inf)
        return s, factor


@dataclasses.dataclass(frozen=True)
class Rings:
    """Static sizes of the KV rings in one block's shared memory.

    Attributes:
      shape: of the problem.
      tile: tokens of one stage.
      rings: independent pairs of rings (keys, values), each with a producer of its own.
      wide: stages of the rings that the tensor cores read.
      narrow: stages of the fp8 rings before them, 0 for a 16-bit cache.
      readers: consumers that must free a stage.
    """

    shape: Shape
    tile: int
    rings: int
    wide: int
    narrow: int
    readers: int = 1

    @property
    def copies(self) -> int:
        """Bulk copies of one tile."""
        return max(1, self.tile // self.shape.block_size)

    @property
    def lead(self) -> int:
        """Tiles whose copies are in flight before the first is needed."""
        return self.narrow or self.wide

    def scratch(self, dtype: Any, kv_dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name.

        {side}_ring, {side}_here, {side}_free: what consumers read; {side}_narrow, {side}_landed: fp8.
        """
        size, made = self.shape.head_size, {}
        for side in SIDES:
            stages, copies = self.rings * self.wide, 1 if self.narrow else self.copies
            made[f"{side}_ring"] = mosaic.tile((stages, self.tile, size), dtype)
            made[f"{side}_here"] = mosaic.Barrier(num_arrivals=copies, num_barriers=stages)
            made[f"{side}_free"] = mosaic.Barrier(num_arrivals=self.readers, num_barriers=stages)
            if self.narrow:
                stages = self.rings * self.narrow
                made[f"{side}_narrow"] = mosaic.plain((stages, self.tile, size), kv_dtype)
                made[f"{side}_landed"] = mosaic.Barrier(num_arrivals=self.copies, num_barriers=stages)
        return made

    def stage(self, done: jax.Array, ring: Any = 0) -> jax.Array:
        """The stage of a consumer's tile number `done`."""
        if self.wide == 1:
            # Always 0, which the compiler must not see: it would keep addresses over the loops until they spill.
            return ring + jnp.minimum(done, 0)
        return ring * self.wide + lax.rem(done, jnp.int32(self.wide))


class Producer:
    """Fills one pair of rings, tile after tile; runs in a warpgroup of its own.

    Args:
      sizes: of the rings.
      ring: which of them.
      rows: the cache as [blocks * 2 * K * S, H].
      tables: i32[R, P].
      scratch: what `Rings.scratch` made.
    """

    def __init__(self, sizes: Rings, ring: Any, rows: Any, tables: Any, scratch: dict[str, Any]) -> None:
        self.sizes, self.ring, self.rows, self.tables, self.scratch = sizes, ring, rows, tables, scratch

    def fetch(self, row: jax.Array, kv_head: jax.Array, t: jax.Array, last: jax.Array, done: jax.Array) -> jax.Array:
        """Starts the copies of tile t, this producer's number `done`, and returns done + 1.

        Args:
          row: whose block table to read.
          kv_head: which keys and values.
          last: position of the row's last token; no table entry beyond its block is read.
        """
        sizes, shape = self.sizes, self.sizes.shape
        count = min(shape.block_size, sizes.tile)  # tokens of one copy
        stage = self.ring * sizes.lead + lax.rem(done, jnp.int32(sizes.lead))
        target, landed = ("ring", "here")
        places: list[Any] = [None] * sizes.copies
        if sizes.narrow:
            target, landed = "narrow", "landed"
            places = [self._place(row, t, last, b) for b in range(sizes.copies)]  # read while the threads convert
            mosaic.when(done >= sizes.narrow)(lambda: self._widen(done - sizes.narrow))
        # Decode takes a tile's keys and values at once; prefill holds values longer, and has few registers.
        for sides in (SIDES,) if sizes.copies <= 4 else (SIDES[:1], SIDES[1:]):
            if not sizes.narrow:
                for side in sides:
                    self._wait_free(side, done)
            for b in range(sizes.copies):
                block, inside = places[b] or self._place(row, t, last, b)
                for side in sides:
                    half = SIDES.index(side)
                    first = ((block * 2 + half) * shape.num_kv_heads + kv_head) * shape.block_size + inside
                    to = self.scratch[f"{side}_{target}"].at[stage, mosaic.ds(b * count, count)]
                    source = self.rows.at[mosaic.ds(first, count)]
                    mosaic.copy_in(source, to, self.scratch[f"{side}_{landed}"].at[stage])
        return done + 1

    def finish(self, done: jax.Array) -> None:
        """After the last of `done` tiles: every phase of a barrier is seen by who waits on it."""
        sizes = self.sizes
        if sizes.narrow:
            lax.fori_loop(jnp.maximum(done - sizes.narrow, 0), done, lambda n, _: self._widen(n), None)
        for i in range(sizes.wide):
            for side in SIDES:
                stage = self.ring * sizes.wide + i
                mosaic.when(done > i)(functools.partial(mosaic.wait, self.scratch[f"{side}_free"].at[stage]))

    def _place(self, row: jax.Array, t: jax.Array, last: jax.Array, b: int) -> tuple[jax.Array, Any]:
        """The block of tile t's copy b, and where in the block it begins. Beyond the end the last block comes again."""
        size, tile = jnp.int32(self.sizes.shape.block_size), self.sizes.tile
        if self.sizes.shape.block_size > tile:
            block = lax.div(t * tile, size)
            return self.tables[row, block], t * tile - block * size
        return self.tables[row, jnp.minimum(t * self.sizes.copies + b, lax.div(last, size))], 0

    def _wait_free(self, side: str, done: jax.Array) -> None:
        """Until the stage of tile number `done` is free again."""
        stage = self.sizes.stage(done, self.ring)
        mosaic.when(done >= self.sizes.wide)(lambda: mosaic.wait(self.scratch[f"{side}_free"].at[stage]))

    def _widen(self, done: jax.Array) -> None:
        """Hands tile number `done` to the consumers in 16 bits."""
        sizes, scratch = self.sizes, self.scratch
        stage, narrow = sizes.stage(done, self.ring), self.ring * sizes.narrow + lax.rem(done, jnp.int32(sizes.narrow))
        for side in SIDES:
            mosaic.wait(scratch[f"{side}_landed"].at[narrow])
            self._wait_free(side, done)
            mosaic.widen(scratch[f"{side}_narrow"].at[narrow], scratch[f"{side}_ring"].at[stage])
            mosaic.arrive(scratch[f"{side}_here"].at[stage])
