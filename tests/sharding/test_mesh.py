"""The mesh takes the devices it is given, in order, and refuses what is not there."""

import jax
import pytest

from octavo.configs.errors import ConfigError
from octavo.sharding.mesh import AXES, make_mesh


def test_one_device_by_default() -> None:
    mesh = make_mesh()
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"tensor": 1}
    assert mesh.devices.tolist() == [jax.local_devices()[0]]


def test_first_devices_in_order() -> None:
    devices = jax.local_devices()[::-1]
    assert make_mesh(devices, tensor=4).devices.tolist() == devices[:4]


@pytest.mark.parametrize(
    ("count", "tensor", "message"),
    [(2, 3, "needs 3 devices, only 2"), (2, 0, "at least 1 device, got 0")],
    ids=["too few", "none"],
)
def test_refuses_sizes(count: int, tensor: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_mesh(jax.local_devices()[:count], tensor=tensor)


def test_refuses_a_device_twice() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        make_mesh(jax.local_devices()[:1] * 2, tensor=2)
