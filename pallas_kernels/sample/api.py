"""Sampling: from logits to one token a row. One contract on every platform.

    sample(logits, settings, *, drawable, adjusted) -> Drawn

Greedy where the temperature is 0. Otherwise temperature, top_k, top_p of what is left, then min_p, with
all ties at a threshold kept, then the largest sum of scaled logit and Gumbel noise. The noise depends on
(seed, position, id) alone, so a row's token depends on neither its place nor its neighbours. Of a row with a
temperature alone an implementation may draw a part of the vocabulary first and then an id of that part: the same
distribution, other tokens.
This module knows shapes and names; it refuses to know requests, penalties or a mesh.
"""

from typing import Protocol

import flax.struct
import jax
from jaxtyping import Array, Float


@flax.struct.dataclass
class Cuts:
    """Which tokens may be drawn.

    Attributes:
      top_k: i32[R], 0 is off.
      top_p: f32[R], 1 is off.
      min_p: f32[R], 0 is off.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


@flax.struct.dataclass
class Settings:
    """How each row is drawn.

    Attributes:
      temperature: f32[R], 0 is greedy.
      seed: i32[R], the bits of a u32.
      position: i32[R], where the new token will stand in its sequence.
      cuts: None where no row of the program has one.
    """

    temperature: jax.Array
    seed: jax.Array
    position: jax.Array
    cuts: Cuts | None = None


@flax.struct.dataclass
class Drawn:
    """What sampling says of each row.

    Attributes:
      token: i32[R].
      logprob: f32[R], the model's own: of `logits`, before temperature and cuts.
      finite: bool[R], False where `logits` hold a NaN or an infinity.
    """

    token: jax.Array
    logprob: jax.Array
    finite: jax.Array


class Sample(Protocol):
    """An implementation of the op.

    Args:
      logits: f32 or bf16 [R, V].
      settings: of each row.
      drawable: ids from here up are never drawn (static).
      adjusted: f32[R, V] to draw from in place of `logits`; -inf is never drawn unless nothing else is there.
    """

    def __call__(
        self,
        logits: Float[Array, "R V"],
        settings: Settings,
        *,
        drawable: int,
        adjusted: Float[Array, "R V"] | None = None,
    ) -> Drawn: ...
