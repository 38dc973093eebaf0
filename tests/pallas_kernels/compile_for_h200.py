"""Compiles the Hopper attention for an H200 that need not be there; prints one JSON line a program.

Run by test_mosaic_gpu.py, which sets the environment that this needs before jax starts.
"""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from octavo.pallas_kernels import ragged_paged_attention as op
from octavo.pallas_kernels.ragged_paged_attention import mosaic_gpu

TARGET = pathlib.Path(__file__).with_name("h200.txtpb")
HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 32, 8, 128, 16, 8192


def step(q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode, *, num_tokens, options):
    tiling = op.Tiling(chunk=128, workers=op.Workers(264, KV_HEADS))
    plan = op.prepare(
        kv_lens, block_tables, cu_q_lens, num_decode, num_tokens=num_tokens, block_size=BLOCK, tiling=tiling
    )
    return mosaic_gpu.attend(q, k, v, cache, plan, scale=0.1, **options)


def main() -> None:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)

    def lower(num_tokens, num_rows, options):
        cache = array((BLOCKS, 2, KV_HEADS, BLOCK, SIZE), jnp.bfloat16)
        new = array((num_tokens, KV_HEADS, SIZE), jnp.bfloat16)
        return jax.jit(functools.partial(step, num_tokens=num_tokens, options=options), donate_argnums=3).lower(
            array((num_tokens, HEADS, SIZE), jnp.bfloat16), new, new, cache, array((num_rows,), jnp.int32),
            array((num_rows, 576), jnp.int32), array((num_rows + 1,), jnp.int32), array((), jnp.int32),
        )  # fmt: skip

    sinks = {"sinks": jnp.ones(HEADS), "window": 1000, "soft_cap": 30.0}
    programs = ((32, 32, {}), (2048, 64, {}), (2048, 64, sinks))
    lowered = [lower(*program) for program in programs]
    for shapes, first in zip(programs, lowered, strict=True):
        program = lower(*shapes)
        compiled = program.compile()
        memory = compiled.memory_analysis()
        shape = re.escape(f"bf16[{BLOCKS}")
        report = {
            "tokens": shapes[0],
            "cache": BLOCKS * 2 * KV_HEADS * BLOCK * SIZE * 2,
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "copies": len(re.findall(rf"= {shape}.* copy\(", compiled.as_text())),
            "same_text": program.as_text() == first.as_text(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
