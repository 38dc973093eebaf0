"""Picks the implementation of the attention op once, at start-up, by an argument."""

import dataclasses

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels.ragged_paged_attention import reference
from octavo.pallas_kernels.ragged_paged_attention.api import Attend, Tiling


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run the op, and how it cuts the work."""

    name: str
    attend: Attend
    tiling: Tiling


TILINGS = {
    "cpu": Tiling(chunk=128, decode_group=4, tile=64, prefill_group=1),
    "gpu": Tiling(chunk=256, decode_group=64, tile=64, prefill_group=8),
    "tpu": Tiling(chunk=256, decode_group=64, tile=64, prefill_group=8),
}


def choose(backend: str, platform: str) -> Implementation:
    """The implementation called `backend`, or the best one for `platform` where that is "auto".

    Raises:
      ConfigError: no implementation has that name.
    """
    if backend not in ("auto", "reference"):
        raise ConfigError(f"attention_backend must be auto or reference, got {backend!r}")
    return Implementation("reference", reference.attend, TILINGS[platform])
