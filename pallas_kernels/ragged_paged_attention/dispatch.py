"""Picks the implementation of the attention op once, at start-up, by an argument."""

import dataclasses
import logging

import jax

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels.ragged_paged_attention import reference
from octavo.pallas_kernels.ragged_paged_attention.api import Attend, Tiling
from octavo.pallas_kernels.ragged_paged_attention.worklist import Workers

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "mosaic_gpu")
HOPPER = "9.0"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run the op, and how it cuts the work."""

    name: str
    attend: Attend
    tiling: Tiling


@dataclasses.dataclass(frozen=True)
class Heads:
    """What the op is asked for on one device: after tensor parallelism has split the heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    kv_dtype: str


TILINGS = {
    "cpu": Tiling(chunk=128, decode_group=4, tile=64, prefill_group=1),
    "gpu": Tiling(chunk=256, decode_group=64, tile=64, prefill_group=8),
    "tpu": Tiling(chunk=256, decode_group=64, tile=64, prefill_group=8),
}


def choose(backend: str, platform: str, heads: Heads | None = None, device: jax.Device | None = None) -> Implementation:
    """The implementation called `backend`, or the best one for the device where that is "auto".

    Args:
      backend: a name of BACKENDS.
      platform: "cpu", "gpu" or "tpu".
      heads: the shapes; without them only the reference is known to fit.
      device: where it runs; without it only the reference is known to run.

    Raises:
      ConfigError: no implementation has that name, or the one named does not support the shapes or the device.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"attention_backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    chosen = Implementation("reference", reference.attend, TILINGS[platform])
    reason = "asked for"
    if backend != "reference":
        refusal = _refuses_mosaic_gpu(heads, device)
        if refusal is None and heads is not None and device is not None:
            from octavo.pallas_kernels.ragged_paged_attention import mosaic_gpu

            tiling = Tiling(chunk=128, workers=Workers(2 * device.core_count, heads.num_kv_heads))
            chosen = Implementation("mosaic_gpu", mosaic_gpu.attend, tiling)
        elif backend == "mosaic_gpu":
            raise ConfigError(f"attention_backend mosaic_gpu cannot be used: {refusal}")
        else:
            reason = f"mosaic_gpu: {refusal}"
    logger.info("attention: %s (%s)", chosen.name, reason if chosen.name == "reference" else "Hopper")
    return chosen


def _refuses_mosaic_gpu(heads: Heads | None, device: jax.Device | None) -> str | None:
    if device is None or device.platform != "gpu" or device.compute_capability != HOPPER:
        return f"it needs a GPU of compute capability {HOPPER}"
    if heads is None:
        return "the shapes are not known"
    # Imported where it can run: Mosaic's dialects take half a second of every start.
    from octavo.pallas_kernels.ragged_paged_attention import mosaic_gpu

    return mosaic_gpu.supports(**dataclasses.asdict(heads))
