"""The passes over all rows of logits on Hopper: `scan` reads each row once, `collect` as good as nothing.

A block of one warpgroup walks a part of one row, `Span.tile` logits at a time. Where parts end depends
on the vocabulary alone: sums, and so tokens, do not depend on the number of rows. A lane of a part is
the group of its ids that one place of a vector meets; the largest logits of lanes are lower bounds in
disguise: k of them are at least as large as the k-th largest of them, so is the k-th largest logit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic, mosaic_threads
from octavo.pallas_kernels.sample.api import Cuts

LOWEST = -3.0e38  # a start for maxima that exp2 can take differences of
DEEP = -1e30  # what lies there or lower weighs nothing, even alone
NEG_INF = float("-inf")
LEAST_PARTS = 16  # of a row, where it has that many tiles
UNROLL = 8
HIGH, TOTAL, BEST, HEAT = range(4)  # of `Scanned.numbers`
FIRST, FINITE = range(2)  # of `Scanned.ids`


@dataclasses.dataclass(frozen=True)
class Span:
    """How rows are walked: static.

    Attributes:
      size: V.
      drawable: ids from here up are never drawn.
      width: neighbouring logits of one thread.
      unroll: vectors of 128 * width logits that are loaded together.
      parts: of a row, each a block's; fewer than 128.
    """

    size: int
    drawable: int
    width: int
    unroll: int
    parts: int

    @property
    def lanes(self) -> int:
        return mosaic.WARPGROUP * self.width

    @property
    def tile(self) -> int:
        return self.lanes * self.unroll

    @property
    def tiles(self) -> int:
        return -(-self.size // self.tile)

    def tiles_of(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first tile of a part and the one after its last."""
        first, last = (lax.div((part + i) * self.tiles, jnp.int32(self.parts)) for i in range(2))
        return first, last

    def walk(self, row: Any, part: jax.Array, step: Callable[..., Any], carry: Any, *, slowly: bool = False) -> Any:
        """Folds `step(carry, values, starts, real)` over the part's tiles.

        `values` are f32 vectors, `starts` the ids of their first lanes; `real` is None, or for each
        vector which lanes are not in an earlier one, and which of these are drawable. Where masks are
        needed, and everywhere if `slowly`, there is one vector at a time: a step's text costs time at start-up.
        """
        first, last = self.tiles_of(part)
        clean = 0 if slowly else min(self.drawable, self.size) // self.tile  # tiles that need no masks

        def load(start: jax.Array) -> jax.Array:
            return mosaic.lanes_load(row.at[mosaic.ds(start, self.lanes)], self.width).astype(jnp.float32)

        def tile(t: jax.Array, carry: Any) -> Any:
            starts = [t * self.tile + u * self.lanes for u in range(self.unroll)]
            return step(carry, [load(start) for start in starts], starts, None)

        def masked(v: jax.Array, carry: Any) -> Any:
            # The last vector ends with the row and begins inside the vector before it.
            start = jnp.minimum(v * self.lanes, self.size - self.lanes)
            ids = self.ids(start)
            fresh = ids >= v * self.lanes
            return step(carry, [load(start)], [start], [(fresh, fresh & (ids < self.drawable))])

        if clean:
            carry = lax.fori_loop(first, jnp.minimum(last, clean), tile, carry)
        if clean * self.tile == self.size:
            return carry
        end = -(-self.size // self.lanes)
        first, last = jnp.maximum(first, clean) * self.unroll, jnp.minimum(last * self.unroll, end)
        return lax.fori_loop(first, last, masked, carry)

    def full(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        return mosaic.lanes_full(self.lanes, self.width, value, dtype)

    def ids(self, start: jax.Array) -> jax.Array:
        return start + mosaic.lanes_iota(self.lanes, self.width)

    def run(self, body: Callable[..., None], *operands: Any, rows: int, out: Any, interpret: bool, name: str) -> Any:
        """Runs `body` for each part of each row."""
        return mosaic.run(
            body, *operands, out=out, scratch={}, grid={"row": rows, "part": self.parts}, warpgroups=None,
            interpret=interpret, name=name,
        )  # fmt: skip


def span_for(size: int, drawable: int, dtype: Any, unroll: int = UNROLL) -> Span:
    """A span whose loads are as wide as the alignment of rows allows."""
    width = math.gcd(size, 16 // jnp.dtype(dtype).itemsize)
    tiles = Span(size, drawable, width, unroll, 1).tiles
    return Span(size, drawable, width, unroll, -(-tiles // max(1, tiles // LEAST_PARTS)))


@dataclasses.dataclass(frozen=True)
class Scanned:
    """What one pass can know of the parts of each row; of each 128 numbers the first `parts` are set.

    Attributes:
      numbers: f32[R, 4, 128]: HIGH, the largest logit; TOTAL, the sum of exp(logit - it); BEST, the largest
        drawable logit (-inf for none); HEAT, the sum of exp((drawable logit - it) / temperature).
      ids: i32[R, 2, 128]: FIRST, the first id of the largest drawable logit; FINITE, whether all logits are.
      bounds: f32[R, parts, lanes], each lane's largest drawable logit; set in rows with a cut.
    """

    numbers: jax.Array
    ids: jax.Array
    bounds: jax.Array | None


def heat_of(temperature: jax.Array) -> jax.Array:
    """What logits are divided by; no distance is infinite then, nor is 0 / 0 asked for."""
    return jnp.where(temperature == 0, 1.0, jnp.maximum(temperature, 1e-37))


def is_cut(temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """bool[]: whether a row is drawn from a list of candidates."""
    return (temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


def scan(x: jax.Array, temperature: jax.Array, cuts: Cuts | None, span: Span, *, interpret: bool) -> Scanned:
    """One pass over x, [R, V], at the rows' temperatures, f32[R]."""
    rows = x.shape[0]

    def body(x: Any, temperature: Any, *refs: Any) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")
        limits, (numbers, ids, *bounds) = (refs[:3], refs[3:]) if cuts is not None else ((), refs)
        rate = jnp.minimum(mosaic.LOG2E / heat_of(temperature[row]), 1e37)
        zero = span.full(0.0)
        carry = span.full(LOWEST), zero, span.full(NEG_INF), zero, span.full(0, jnp.int32), zero
        step = _scan_step(rate)
        high, total, best, heat, at, finite = span.walk(x.at[row], part, step, carry)
        top, drawn = high.max(), best.max()
        numbers[row, HIGH, part] = top
        numbers[row, TOTAL, part] = jnp.sum(total * jnp.exp2((high - jnp.maximum(top, DEEP)) * mosaic.LOG2E))
        numbers[row, BEST, part] = drawn
        numbers[row, HEAT, part] = jnp.sum(heat * jnp.exp2((best - jnp.maximum(drawn, DEEP)) * rate))
        ids[row, FIRST, part] = jnp.min(jnp.where(best == drawn, span.ids(at), span.size))
        ids[row, FINITE, part] = jnp.where(jnp.sum(finite) == 0, 1, 0)
        if bounds:

            @mosaic.when(is_cut(temperature[row], *(limit[row] for limit in limits)))
            def _() -> None:
                bounds[0][row, part] = best

    shapes = [((rows, 4, mosaic.WARPGROUP), jnp.float32), ((rows, 2, mosaic.WARPGROUP), jnp.int32)]
    operands: tuple[jax.Array, ...] = (x, temperature)
    if cuts is not None:
        shapes.append(((rows, span.parts, span.lanes), jnp.float32))
        operands += (cuts.top_k, cuts.top_p, cuts.min_p)
    out = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    numbers, ids, *bounds = span.run(body, *operands, rows=rows, out=out, interpret=interpret, name="sample_scan")
    return Scanned(numbers, ids, bounds[0] if bounds else None)


def _scan_step(rate: jax.Array) -> Callable[..., Any]:
    """What `scan` does with a tile."""

    def step(carry: Any, values: list[jax.Array], starts: list[jax.Array], real: Any) -> Any:
        high, total, best, heat, at, finite = carry
        drawable = values
        if real is not None:
            drawable = [jnp.where(d, v, NEG_INF) for v, (_, d) in zip(values, real, strict=True)]
            values = [jnp.where(f, v, LOWEST) for v, (f, _) in zip(values, real, strict=True)]
        new_high = tree(jnp.maximum, [high, *values])
        safe = jnp.maximum(new_high, DEEP) * mosaic.LOG2E
        total = total * jnp.exp2(high * mosaic.LOG2E - safe)
        total = total + tree(jnp.add, [jnp.exp2(v * mosaic.LOG2E - safe) for v in values])
        finite = finite + tree(jnp.add, [v * 0.0 for v in values])
        new_best = best
        for v, start in zip(drawable, starts, strict=True):
            better = v > new_best
            new_best = jnp.where(better, v, new_best)
            at = jnp.where(better, start, at)
        safe = jnp.maximum(new_best, DEEP)
        # A difference first: rates can be large.
        heat = heat * jnp.exp2((best - safe) * rate)
        heat = heat + tree(jnp.add, [jnp.exp2((v - safe) * rate) for v in drawable])
        return new_high, total, new_best, heat, at, finite

    return step


def collect(
    x: jax.Array,
    facts: jax.Array,
    active: jax.Array,
    count: jax.Array,
    bounds: jax.Array,
    span: Span,
    room: int,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists the drawable logits that are at least as large as a row's floor, in any order.

    Args:
      x: [R, V].
      facts: f32[R, n], the floor first.
      active: i32[R], 0 skips the row.
      count: i32[R, 1] of zeros.
      bounds: of `scan`.
      span: that of `scan`.
      room: length of a list.

    Returns:
      f32[R, room], i32[R, room] of logits and ids, i32[R, 1] how many there are (more than room if they do not fit).
      Of a row that is not active only the count, 0, is set.
    """
    rows = x.shape[0]
    grouping = mosaic_threads.Grouping(
        size=span.size, end=min(span.drawable, span.size), stride=span.lanes, width=span.width, tile=span.tile
    )

    def body(x: Any, facts: Any, active: Any, bounds: Any, count: Any, values: Any, ids: Any) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @mosaic.when(active[row] != 0)
        def _() -> None:
            mosaic_threads.list_where(
                x.at[row], bounds.at[row, part], facts[row, 0], span.tiles_of(part), grouping,
                (values.at[row], ids.at[row]), count.at[row], interpret,
            )  # fmt: skip

    counted = jax.new_ref(count, memory_space=mosaic.GMEM)
    out = [jax.ShapeDtypeStruct((rows, room), dtype) for dtype in (jnp.float32, jnp.int32)]
    values, ids = span.run(
        body, x, facts, active, bounds, counted, rows=rows, out=out, interpret=interpret, name="sample_collect"
    )
    return values, ids, jax.freeze(counted)


def tree(op: Callable[[jax.Array, jax.Array], jax.Array], values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]
