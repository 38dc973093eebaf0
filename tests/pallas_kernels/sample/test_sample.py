"""The sampling op: the choice of its implementation, and the reference against a sort."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.configs.errors import ConfigError
from octavo.pallas_kernels.sample import Cuts, choose, reference
from octavo.pallas_kernels.sample.cases import kept

SIZE = 97


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.4, 0.0), (9, 0.5, 0.0), (0, 1.0, 0.3), (20, 0.9, 0.2), (0, 1.0, 1.0)],
)
def test_kept_sets_equal_those_of_a_sort(top_k, top_p, min_p, lazy):
    """top_k, then top_p of what is left, then min_p."""
    x = np.random.default_rng(1).normal(size=SIZE).astype(np.float32) * 2
    hot = jnp.asarray((x - x.max()) / np.float32(0.8))[None]
    cuts = Cuts(jnp.full(1, top_k, jnp.int32), jnp.full(1, top_p, jnp.float32), jnp.full(1, min_p, jnp.float32))
    found = np.isfinite(np.asarray(reference.truncate(hot, cuts, lazy))[0])
    assert (found == kept(x, 0.8, top_k, top_p, min_p)).all()


def test_the_implementation_is_chosen_once_and_logged(caplog):
    with caplog.at_level(logging.INFO, "octavo"):
        assert choose("auto", "cpu", SIZE).name == "reference"
    assert "sampling: reference (the default)" in caplog.text
    assert choose("reference", "gpu", SIZE).name == "reference"


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(ConfigError, match="sampling_backend must be one of auto, reference, mosaic_gpu, got 'fast'"):
        choose("fast", "cpu", SIZE)
    with pytest.raises(ConfigError, match="sampling_backend mosaic_gpu cannot be used: it needs a GPU"):
        choose("mosaic_gpu", "cpu", SIZE)
