"""Owns weights, device state and compiled programs. Runs plans; decides nothing.

`launch(plan)` reads the plan and nothing else of the host, so a recorded run of plans
replays in a fresh runner to the same tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.configs.cache import KVSpec
from octavo.engine import state as device_state
from octavo.engine.batch import pack, packed_size
from octavo.engine.buckets import Ladder, Program
from octavo.engine.plan import Plan, SampledHost
from octavo.engine.state import DeviceState
from octavo.engine.step import Sampled, StepConfig, step, to_host
from octavo.engine.warmup import Compiled, WarmUp


class Runner:
    """One model on one device.

    Args:
      merge: makes the model from `weights`, inside a trace.
      weights: the model's leaves, on the device (their shapes are enough to compile).
      layer_specs: each layer's cache.
      step_config: static settings of every step.
      placed: where state and batches live.
      kv_dtype: of the cache.
      ladder: the programs to have.
      num_blocks: per layer's KV group, the null block included.
      busy: whether requests wait (see WarmUp).
      progress: show bars.
    """

    def __init__(
        self,
        merge: Callable[[tuple[jax.Array, ...]], Any],
        weights: tuple[jax.Array, ...],
        layer_specs: tuple[KVSpec, ...],
        step_config: StepConfig,
        *,
        placed: jax.sharding.Sharding,
        kv_dtype: np.dtype,
        ladder: Ladder,
        num_blocks: int,
        busy: Callable[[], bool],
        progress: bool,
    ) -> None:
        self.config = step_config
        self.weights = weights
        self._merge = merge
        self._layer_specs = layer_specs
        self._kv_dtype = kv_dtype
        self._num_blocks = num_blocks
        self._placed = placed
        self.state: DeviceState | None = None  # made by start(), gone after close()
        self.num_device_calls = 0  # of steps; admissions are counted apart
        self.num_load_calls = 0
        self.warm_up = WarmUp(ladder, self.compile_step, busy, progress)

    def start(self, *, wait_for_all: bool) -> None:
        """Compiles what must be there, then makes the state."""
        shape = self.config.shape
        slots = self._abstract(jax.eval_shape(lambda: device_state.empty_slots(shape)))
        load = jax.jit(functools.partial(device_state.load_slot, shape=shape), donate_argnums=0)
        self._load_slot = load.lower(slots, self._packed(device_state.packed_slot_load_size(shape))).compile()
        constrained = self._abstract(jax.eval_shape(lambda: device_state.empty_constrained(shape)))
        load_row = jax.jit(functools.partial(device_state.load_constrained, shape=shape), donate_argnums=0)
        self._load_constrained = load_row.lower(constrained, slots, self._packed(3 + shape.mask_words)).compile()
        self.warm_up.start(wait_for_all=wait_for_all)
        make = jax.jit(self._empty_state, out_shardings=self._placed)
        self.state = make()

    @property
    def num_programs(self) -> int:
        """Steps of the ladder and the two loads."""
        return len(self.warm_up.ladder.programs) + 2

    def launch(self, plan: Plan) -> Sampled:
        """Dispatches one step and returns at once; the results come with `fetch`."""
        state = self._loaded()
        scratch = self.config.shape.num_slots - 1
        for load in plan.loads:
            slots = self._load_slot(state.slots, device_state.pack_slot_load(load, self.config.shape))
            constrained = state.constrained
            if load.constrained_row >= 0:
                packed = device_state.pack_constrained_load(load, self.config.shape)
                constrained = self._load_constrained(constrained, slots, packed)
            self.num_load_calls += 1
            state = DeviceState(kv=state.kv, slots=slots, constrained=constrained)
        program = self.warm_up.programs[plan.program]
        self.state, sampled = program(self.weights, state, pack(plan, len(self.config.groups), scratch))
        self.num_device_calls += 1
        sampled.rows.copy_to_host_async()
        if sampled.prompt is not None:
            sampled.prompt.copy_to_host_async()
        return sampled

    def fetch(self, sampled: Sampled) -> SampledHost:
        """Waits for a launched step."""
        return to_host(sampled, self.config.max_logprobs)

    def compile_step(self, program: Program) -> Compiled:
        """Lowers and compiles one program, from the persistent cache where it is there."""
        return self.lower_step(program).compile()

    def lower_step(self, program: Program) -> jax.stages.Lowered:
        """The program before compilation."""
        run = functools.partial(step, self._merge, self.config, program)
        jitted = jax.jit(run, donate_argnums=1)
        weights = tuple(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding) for w in self.weights)
        state = self._abstract(jax.eval_shape(self._empty_state))
        return jitted.lower(weights, state, self._packed(packed_size(program[1], len(self.config.groups))))

    def close(self) -> None:
        """Frees the device's memory."""
        self.warm_up.close()
        self.state = None
        self.weights = ()
        self.warm_up.programs.clear()

    def _loaded(self) -> DeviceState:
        if self.state is None:
            raise RuntimeError("the runner is not started, or closed")
        return self.state

    def _empty_state(self) -> DeviceState:
        make = self.config.cache_spec
        shapes = [make(spec, self._num_blocks, self.config.block_size).shape for spec in self._layer_specs]
        return DeviceState(
            kv=tuple(jnp.zeros(shape, self._kv_dtype) for shape in shapes),
            slots=device_state.empty_slots(self.config.shape),
            constrained=device_state.empty_constrained(self.config.shape),
        )

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placed), tree)

    def _packed(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._placed)
