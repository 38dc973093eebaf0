"""What a layer asks of the KV cache: plain values that every room above may read."""

import dataclasses
import enum


class KVKind(enum.StrEnum):
    """How a layer uses its cache; layers with equal specs form one KV group."""

    FULL = "full"
    SLIDING = "sliding"


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """The cache that one attention layer declares.

    Attributes:
      kind: `FULL` attends to every earlier token, `SLIDING` to the last `window`.
      num_kv_heads: K, key/value heads.
      key_size: H, the head size of keys (and queries).
      value_size: Hv, the head size of values.
      window: tokens a sliding layer looks back, `None` for full attention.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    kind: KVKind = KVKind.FULL
    window: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.key_size, self.value_size) < 1:
            raise ValueError(f"KVSpec: num_kv_heads, key_size and value_size must be positive, got {self}")
        if (self.kind is KVKind.SLIDING) != (self.window is not None):
            raise ValueError(f"KVSpec: a window belongs to a sliding layer and to no other, got {self}")
