"""What one block decides of one row on Hopper, once the passes over all logits are done.

`settle` ends rows that are greedy or have a temperature alone, and says which logits the others can be drawn from.
`decide` ends those: from their lists, or, where these do not hold all that may be drawn, from the whole row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.sample import noise
from octavo.pallas_kernels.sample.api import Settings
from octavo.pallas_kernels.sample.mosaic_passes import (
    BEST,
    DEEP,
    FINITE,
    FIRST,
    HEAT,
    HIGH,
    LOWEST,
    NEG_INF,
    TOTAL,
    Scanned,
    Span,
    heat_of,
    is_cut,
    tree,
)
from octavo.pallas_kernels.sample.mosaic_search import bisect, draw_from, gumbel, ordered, search_row, unordered

LIKELIEST = 1024  # candidates that a row with top_p alone asks for
MAX_BOUNDS = 4096  # lane maxima that a threshold is searched among
FLOOR, TOP, MASS, LSE = range(4)  # facts of a row
LIST_WIDTH = 4


@dataclasses.dataclass(frozen=True)
class Settled:
    """What is known of each row.

    Attributes:
      token: i32[R].
      logprob: f32[R], of the token.
      finite: i32[R], 0 for a row with a NaN or an infinity.
      active: i32[R], 1 for rows that are still to be decided.
      count: i32[R, 1], zeros: the lengths of lists to begin with.
      facts: f32[R, 4] of those: FLOOR, of candidates; TOP, the largest drawable logit; MASS, the sum of
        exp((drawable logit - it) / temperature); LSE, log-sum-exp of the raw logits.
    """

    token: jax.Array
    logprob: jax.Array
    finite: jax.Array
    active: jax.Array
    count: jax.Array
    facts: jax.Array


def settle(
    x: jax.Array, raw: jax.Array, scanned: Scanned, raw_scanned: Scanned, settings: Settings, span: Span,
    raw_span: Span, *, interpret: bool,
) -> Settled:  # fmt: skip
    """Merges the parts of each row and draws where that is enough.

    A row with a temperature alone draws a part by its weight, then an id of that part: two draws in place of one
    save the noise of all other ids.

    Args:
      x, raw: [R, V], what is drawn from, and what log-probabilities are of.
      scanned, raw_scanned: of both.
      settings: of each row.
      span, raw_span: of both.
    """
    rows, cuts = x.shape[0], settings.cuts
    operands: list[Any] = [x, raw, scanned.numbers, scanned.ids, raw_scanned.numbers, raw_scanned.ids]
    operands += [settings.temperature, settings.seed, settings.position]
    if cuts is not None:
        operands += [cuts.top_k, cuts.top_p, cuts.min_p, scanned.bounds]

    def body(x: Any, raw: Any, numbers: Any, ids: Any, raw_numbers: Any, raw_ids: Any, *refs: Any) -> None:
        (temperature, seed, position), rest = refs[:3], refs[3:]
        token, logprob, finite, active, count, facts = rest[-6:]
        row = lax.axis_index("row")
        name = mosaic.lanes_iota(mosaic.WARPGROUP, 1)

        def field(ref: Any, index: int, empty: Any, parts: int = span.parts) -> jax.Array:
            return jnp.where(name < parts, mosaic.lanes_load(ref.at[row, index], 1), empty)

        highs = field(raw_numbers, HIGH, LOWEST, raw_span.parts)
        high = highs.max()
        lse = high + jnp.log(jnp.sum(field(raw_numbers, TOTAL, 0.0, raw_span.parts) * jnp.exp(highs - high)))
        bests, weights = field(numbers, BEST, NEG_INF), field(numbers, HEAT, 0.0)
        best = bests.max()
        likeliest = jnp.min(jnp.where(bests == best, field(ids, FIRST, span.size), span.size))
        likeliest = jnp.minimum(likeliest, span.size - 1)
        heat, keys = heat_of(temperature[row]), noise.keys(seed[row], position[row])
        farther = (bests - jnp.maximum(best, DEEP)) / heat
        # Noise of the parts, and behind them that of the likeliest id.
        noisy = gumbel(keys, jnp.where(name < span.parts, name + noise.FREE, likeliest), 1, interpret)

        def draw() -> jax.Array:
            score = jnp.where(name < span.parts, jnp.log(weights) + farther + noisy, NEG_INF)
            part = jnp.min(jnp.where(score == score.max(), name, span.parts - 1))
            drawn = draw_from(x.at[row], part, jnp.float32(NEG_INF), best, heat, keys, span, interpret)
            return jnp.where(drawn < span.size, drawn, likeliest)

        cut = jnp.bool_(False)
        if cuts is not None:
            top_k, top_p, min_p = (limit[row] for limit in rest[:3])
            cut = is_cut(temperature[row], top_k, top_p, min_p)
            facts[row, TOP], facts[row, LSE] = best, lse
            facts[row, MASS] = jnp.maximum(jnp.sum(weights * jnp.exp(farther)), 1.0)

            @mosaic.when(cut)
            def _() -> None:
                reach = jnp.where(name < span.parts, NEG_INF, noisy).max() - noise.LARGEST
                floor = best + jnp.maximum(reach, jnp.log(min_p)) * heat
                floor = jnp.where((top_k > 0) | (top_p < 1), _threshold(rest[3].at[row], top_k, span), floor)
                # Logits that temperature makes equal are below the threshold together or not at all.
                facts[row, FLOOR] = floor - (best - floor) * 2.0**-20 - jnp.abs(best) * 2.0**-22

        active[row], count[row, 0] = jnp.where(cut, 1, 0), 0
        chosen = lax.cond((temperature[row] != 0) & ~cut, draw, lambda: likeliest)
        token[row] = chosen
        logprob[row] = raw[row, chosen].astype(jnp.float32) - lse
        finite[row] = jnp.min(field(raw_ids, FINITE, 1, raw_span.parts))

    out = [jax.ShapeDtypeStruct((rows,), d) for d in (jnp.int32, jnp.float32, jnp.int32, jnp.int32)]
    out += [jax.ShapeDtypeStruct((rows, 1), jnp.int32), jax.ShapeDtypeStruct((rows, 4), jnp.float32)]
    return Settled(*_run(body, operands, out, interpret, "sample_settle"))


def _threshold(bounds: Any, top_k: jax.Array, span: Span) -> jax.Array:
    """f32[]: at least `top_k` logits (0: the likeliest thousand) are that large, and not many more."""
    groups = min(span.parts, MAX_BOUNDS // span.lanes)
    found: list[jax.Array] = []
    for part in range(span.parts):
        bound = mosaic.lanes_load(bounds.at[part], span.width)
        if part < groups:
            found.append(bound)
        else:
            found[part % groups] = jnp.maximum(found[part % groups], bound)
    order = [ordered(bound) for bound in found]
    need = jnp.where(top_k > 0, top_k, min(LIKELIEST, groups * span.lanes // 2))

    def enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(tree(jnp.add, [jnp.where(o >= threshold, 1, 0) for o in order])) >= need

    return unordered(bisect(enough, jnp.bool_(True)))


def decide(
    x: jax.Array, raw: jax.Array, settled: Settled, listed: tuple[jax.Array, jax.Array, jax.Array], settings: Settings,
    span: Span, *, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """i32[R] and f32[R]: the tokens of all rows and their log-probabilities.

    Args:
      x, raw: [R, V], what is drawn from, and what log-probabilities are of.
      settled: of `settle`.
      listed: of `collect`.
      settings: of each row; they have cuts.
      span: how to walk a whole row, in one part.
    """
    rows, cuts = x.shape[0], settings.cuts
    if cuts is None:
        raise ValueError("without cuts nothing is left to decide")
    room = listed[0].shape[1]

    def body(x: Any, raw: Any, *refs: Any) -> None:
        (token_in, logprob_in, active, facts), (values, ids, count) = refs[:4], refs[4:7]
        (temperature, seed, position), limits, (token, logprob) = refs[7:10], refs[10:13], refs[13:]
        row = lax.axis_index("row")

        @mosaic.when(active[row] == 0)
        def _() -> None:
            token[row], logprob[row] = token_in[row], logprob_in[row]

        @mosaic.when(active[row] != 0)
        def _() -> None:
            best, heat = facts[row, TOP], heat_of(temperature[row])
            keys, (top_k, top_p, min_p) = noise.keys(seed[row], position[row]), (limit[row] for limit in limits)
            there = mosaic.lanes_iota(room, LIST_WIDTH) < count[row, 0]
            names = jnp.where(there, mosaic.lanes_load(ids.at[row], LIST_WIDTH), 0)
            hot = (mosaic.lanes_load(values.at[row], LIST_WIDTH) - best) / heat
            hot = jnp.where(there, hot, NEG_INF)
            kept, enough = _kept(hot, facts[row, MASS], top_k, top_p)
            least = jnp.log(min_p)
            kept = jnp.maximum(kept, least)

            def from_list() -> jax.Array:
                score = jnp.where(hot >= kept, hot + gumbel(keys, names, LIST_WIDTH, interpret), NEG_INF)
                return jnp.min(jnp.where(score == score.max(), names, span.size))

            def from_row() -> jax.Array:
                low = jnp.maximum(search_row(x.at[row], best, heat, top_k, top_p, span), least)
                return draw_from(x.at[row], jnp.int32(0), low, best, heat, keys, span, interpret)

            drawn = lax.cond((count[row, 0] > room) | ~enough, from_row, from_list)
            # Rows of NaN or infinities have no candidates; they are reported, and any token will do.
            drawn = jnp.where(drawn < span.size, drawn, token_in[row])
            token[row] = drawn
            logprob[row] = raw[row, drawn].astype(jnp.float32) - facts[row, LSE]

    operands = [x, raw, settled.token, settled.logprob, settled.active, settled.facts, *listed]
    operands += [settings.temperature, settings.seed, settings.position, cuts.top_k, cuts.top_p, cuts.min_p]
    out = [jax.ShapeDtypeStruct((rows,), d) for d in (jnp.int32, jnp.float32)]
    token, logprob = _run(body, operands, out, interpret, "sample_decide")
    return token, logprob


def _kept(hot: jax.Array, mass: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[], what top_k and top_p keep is at least that hot; bool[], whether the list holds enough to know.

    Args:
      hot: f32[n], logits over temperature, the largest 0; -inf where the list is not full.
      mass: f32[], the sum of exp of all that may be drawn.
    """
    limited, weighed = top_k > 0, top_p < 1
    # Integers, so that sums do not depend on the order of the list; scaled by what they can sum to.
    weight = jnp.exp(hot)
    coarse = jnp.sum((weight * 2.0**19 + 0.5).astype(jnp.int32)).astype(jnp.float32) * 2.0**-19
    scale = 2.0**30 / jnp.where(limited, jnp.maximum(coarse, 1.0), mass)
    whole = (weight * scale + 0.5).astype(jnp.int32)
    order = ordered(hot)
    first = bisect(lambda t: jnp.sum(jnp.where(order >= t, 1, 0)) >= top_k, limited)
    left = jnp.where(order >= first, whole, 0)
    total = jnp.where(limited, jnp.sum(left), 1 << 30)
    wanted = jnp.maximum((total.astype(jnp.float32) * top_p).astype(jnp.int32), 1)
    second = bisect(lambda t: jnp.sum(jnp.where(order >= t, left, 0)) >= wanted, weighed)
    enough = limited | ~weighed | (jnp.sum(whole).astype(jnp.float32) >= top_p * 2.0**30)
    return unordered(jnp.maximum(first, second)), enough


def _run(body: Any, operands: list[Any], out: list[Any], interpret: bool, name: str) -> Any:
    """Runs `body` for each row; its logarithms are exact, since noise needs that."""
    return mosaic.run(
        body, *operands, out=out, scratch={}, grid={"row": out[0].shape[0]}, warpgroups=None, interpret=interpret,
        name=name, approximate=False,
    )  # fmt: skip
