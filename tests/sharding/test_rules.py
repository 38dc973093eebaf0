"""Rules place arrays by the names of their axes, and refuse what would be placed by chance."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from octavo.configs.cache import KVSpec
from octavo.configs.errors import ConfigError
from octavo.pallas_kernels.ragged_paged_attention.api import cache_spec
from octavo.sharding.mesh import make_mesh
from octavo.sharding.rules import TENSOR_PARALLEL, Rules

RULES = Rules((("heads", "tensor"), ("mlp", "tensor"), ("embed", None)))


def test_spec_follows_the_names() -> None:
    assert RULES.spec(("embed", "heads", None)) == PartitionSpec(None, "tensor", None)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("embed", "head"), "'head' of .* has no rule"),
        (("heads", "embed", "mlp"), "'heads' and 'mlp' of .* both lie on the mesh axis 'tensor'"),
        (("heads", "heads"), "'heads' and 'heads'"),
    ],
    ids=["unknown", "collision", "twice"],
)
def test_spec_refuses(axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RULES.spec(axes)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((("heads", "tensor"), ("heads", None)), "more than one rule"),
        ((("heads", "model"),), "'heads' -> 'model' names no mesh axis"),
    ],
    ids=["duplicate", "no such mesh axis"],
)
def test_tables_are_checked(table: tuple[tuple[str, str | None], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rules(table)


def test_sharding_divides_the_named_axis() -> None:
    mesh = make_mesh(tensor=4)
    array = np.arange(96, dtype=np.float32).reshape(3, 8, 4)
    placed = jax.device_put(array, RULES.sharding(mesh, ("embed", "heads", None), array.shape))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2, 4)}
    np.testing.assert_array_equal(np.asarray(placed), array)


def test_sharding_refuses_what_does_not_divide() -> None:
    mesh = make_mesh(tensor=4)
    with pytest.raises(ConfigError, match="'heads' has size 6, which 4 devices"):
        RULES.sharding(mesh, ("embed", "heads"), (3, 6))
    with pytest.raises(ConfigError, match="2 logical axes"):
        RULES.sharding(mesh, ("embed", "heads"), (3, 8, 2))


def test_the_cache_is_split_over_kv_heads() -> None:
    cache = cache_spec(KVSpec(num_kv_heads=4, key_size=16, value_size=16), num_blocks=6, block_size=8)
    sharding = TENSOR_PARALLEL.sharding(make_mesh(tensor=2), cache.axes, cache.shape)
    assert sharding.shard_shape(cache.shape) == (6, 2, 2, 8, 16)
