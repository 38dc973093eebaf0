"""Fills a model's parameters from a checkpoint, one at a time, or with seeded random numbers.

The checkpoint must cover the model exactly: unknown, missing and mis-shaped tensors are
refused by name before anything is allocated. Each parameter's parts go to the device as
they are stored and are turned, joined and cast there, so the host holds no copy of the model.
"""

import fnmatch
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from octavo.configs.errors import ConfigError, LoadError
from octavo.configs.model import ModelConfig
from octavo.models_flax.checkpoint.source import Source
from octavo.models_flax.checkpoint.tensors import TensorReader
from octavo.models_flax.layers import Axes
from octavo.models_flax.program import ModelDef, split_model
from octavo.models_flax.registry import load_family
from octavo.models_flax.rules import Assembly, Layout, expand

TIED_HEAD, EMBEDDING = "head.weight", "embed.table"
DUMMY_RANGE = 1e-3
SHOWN = 8  # names in an error message

type Place = Callable[[Axes], Sharding]


def load_model(
    source: Source,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    load_format: str = "auto",
    seed: int = 0,
    device: jax.Device | None = None,
    place: Place | None = None,
    materialize_tied_head: bool = False,
    progress: bool = True,
) -> tuple[ModelDef, tuple[jax.Array, ...]]:
    """Builds the model that `config` describes and fills it.

    Args:
      source: from `resolve`.
      config: from `ModelConfig.from_hf(source.config, source.generation_config)`.
      dtype: of every weight: bfloat16, float16 or float32.
      load_format: "dummy" fills the model from `seed`; any other value reads the source.
      seed: of the dummy weights.
      device: where weights go; the first device by default.
      place: instead of `device`, the sharding for a parameter with these logical axes.
      materialize_tied_head: see `Decoder`.
      progress: a bar on stderr.

    Raises:
      ConfigError: a dtype that weights cannot have.
      LoadError: the checkpoint does not fit the model.
    """
    dtype = np.dtype(dtype)
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ConfigError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    family = load_family(config.architecture)
    build = partial(family.build, config, dtype=dtype, materialize_tied_head=materialize_tied_head)
    abstract = nnx.eval_shape(build)
    definition, _ = split_model(abstract)
    params = parameters(abstract)
    place = place or _on_one(device or jax.devices()[0])
    placement = {path: place(axes) for path, (_, axes) in params.items()}
    shapes = {path: shape for path, (shape, _) in params.items()}
    if load_format == "dummy":
        fill = partial(_dummy, seed)
    else:
        reader = source.open_tensors()
        ignored = [*family.ignored, *(["lm_head.weight"] if config.tie_word_embeddings else [])]
        assemblies = expand(family.rules, config, {p: s for p, s in shapes.items() if not _derived(p, config)})
        check_cover(assemblies, reader, ignored)
        fill = partial(_read, reader, assemblies)

    leaves: dict[str, jax.Array] = {}
    size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    with tqdm(total=size, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for path, shape in shapes.items():
            if _derived(path, config):
                leaf = _assemble((leaves[EMBEDDING],), (_transposed(shape),), None, dtype, placement[path])
            else:
                leaf = fill(path, shape, dtype, placement[path])
            if leaf.shape != shape:
                raise ValueError(f"the rules give {path} the shape {leaf.shape}, the model has {shape}")
            # One at a time: what was uploaded for this parameter is free before the next is read.
            leaves[path] = leaf.block_until_ready()
            bar.update(leaf.nbytes)
    return definition, tuple(leaves.values())


def parameters(model: nnx.Module) -> dict[str, tuple[tuple[int, ...], Axes]]:
    """Path -> (shape, logical axes) of each parameter, in the order of `split_model`'s leaves."""
    state = nnx.split(model)[1]
    flat, _ = jax.tree.flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {
        ".".join(str(key.key) for key in path): (variable.get_value().shape, variable.get_metadata("axes"))
        for path, variable in flat
    }


def check_cover(assemblies: Mapping[str, Assembly], reader: TensorReader, ignored: Iterable[str]) -> None:
    """Refuses a checkpoint whose tensors are not exactly those that the model needs."""
    wanted = {part.source: part.layout.shape for assembly in assemblies.values() for part in assembly.parts}
    have = reader.tensors
    if missing := [name for name in wanted if name not in have]:
        raise LoadError(f"the checkpoint lacks {_some(missing)}")
    unknown = [n for n in have if n not in wanted and not any(fnmatch.fnmatchcase(n, pattern) for pattern in ignored)]
    if unknown:
        raise LoadError(f"the checkpoint has tensors that this model has no place for: {_some(unknown)}")
    wrong = [f"{n} has shape {have[n].shape}, not {shape}" for n, shape in wanted.items() if have[n].shape != shape]
    if wrong:
        raise LoadError(f"the checkpoint does not fit its config: {_some(wrong)}")


def _read(
    reader: TensorReader,
    assemblies: Mapping[str, Assembly],
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
) -> jax.Array:
    del shape
    assembly = assemblies[path]
    upload = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    parts = tuple(jax.device_put(reader.read(part.source, dtype), upload) for part in assembly.parts)
    layouts = tuple(part.layout for part in assembly.parts)
    return _assemble(parts, layouts, assembly.axis, dtype, sharding)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _assemble(
    parts: tuple[jax.Array, ...], layouts: tuple[Layout, ...], axis: int | None, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    turned = [layout.apply(part).astype(dtype) for layout, part in zip(layouts, parts, strict=True)]
    whole = turned[0] if axis is None else jnp.concatenate(turned, axis=axis)
    # The copy keeps a parameter that needs no change from sharing memory with the file (CPU).
    return _placed(jnp.copy(whole), sharding)


def _dummy(seed: int, path: str, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """Depends on the parameter's name, not on which other parameters there are."""
    words = np.array([seed % 2**32, zlib.crc32(path.encode())], np.uint32)
    return _uniform(jax.device_put(words, None if _meshed(sharding) else sharding), shape, dtype, sharding)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _uniform(seed_and_name: jax.Array, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """One program for each distinct shape."""
    key = jax.random.fold_in(jax.random.key(seed_and_name[0]), seed_and_name[1])
    # Drawn flat: a shape of four axes takes five times as long to compile.
    drawn = jax.random.uniform(key, (math.prod(shape),), jnp.float32, -DUMMY_RANGE, DUMMY_RANGE)
    return _placed(drawn.astype(dtype).reshape(shape), sharding)


def _placed(x: jax.Array, sharding: Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding) if _meshed(sharding) else x


def _meshed(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding)


def _on_one(device: jax.Device) -> Place:
    return lambda axes: SingleDeviceSharding(device)


def _derived(path: str, config: ModelConfig) -> bool:
    """The materialised head of a tied model is made from the embedding."""
    return path == TIED_HEAD and config.tie_word_embeddings


def _transposed(shape: tuple[int, ...]) -> Layout:
    return Layout(shape=shape[::-1], split=shape[::-1], order=(1, 0), result=shape)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
