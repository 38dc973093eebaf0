"""What kernels need of a device, asked before they are chosen. Knows no op."""

from typing import TypeGuard

import jax

HOPPER = "9.0"
NEEDS_HOPPER = f"it needs a GPU of compute capability {HOPPER}"


def is_hopper(device: jax.Device | None) -> TypeGuard[jax.Device]:
    """Whether Mosaic kernels can run there: they are written for one compute capability."""
    return device is not None and device.platform == "gpu" and device.compute_capability == HOPPER
