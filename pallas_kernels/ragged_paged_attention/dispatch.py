"""Picks the implementation of the attention op once, at start-up, by an argument."""

import dataclasses
import logging

import jax

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.devices import NEEDS_HOPPER, is_hopper
from octavo.pallas_kernels.ragged_paged_attention import reference
from octavo.pallas_kernels.ragged_paged_attention.api import Attend, MakeCacheSpec, Tiling, cache_spec
from octavo.pallas_kernels.ragged_paged_attention.parameters import DEFAULT, Parameters

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "mosaic_gpu", "tpu")
OP = "ragged_paged_attention"  # in files of tuned parameters


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run the op, how it cuts the work, and the form of the cache that it reads."""

    name: str
    attend: Attend
    tiling: Tiling
    cache_spec: MakeCacheSpec = cache_spec


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
        name = backend if backend != "auto" else "tpu" if platform == "tpu" else "mosaic_gpu"
        special = (_tpu if name == "tpu" else hopper)(heads, device)
        if isinstance(special, Implementation):
            chosen, reason = special, str(device)
        elif backend != "auto":
            raise ConfigError(f"attention_backend {backend} cannot be used: {special}")
        else:
            reason = f"{name}: {special}"
    logger.info("attention: %s (%s)", chosen.name, reason)
    return chosen


def hopper(
    heads: Heads | None, device: jax.Device | None, parameters: Parameters | None = None
) -> Implementation | str:
    """The Mosaic implementation, or why it cannot be used.

    Args:
      heads, device: as in `choose`.
      parameters: by default those tuned for the device.
    """
    if not is_hopper(device):
        return NEEDS_HOPPER
    if heads is None:
        return "the shapes are not known"
    # Imported where it can run: Mosaic's dialects take half a second of every start.
    from octavo.pallas_kernels.ragged_paged_attention import mosaic_gpu

    if (refusal := mosaic_gpu.supports(**dataclasses.asdict(heads))) is not None:
        return refusal
    if parameters is None:
        wanted = {"head_size": heads.head_size, "kv_dtype": heads.kv_dtype}
        parameters = tuning.lookup(device.device_kind, OP, wanted, DEFAULT, Parameters)
    tiling = mosaic_gpu.tiling_for(
        device.core_count, parameters, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size,
        narrow=heads.kv_dtype != heads.dtype,
    )  # fmt: skip
    return Implementation("mosaic_gpu", mosaic_gpu.attend, tiling)


def _tpu(heads: Heads | None, device: jax.Device | None) -> Implementation | str:
    """The implementation, or why it cannot be used."""
    if device is None or device.platform != "tpu":
        return "it needs a TPU"
    if heads is None:
        return "the shapes are not known"
    from octavo.pallas_kernels.ragged_paged_attention import tpu

    refusal = tpu.supports(**dataclasses.asdict(heads))
    return refusal or Implementation("tpu", tpu.attend, TILINGS["tpu"], tpu.cache_spec)
