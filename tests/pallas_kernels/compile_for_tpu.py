"""Compiles the TPU attention for a v5e that need not be there; prints one JSON line a program.

Run by test_tpu.py, which sets the environment that this needs before jax starts.
"""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from octavo.configs.cache import KVSpec
from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import tpu

BLOCKS = 4096
# tokens, rows, blocks per table, query heads, KV heads, head size, block size, dtype, options
PROGRAMS = (
    (256, 256, 576, 32, 8, 128, 16, "bfloat16", {}),
    (2048, 64, 72, 32, 8, 128, 128, "bfloat16", {"window": 1000, "soft_cap": 30.0}),
    (64, 64, 64, 9, 3, 64, 16, "bfloat16", {}),
    (128, 8, 64, 16, 1, 256, 32, "bfloat16", {}),
    (128, 8, 64, 128, 8, 128, 16, "bfloat16", {"k_scale": 0.5, "v_scale": 2.0}),
    (64, 64, 64, 24, 12, 64, 16, "float32", {}),
    (8, 8, 64, 40, 40, 96, 64, "bfloat16", {}),
)


def step(q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode, *, num_tokens, block_size, options):
    plan = op.prepare(
        kv_lens, block_tables, cu_q_lens, num_decode,
        num_tokens=num_tokens, block_size=block_size, tiling=op.Tiling(),
    )  # fmt: skip
    return tpu.attend(q, k, v, cache, plan, scale=0.1, **options)


def main() -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    array = functools.partial(jax.ShapeDtypeStruct, sharding=placed)
    chip = jax.sharding.AbstractDevice(device_kind=device.device_kind, platform="tpu", num_cores=1)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=chip)
    for num_tokens, num_rows, width, heads, kv_heads, size, block_size, dtype, options in PROGRAMS:
        spec = tpu.cache_spec(KVSpec(kv_heads, size, size), BLOCKS, block_size)
        f = functools.partial(step, num_tokens=num_tokens, block_size=block_size, options=options)
        new = array((num_tokens, kv_heads, size), dtype)
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(f, donate_argnums=3).lower(
                array((num_tokens, heads, size), dtype), new, new, array(spec.shape, dtype),
                array((num_rows,), jnp.int32), array((num_rows, width), jnp.int32),
                array((num_rows + 1,), jnp.int32), array((), jnp.int32),
            )  # fmt: skip
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        shape = re.escape(f"[{BLOCKS},")
        report = {
            "cache": math.prod(spec.shape) * jnp.dtype(dtype).itemsize,
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "copies": len(re.findall(rf"= \w+{shape}\S* copy\(", compiled.as_text())),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
