"""Plan -> Batch: one packed i32 vector on the host, its parts on the device.

The vector is fresh for each step: on CPU, jax reads aligned numpy memory in place,
so a reused buffer would change under a step still in flight.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from octavo.engine.plan import Plan


@flax.struct.dataclass
class Batch:
    """The rows of one step, as its program sees them. Padded rows own the scratch slot and no tokens."""

    num_decode: jax.Array  # i32[]
    slot: jax.Array  # i32[R]
    q_len: jax.Array  # i32[R]
    samples: jax.Array  # bool[R]
    edits: jax.Array  # i32[groups, 3 (slot, index, block), R]


def packed_size(num_rows: int, num_groups: int) -> int:
    """Length of the packed vector of a program with `num_rows` rows."""
    return 1 + 3 * num_rows + 3 * num_rows * num_groups


def pack(plan: Plan, num_groups: int, scratch_slot: int) -> np.ndarray:
    """num_decode | slot[R] | q_len[R] | samples[R] | edits[groups, 3, R]."""
    num_rows, n = plan.program[1], len(plan.slots)
    packed = np.zeros(packed_size(num_rows, num_groups), np.int32)
    packed[0] = plan.num_decode
    rows = packed[1 : 1 + 3 * num_rows].reshape(3, num_rows)
    rows[0] = scratch_slot
    rows[:, :n] = (plan.slots, plan.q_lens, plan.samples)
    edits = packed[1 + 3 * num_rows :].reshape(num_groups, 3, num_rows)
    edits[:, 0] = scratch_slot
    if plan.edits:
        columns = np.array(plan.edits, np.int32)  # [edits, 4]
        for group in range(num_groups):
            mine = columns[columns[:, 0] == group, 1:]
            edits[group, :, : len(mine)] = mine.T
    return packed


def unpack(packed: jax.Array, num_rows: int, num_groups: int) -> Batch:
    """The inverse of `pack`, inside the program."""
    rows = packed[1 : 1 + 3 * num_rows].reshape(3, num_rows)
    return Batch(
        num_decode=packed[0],
        slot=rows[0],
        q_len=rows[1],
        samples=rows[2] > jnp.int32(0),
        edits=packed[1 + 3 * num_rows :].reshape(num_groups, 3, num_rows),
    )
