"""Cuts one step into work for persistent workers: decode rows into pieces of KV, prefill rows into tiles.

Plain `jnp`, on the device, once per step. A row's cuts depend on the row's own length and on
static sizes only, so that its arithmetic is the same in any company; who works on a piece
depends on all rows and changes no number. Knows no kernel.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

PIECE_STEP = 64  # tokens
MAX_PIECES = 32  # of one row, where many rows share the device
PREFILL_TILE = 128  # query tokens
FEW_PIECES = 2
OVERHEAD = 1  # what a piece costs besides its tokens, in steps


@dataclasses.dataclass(frozen=True)
class Workers:
    """Static sizes of the plan.

    Attributes:
      lists: persistent workers, each with a list of its own.
      kv_heads: K; a piece of a row is K items of work, one a head.
      longest: tokens of a piece where other rows fill the device; half of that in a row of more than
        `FEW_PIECES` such pieces, which may be alone among short ones and must not hold up the step.
      shortest: tokens of a piece where none do.
      step: pieces begin and end at multiples of so many tokens, a row's last one at its end.
    """

    lists: int
    kv_heads: int
    longest: int = 4096
    shortest: int = 128
    step: int = PIECE_STEP

    def pieces(self, num_rows: int, max_len: int) -> int:
        """Most pieces that a row of at most `max_len` tokens is cut into."""
        busy = min(max(FEW_PIECES, -(-max_len // (self.longest // 2))), MAX_PIECES)
        return min(max(self.wanted(num_rows), busy), -(-max_len // self.shortest))

    def wanted(self, num_rows: int) -> int:
        """Pieces of a row that fill the device when all rows are equally long."""
        return max(1, self.lists // (num_rows * self.kv_heads))


@flax.struct.dataclass
class DecodeWork:
    """The pieces and who does them.

    Attributes:
      pieces: i32[E, 8], columns row, first token, end, slot of the partial result (-1: the
        piece is the whole row), length of the row, piece number; the rest unused.
      first: i32[lists + 1]; list w does items first[w] … first[w + 1] - 1; item i is head i % K of piece i // K.
      cut: i32[R, 4], columns row, its first slot, its number of slots, unused: the rows of several pieces.
      num_cut: i32[1], how many those are; they come first.
      num_slots: static, slots that exist.
    """

    pieces: jax.Array
    first: jax.Array
    cut: jax.Array
    num_cut: jax.Array
    num_slots: int = flax.struct.field(pytree_node=False)


def plan_decode(lengths: jax.Array, max_len: int, workers: Workers) -> DecodeWork:
    """Plans rows of one token each.

    Args:
      lengths: i32[R], tokens of KV of each row; 0 for a row that is not a decode row.
      max_len: tokens a row can have (static).
      workers: static sizes.
    """
    num_rows = lengths.shape[0]
    most = workers.pieces(num_rows, max_len)
    wanted = workers.wanted(num_rows)

    def share(parts: int) -> jax.Array:
        return -(-lengths // (parts * workers.step)) * workers.step

    longest = jnp.where(lengths > FEW_PIECES * workers.longest, workers.longest // 2, workers.longest)
    size = jnp.clip(share(wanted), workers.shortest, longest)
    size = jnp.maximum(size, share(most))
    count = -(-lengths // size)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    piece = jnp.arange(num_rows * most, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, piece, side="right", method="compare_all").astype(jnp.int32), num_rows - 1)
    part = piece - (ends - count)[row]
    real = piece < ends[-1]
    start = part * size[row]
    end = jnp.where(real, jnp.minimum(start + size[row], lengths[row]), start)

    slots = jnp.where(count > 1, count, 0)
    first_slot = jnp.cumsum(slots, dtype=jnp.int32) - slots
    slot = jnp.where(slots[row] > 0, first_slot[row] + part, -1)
    zero = jnp.zeros_like(row)
    pieces = jnp.stack([row, start, end, slot, lengths[row], part, zero, zero], axis=1)
    cost = jnp.where(real, -(-(end - start) // PIECE_STEP) + OVERHEAD, 0)
    several = slots > 0
    num_cut = jnp.sum(several, dtype=jnp.int32)[None]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    place = jnp.where(several, jnp.cumsum(several, dtype=jnp.int32) - 1, num_rows)
    cut = (
        jnp.zeros((num_rows, 4), jnp.int32)
        .at[place]
        .set(jnp.stack([rows, first_slot, slots, rows], axis=1), mode="drop")
    )
    return DecodeWork(
        pieces=pieces,
        first=_deal(cost, ends[-1], workers),
        cut=cut,
        num_cut=num_cut,
        num_slots=num_rows * most if most > 1 else 0,
    )


def _deal(cost: jax.Array, num_pieces: jax.Array, workers: Workers) -> jax.Array:
    """Gives each list a run of items whose middles lie in its share of the whole cost."""
    heads, lists = workers.kv_heads, workers.lists
    before = (jnp.cumsum(cost, dtype=jnp.int32) - cost) * heads
    middle = 2 * before[:, None] + (2 * jnp.arange(heads, dtype=jnp.int32)[None, :] + 1) * cost[:, None]  # in halves
    total = 2 * jnp.sum(cost, dtype=jnp.int32) * heads
    w = jnp.arange(lists + 1, dtype=jnp.int32)
    target = total // lists * w + total % lists * w // lists  # total * w may not fit
    first = jnp.searchsorted(middle.reshape(-1), target, side="left", method="compare_all").astype(jnp.int32)
    return jnp.minimum(first, num_pieces * heads)


@flax.struct.dataclass
class PrefillWork:
    """Tiles of query tokens, the one that reaches most KV first.

    Attributes:
      tiles: i32[n, 8], columns row, first token / 8, the row's first token in the tile and the end of
        its last, position of the tile's first token in the row (negative where the row begins later),
        end of the KV that the tile reaches; the rest unused.
      count: i32[1], tiles that are there; they come first.
    """

    tiles: jax.Array
    count: jax.Array


def plan_prefill(
    kv_lens: jax.Array, cu_q_lens: jax.Array, is_prefill: jax.Array, num_tokens: int, causal: bool
) -> PrefillWork:
    """Tiles begin at multiples of eight on the token axis, so a row's first may begin before the row.

    Args:
      kv_lens: i32[R].
      cu_q_lens: i32[R + 1].
      is_prefill: bool[R].
      num_tokens: T (static).
      causal: static; otherwise every tile reaches its whole row.
    """
    num_rows = kv_lens.shape[0]
    begin, end = cu_q_lens[:-1], cu_q_lens[1:]
    aligned = begin // 8 * 8
    counts = jnp.where(is_prefill & (end > begin), -(-(end - aligned) // PREFILL_TILE), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    most = (num_tokens + num_rows * (PREFILL_TILE + 6)) // PREFILL_TILE
    tile = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32), num_rows - 1)
    token = aligned[row] + (tile - (ends - counts)[row]) * PREFILL_TILE
    low, high = jnp.maximum(token, begin[row]), jnp.minimum(token + PREFILL_TILE, end[row])
    position = kv_lens[row] - (end - begin)[row] + token - begin[row]
    reach = position + high - token if causal else kv_lens[row]
    reach = jnp.where(tile < ends[-1], reach, 0)
    columns = jnp.stack([row, token // 8, low, high, position, reach, row, row], axis=1)
    return PrefillWork(tiles=columns[jnp.argsort(-reach)], count=ends[-1:])
