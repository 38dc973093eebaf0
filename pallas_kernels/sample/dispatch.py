"""Picks the implementation of the sampling op once, at start-up, by an argument."""

import dataclasses
import functools
import logging

import jax

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels.devices import NEEDS_HOPPER, is_hopper
from octavo.pallas_kernels.sample import reference
from octavo.pallas_kernels.sample.api import Sample

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "mosaic_gpu")


@dataclasses.dataclass(frozen=True)
class Sampler:
    """One way to run the op.

    Attributes:
      name: of the implementation.
      sample: the op.
      cuts_for_all: whether top_k, top_p and min_p cost rows and programs without them next to nothing.
    """

    name: str
    sample: Sample
    cuts_for_all: bool


def choose(backend: str, platform: str, size: int, device: jax.Device | None = None, dtype: str = "float32") -> Sampler:
    """The implementation called `backend`; "auto" is the reference.

    The Mosaic one has passed its checks on an H200 as an op, not yet inside a whole engine: it has to be asked for.

    Args:
      backend: a name of BACKENDS.
      platform: "cpu", "gpu" or "tpu".
      size: V, the logits of a row.
      device: where it runs; without it only the reference is known to run.
      dtype: of the logits.

    Raises:
      ConfigError: no implementation has that name, or the one named does not support the shapes or the device.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"sampling_backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    chosen = Sampler("reference", functools.partial(reference.sample, lazy=platform == "cpu"), cuts_for_all=False)
    if backend == "mosaic_gpu":
        special = _hopper(size, dtype, device)
        if not isinstance(special, Sampler):
            raise ConfigError(f"sampling_backend {backend} cannot be used: {special}")
        chosen = special
    logger.info("sampling: %s (%s)", chosen.name, "the default" if backend == "auto" else "asked for")
    return chosen


def _hopper(size: int, dtype: str, device: jax.Device | None) -> Sampler | str:
    """The Mosaic implementation, or why it cannot be used."""
    if not is_hopper(device):
        return NEEDS_HOPPER
    # Imported where it can run: Mosaic's dialects take half a second of every start.
    from octavo.pallas_kernels.sample import mosaic_gpu

    if (refusal := mosaic_gpu.supports(size=size, dtype=dtype)) is not None:
        return refusal
    return Sampler("mosaic_gpu", mosaic_gpu.sample, cuts_for_all=True)
