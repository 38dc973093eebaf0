"""The device mesh of one model replica. Knows axis names and devices; refuses to know what is put on them."""

from collections.abc import Sequence

import jax
import numpy as np

from octavo.configs.errors import ConfigError

AXES = ("tensor",)  # every rule names one of these


def make_mesh(devices: Sequence[jax.Device] | None = None, *, tensor: int = 1) -> jax.sharding.Mesh:
    """A mesh over the first `tensor` devices.

    Args:
      devices: to choose from, in order; all local ones by default.
      tensor: devices that share one copy of the weights.

    Raises:
      ConfigError: fewer devices than asked for, or one named twice.
    """
    devices = jax.local_devices() if devices is None else devices
    if tensor < 1:
        raise ConfigError(f"the mesh axis 'tensor' must have at least 1 device, got {tensor}")
    if len(devices) < tensor:
        raise ConfigError(f"the mesh axis 'tensor' needs {tensor} devices, only {len(devices)} are there")
    chosen = devices[:tensor]
    if len(set(chosen)) < tensor:
        raise ConfigError(f"a device is named twice in the mesh: {', '.join(map(str, chosen))}")
    return jax.sharding.Mesh(np.asarray(chosen).reshape(tensor), AXES)
