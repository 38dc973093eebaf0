"""From options to a loaded model, a scheduler and a runner: everything that happens once."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.configs import env
from octavo.configs.cache import KVSpec
from octavo.configs.engine import EngineConfig, ResolvedConfig
from octavo.configs.errors import ConfigError
from octavo.configs.model import ModelConfig
from octavo.configs.scheduler import SchedulerConfig
from octavo.engine import environment, kv_memory
from octavo.engine.buckets import make_ladder
from octavo.engine.errors import RequestError
from octavo.engine.kv_groups import KVGroups
from octavo.engine.request import SamplingParams
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.engine.state import StateShape, empty_constrained, empty_slots
from octavo.engine.step import StepConfig
from octavo.engine.warmup import use_compilation_cache
from octavo.models_flax.checkpoint import Source, load_model, resolve
from octavo.models_flax.program import merge_model
from octavo.pallas_kernels.ragged_paged_attention import Heads, cache_dtype, choose
from octavo.pallas_kernels.sample import choose as choose_sampler

logger = logging.getLogger(__name__)

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """What start-up hands to the core."""

    resolved: ResolvedConfig
    model_config: ModelConfig
    source: Source
    default_sampling_params: dict[str, Any]
    scheduler: Scheduler
    runner: Runner
    num_blocks: int


def start(
    config: EngineConfig,
    *,
    busy: Callable[[], bool],
    progress: bool,
    source: Source | None = None,
    sampled_vocab_size: int | None = None,
) -> EngineParts:
    """Loads the model and builds what serves it; the runner is not started yet.

    Args:
      config: the options.
      busy: whether requests wait; background compilation holds back while they do.
      progress: show bars.
      source: the model, where it is resolved already.
      sampled_vocab_size: ids from here up have no string and are never drawn; by default the model's vocabulary.
    """
    env.reserve_device_memory(config.gpu_memory_utilization)
    cache_dir = _cache_dir(config)
    use_compilation_cache(cache_dir)
    source = source or resolve(config.model, revision=config.revision, load_format=config.load_format)
    model_config = ModelConfig.from_hf({**source.config, **config.hf_overrides}, source.generation_config)
    defaults = _sampling_defaults(config, source.generation_config)
    device = jax.devices()[0]
    resolved = config.resolve(device.platform, model_config.max_position_embeddings)
    definition, weights = load_model(
        source,
        model_config,
        dtype=jnp.dtype(resolved.dtype),
        load_format=config.load_format,
        seed=config.seed,
        device=device,
        materialize_tied_head=device.platform == "cpu",
        progress=progress,
    )
    merge = functools.partial(merge_model, definition)
    layer_specs = jax.eval_shape(merge, weights).kv_specs
    step_config = _step_config(config, resolved, model_config, layer_specs, device, sampled_vocab_size)
    ladder = make_ladder(resolved.decode_rungs, resolved.token_rungs, resolved.platform)
    make_runner = functools.partial(
        Runner,
        merge,
        weights,
        layer_specs,
        step_config,
        placed=jax.sharding.SingleDeviceSharding(device),
        kv_dtype=cache_dtype(resolved.kv_dtype),
        ladder=ladder,
        busy=busy,
        progress=progress,
    )
    num_blocks = config.num_gpu_blocks_override or kv_memory.solve(
        _memory(config, model_config, resolved, weights, step_config, make_runner, device, cache_dir),
        kv_memory.block_bytes(layer_specs, config.block_size, cache_dtype(resolved.kv_dtype), step_config.cache_spec),
        config.block_size,
        resolved,
    )
    logger.info(
        "%s on %s, %s, %d KV blocks of %d tokens in %s, %d programs",
        model_config.architecture,
        device.device_kind,
        resolved.dtype,
        num_blocks,
        config.block_size,
        resolved.kv_dtype,
        len(ladder.programs) + 2,
    )
    scheduler_config = _scheduler_config(config, resolved, step_config)
    return EngineParts(
        resolved=resolved,
        model_config=model_config,
        source=source,
        default_sampling_params=defaults,
        scheduler=Scheduler(scheduler_config, ladder, KVGroups([num_blocks], [config.block_size])),
        runner=make_runner(num_blocks=num_blocks),
        num_blocks=num_blocks,
    )


def _step_config(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model_config: ModelConfig,
    layer_specs: tuple[KVSpec, ...],
    device: jax.Device,
    sampled_vocab_size: int | None,
) -> StepConfig:
    """What every step's code depends on, the implementations of attention and sampling among it."""
    groups = tuple(dict.fromkeys(layer_specs))
    if len(groups) != 1:
        raise ConfigError(f"{model_config.architecture} needs {len(groups)} KV groups; one is supported")
    heads = Heads(
        num_heads=model_config.num_heads,
        num_kv_heads=groups[0].num_kv_heads,
        head_size=groups[0].key_size,
        block_size=config.block_size,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
    )
    attention = choose(config.attention_backend, device.platform, heads, device)
    vocab_size = model_config.vocab_size
    return StepConfig(
        shape=StateShape(
            num_slots=resolved.max_num_seqs + 1,
            max_model_len=resolved.max_model_len,
            max_blocks=(-(-resolved.max_model_len // config.block_size),) * len(groups),
            vocab_size=vocab_size,
            num_constrained=resolved.max_constrained_rows + 1,
        ),
        groups=groups,
        block_size=config.block_size,
        tiling=attention.tiling,
        attend=attention.attend,
        sampled_vocab_size=min(sampled_vocab_size or vocab_size, vocab_size),
        max_logprobs=min(config.max_logprobs, vocab_size),
        sampler=choose_sampler(config.sampling_backend, device.platform, vocab_size, device),
        cache_spec=attention.cache_spec,
    )


def _scheduler_config(config: EngineConfig, resolved: ResolvedConfig, step_config: StepConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        max_constrained_rows=resolved.max_constrained_rows,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        seed=config.seed,
        vocab_size=step_config.shape.vocab_size,
        sampled_vocab_size=step_config.sampled_vocab_size,
        max_logprobs=step_config.max_logprobs,
        cuts_are_plain=step_config.sampler.cuts_for_all,
    )


def _cache_dir(config: EngineConfig) -> pathlib.Path | None:
    """A folder that exists; None where none is wanted, or where the default one cannot be made."""
    named = config.compilation_cache_dir
    if named == "":
        return None
    folder = env.cache_dir() / "programs" if named is None else pathlib.Path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        if named is not None:
            raise ConfigError(f"compilation_cache_dir {named!r} cannot be made: {error}") from error
        logger.warning("compiled programs are not kept: %s cannot be made: %s", folder, error)
        return None
    return folder


def _memory(
    config: EngineConfig,
    model_config: ModelConfig,
    resolved: ResolvedConfig,
    weights: tuple[jax.Array, ...],
    step_config: StepConfig,
    make_runner: Callable[..., Runner],
    device: jax.Device,
    cache_dir: pathlib.Path | None,
) -> kv_memory.Memory:
    """What there is and what is taken. Temporaries are those of the largest program, twice: steps overlap."""
    shape = step_config.shape
    state = jax.eval_shape(lambda: (empty_slots(shape), empty_constrained(shape)))

    def measure() -> int:
        runner = make_runner(num_blocks=kv_memory.ROUNDING)
        largest = runner.warm_up.ladder.coarse[0]
        analysis = runner.lower_step(largest).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes) if analysis is not None else 0

    temporaries = 0
    if resolved.platform != "cpu":
        # Of the implementations their names: what "auto" means can change with the version.
        code = (step_config.attend.__module__, step_config.tiling, step_config.sampler.name, environment.versions())
        key = (model_config, resolved, shape, config.block_size, code, device.device_kind)
        temporaries = 2 * kv_memory.remembered_temporaries(cache_dir, key, measure)
    return kv_memory.Memory(
        usable=kv_memory.usable_bytes(device, config.gpu_memory_utilization),
        weights=sum(w.nbytes for w in weights),
        state=sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)),
        temporaries=temporaries,
    )


def _sampling_defaults(config: EngineConfig, generation_config: dict[str, Any] | None) -> dict[str, Any]:
    """What a request without parameters of its own gets: the model's generation_config.json, then the operator's.

    Raises ConfigError for an unknown name and for a value that SamplingParams refuses.
    """
    model = generation_config if config.generation_config == "auto" and generation_config else {}
    merged = {**model, **config.override_generation_config}
    if unknown := sorted(set(config.override_generation_config) - set(SAMPLING_DEFAULTS)):
        raise ConfigError(
            f"override_generation_config: {unknown[0]} is no sampling default; known: {', '.join(SAMPLING_DEFAULTS)}"
        )
    defaults = {name: merged[name] for name in SAMPLING_DEFAULTS if merged.get(name) is not None}
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        name = "max_new_tokens" if error.field == "max_tokens" else error.field
        origin = "override_generation_config" if name in config.override_generation_config else "generation_config.json"
        raise ConfigError(f"{origin} sets {name} to what cannot be: {error}") from error
    return defaults
