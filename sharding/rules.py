"""Which mesh axis each logical axis lies on: the only place that knows. Refuses unknown names and collisions."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from octavo.configs.errors import ConfigError
from octavo.sharding.mesh import AXES


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis, or None for a copy on every device.

    Parameters and caches name their axes logically ("kv_heads", "mlp"); what a
    name means for placement is decided here, once for all of them.

    Attributes:
      table: pairs (logical axis, mesh axis or None), each logical axis once.
    """

    table: tuple[tuple[str, str | None], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.table]
        for name, axis in self.table:
            if names.count(name) > 1:
                raise ConfigError(f"the logical axis {name!r} has more than one rule")
            if axis is not None and axis not in AXES:
                raise ConfigError(f"the rule {name!r} -> {axis!r} names no mesh axis (there are: {', '.join(AXES)})")

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array whose dimensions have these logical names (None: never split).

        Raises:
          ConfigError: a name without a rule, or two dimensions on one mesh axis.
        """
        table = dict(self.table)
        for name in axes:
            if name is not None and name not in table:
                raise ConfigError(f"the logical axis {name!r} of {tuple(axes)} has no rule")
        placed = [None if name is None else table[name] for name in axes]
        used = [axis for axis in placed if axis is not None]
        for axis in used:
            if used.count(axis) > 1:
                both = " and ".join(repr(name) for name, to in zip(axes, placed, strict=True) if to == axis)
                raise ConfigError(f"{both} of {tuple(axes)} would both lie on the mesh axis {axis!r}")
        return PartitionSpec(*placed)

    def sharding(self, mesh: jax.sharding.Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where an array of this shape lies on the mesh.

        Raises:
          ConfigError: as `spec`, or names that do not fit the shape, or a size that the devices do not divide.
        """
        if len(axes) != len(shape):
            raise ConfigError(f"{len(axes)} logical axes {tuple(axes)} for an array of shape {tuple(shape)}")
        spec = self.spec(axes)
        for name, size, axis in zip(axes, shape, spec, strict=True):
            parts = 1 if axis is None else mesh.shape[axis]
            if size % parts:
                raise ConfigError(f"{name!r} has size {size}, which {parts} devices on {axis!r} do not divide")
        return NamedSharding(mesh, spec)


# Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053): heads and the feed-forward width
# are divided, so that one all-reduce ends each half of a layer.
TENSOR_PARALLEL = Rules(
    (
        ("blocks", None),
        ("embed", None),
        ("head", None),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", "tensor"),
    )
)
