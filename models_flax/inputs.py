"""What a forward pass is told besides its tokens: one frozen context, no globals."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class ForwardContext:
    """Shared by all layers of one step.

    Attributes:
      positions: i32[T], or i32[3, T] for models with three-part positions.
      plans: per KV group, what the attention op's `prepare` made for this step.
      adapters: i32[T], the adapter slot of each token, or None without adapters.
      attend: the attention op, chosen once at start-up (static).
    """

    positions: jax.Array
    plans: tuple[Any, ...]
    adapters: jax.Array | None = None
    attend: Callable[..., Any] = flax.struct.field(pytree_node=False, default=None)
