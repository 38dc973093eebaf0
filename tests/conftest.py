"""Every test runs with strict promotion, eight CPU devices and caches that stay in the checkout.

The environment is set before jax is imported; what the caller has set stays, so
`JAX_PLATFORMS=cuda pytest -m gpu` runs on a GPU.
"""

import os
import pathlib

CACHE = pathlib.Path(__file__).parents[1] / ".cache"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OCTAVO_CACHE_DIR", str(CACHE / "octavo"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads a model
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Costs nothing: all CPU devices share one thread pool (measured, 1 and 8 devices: the same).
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jaxtyping
import pytest
from hypothesis import settings

import tests.references.typecheck  # noqa: F401  the hook below looks it up by name

# Rooms whose public functions take arrays. The others check what users give them
# themselves, and tests must see that error rather than the type checker's.
jaxtyping.install_import_hook(
    ["octavo.models_flax", "octavo.pallas_kernels", "octavo.sharding", "octavo.engine.step", "octavo.engine.sampling"],
    "tests.references.typecheck.check",
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile("octavo", deadline=None, derandomize=bool(os.environ.get("CI")), database=None)
settings.load_profile("octavo")


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The root of the checkout."""
    return CACHE.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where there is no GPU."""
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
