"""Engine steps for a device that is not there: shapes in place of weights, compiled ahead of time. Runs nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.configs.engine import default_decode_rungs, default_token_rungs
from octavo.configs.model import ModelConfig
from octavo.engine.buckets import make_ladder
from octavo.engine.runner import Runner
from octavo.engine.state import StateShape
from octavo.engine.step import StepConfig
from octavo.models_flax.program import merge_model, split_model
from octavo.models_flax.registry import load_family
from octavo.pallas_kernels import ragged_paged_attention as rpa
from octavo.pallas_kernels.sample import choose as choose_sampler


def abstract_runner(
    model: dict[str, Any],
    device: jax.Device,
    *,
    attention: str,
    sampling: str = "auto",
    num_blocks: int,
    rows: int = 256,
    tokens: int = 2048,
    max_model_len: int = 9216,
    block_size: int = 16,
    dtype: str = "bfloat16",
) -> Runner:
    """A runner whose programs can be lowered and compiled.

    Args:
      model: a Hugging Face config.json.
      device: of a topology description.
      attention, sampling: names of implementations.
      num_blocks: of the cache.
      rows, tokens: the largest step.
      max_model_len, block_size, dtype: as in EngineConfig.
    """
    config = ModelConfig.from_hf(model, None)
    family = load_family(config.architecture)
    module = nnx.eval_shape(lambda: family.build(config, dtype=jnp.dtype(dtype), materialize_tied_head=False))
    definition, leaves = split_model(module)
    placed = jax.sharding.SingleDeviceSharding(device)
    heads = rpa.Heads(config.num_heads, config.num_kv_heads, config.head_dim, block_size, dtype, dtype)
    chosen = rpa.choose(attention, device.platform, heads, device)
    step_config = StepConfig(
        shape=StateShape(
            num_slots=rows + 1,
            max_model_len=max_model_len,
            max_blocks=(-(-max_model_len // block_size),),
            vocab_size=config.vocab_size,
            num_constrained=17,
        ),
        groups=tuple(dict.fromkeys(module.kv_specs)),
        block_size=block_size,
        tiling=chosen.tiling,
        attend=chosen.attend,
        sampled_vocab_size=config.vocab_size,
        max_logprobs=20,
        sampler=choose_sampler(sampling, device.platform, config.vocab_size, device),
        cache_spec=chosen.cache_spec,
    )
    return Runner(
        functools.partial(merge_model, definition),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in leaves),
        module.kv_specs,
        step_config,
        placed=placed,
        kv_dtype=jnp.dtype(dtype),
        ladder=make_ladder(default_decode_rungs(rows, "gpu"), default_token_rungs(rows, tokens, "gpu"), "gpu"),
        num_blocks=num_blocks,
        busy=lambda: False,
        progress=False,
    )
