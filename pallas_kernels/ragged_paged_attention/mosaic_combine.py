"""Merges the pieces of decode rows that were cut: a softmax over the pieces' log-sum-exps."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode import part_width
from octavo.pallas_kernels.ragged_paged_attention.mosaic_tiles import Shape
from octavo.pallas_kernels.ragged_paged_attention.worklist import DecodeWork


def combine(out: Any, part: jax.Array, lse: jax.Array, work: DecodeWork, shape: Shape) -> None:
    """Writes the rows that were cut into `out`; rows with nothing to combine stay as they are.

    Args:
      out: a reference to [T, N, H].
      part: f32[slots * N, part_width], each piece's normalised result.
      lse: f32[slots, K, 64], log2 of each piece's sum of exponentials.
      work: from `plan_decode`.
      shape: static sizes.
    """

    at_once = shape.parameters.combine_at_once
    blocks = shape.parameters.combine_blocks * shape.blocks
    width = part_width(shape.head_size)

    def body(part: Any, lse: Any, cut: Any, num_cut: Any, out: Any, staged: Any = None) -> None:
        block = lax.axis_index("block")
        num_items = num_cut[0] * shape.num_heads
        turns = lax.div(jnp.maximum(num_items - block, 0) + (blocks - 1), jnp.int32(blocks))
        lax.fori_loop(0, turns, lambda turn, _: one_item(turn * blocks + block, part, lse, cut, out, staged), None)

    def one_item(item: jax.Array, part: Any, lse: Any, cut: Any, out: Any, staged: Any) -> None:
        index, head = lax.div(item, jnp.int32(shape.num_heads)), lax.rem(item, jnp.int32(shape.num_heads))
        row, first, count = (cut[index, c] for c in range(3))
        kv_head = lax.div(head, jnp.int32(shape.group))
        offset = lax.rem(row * shape.num_heads + kv_head * shape.group, jnp.int32(8))
        member = offset + lax.rem(head, jnp.int32(shape.group))

        def some(i: jax.Array, carry: Any) -> Any:
            high, total, acc = carry
            index = [jnp.minimum(i * at_once + j, count - 1) for j in range(at_once)]
            real = [i * at_once + j < count for j in range(at_once)]
            sums = [lse[first + j, kv_head, member] for j in index]
            parts = [mosaic.vector_load(part.at[(first + j) * shape.num_heads + head]) for j in index]
            new_high = high
            for s in sums:
                new_high = jnp.maximum(new_high, s)
            fade = jnp.exp2(high - new_high)
            total, acc = total * fade, acc * fade
            for here, s, p in zip(real, sums, parts, strict=True):
                weight = jnp.where(here, jnp.exp2(s - new_high), 0.0)
                total, acc = total + weight, acc + p * weight
            return new_high, total, acc

        carry = (jnp.float32(-1e30), jnp.float32(0.0), mosaic.vector_zeros(width))
        _, total, acc = lax.fori_loop(0, lax.div(count + (at_once - 1), jnp.int32(at_once)), some, carry)
        result = (acc / total).astype(out.dtype)
        if staged is None:
            out[row, head] = result
            return
        staged[...] = result  # the columns beyond H hold whatever lay in `part`
        mosaic.commit_smem()
        mosaic.copy_out(staged.at[mosaic.ds(0, shape.head_size)], out.at[row, head])
        mosaic.store_done()

    mosaic.run(
        body,
        part,
        lse,
        work.cut,
        work.num_cut,
        out,
        out=(),
        scratch={} if width == shape.head_size else {"staged": mosaic.plain((width,), out.dtype)},
        grid={"block": blocks},
        warpgroups=1,
        interpret=shape.interpret,
        name="paged_decode_combine",
    )
