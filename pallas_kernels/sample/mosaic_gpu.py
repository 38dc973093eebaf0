"""Sampling on Hopper: one pass over the logits, then a block a row.

1. `scan`: the largest logit, log-sum-exp, the weight of each part at the row's temperature, bounds of the k-th largest.
2. `settle`: greedy rows and those with a temperature alone are done. The others get a floor: the k-th largest
   logit (top_k), the thousandth (top_p), or what min_p leaves.
3. `collect`: lists what is not below the floor, through the bounds, without another pass.
4. `decide`: the list gives the token, exactly, if it holds all that may be drawn. Otherwise (a flat distribution,
   a large k) passes over the row do.

Programs without cuts end after 2. Noise is that of the reference, except that a row with a temperature alone
draws twice (`settle`). Refuses vocabularies shorter than a tile.
"""

import dataclasses

from jaxtyping import Array, Float

from octavo.pallas_kernels.sample.api import Drawn, Settings
from octavo.pallas_kernels.sample.mosaic_passes import UNROLL, collect, scan, span_for
from octavo.pallas_kernels.sample.mosaic_rows import decide, settle

ROOM = 2048  # candidates of a row
DTYPES = ("float32", "bfloat16")


def supports(*, size: int, dtype: str) -> str | None:
    """Why logits of this shape cannot be sampled here, or None."""
    if dtype not in DTYPES:
        return f"logits must be {' or '.join(DTYPES)}, got {dtype}"
    tile = span_for(size, size, dtype).tile
    return None if size >= tile else f"a vocabulary needs at least {tile} entries, got {size}"


def sample(
    logits: Float[Array, "R V"],
    settings: Settings,
    *,
    drawable: int,
    adjusted: Float[Array, "R V"] | None = None,
    interpret: bool = False,
    unroll: int = UNROLL,
    room: int = ROOM,
) -> Drawn:
    """Draws one token a row; arguments and results as `api.Sample`.

    Args:
      interpret: run in Pallas' interpreter, on any platform.
      unroll, room: vectors of a tile, length of a list; tests make both smaller.

    Raises:
      NotImplementedError: a vocabulary or type that these kernels lack.
    """
    size = logits.shape[1]
    if (reason := supports(size=size, dtype=logits.dtype.name)) is not None and not interpret:
        raise NotImplementedError(f"mosaic_gpu sampling: {reason}")
    x = logits if adjusted is None else adjusted
    span = span_for(size, drawable, x.dtype, unroll)
    raw_span = span if adjusted is None else span_for(size, size, logits.dtype, unroll)
    scanned = raw_scanned = scan(x, settings.temperature, settings.cuts, span, interpret=interpret)
    if adjusted is not None:
        raw_scanned = scan(logits, settings.temperature, None, raw_span, interpret=interpret)
    settled = settle(x, logits, scanned, raw_scanned, settings, span, raw_span, interpret=interpret)
    token, logprob = settled.token, settled.logprob
    if scanned.bounds is not None:
        listed = collect(
            x, settled.facts, settled.active, settled.count, scanned.bounds, span, room, interpret=interpret
        )
        whole = dataclasses.replace(span, parts=1)
        token, logprob = decide(x, logits, settled, listed, settings, whole, interpret=interpret)
    return Drawn(token=token, logprob=logprob, finite=settled.finite != 0)
