"""Compiles the Hopper attention for an H200 that need not be there; prints one JSON line a program.

Run by test_mosaic_gpu.py, which sets the environment that this needs before jax starts.
"""

import dataclasses
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
from octavo.pallas_kernels.ragged_paged_attention.parameters import Parameters

TARGET = pathlib.Path(__file__).with_name("h200.txtpb")
BLOCKS, CORES, MAX_LEN = 16384, 132, 9216


@dataclasses.dataclass(frozen=True)
class Program:
    tokens: int
    rows: int
    dtype: str = "bfloat16"
    fp8: bool = False
    head_size: int = 128
    block_size: int = 16
    heads: tuple[int, int] = (32, 8)
    options: bool = False


PROGRAMS = (
    Program(32, 32),
    Program(2048, 64),
    Program(2048, 64, options=True),
    Program(2048, 64, dtype="float16", block_size=128, options=True),
    Program(2048, 64, head_size=64, heads=(14, 2)),
    Program(2048, 64, head_size=96, block_size=32),
    Program(2048, 64, head_size=256, heads=(16, 8), options=True),
    Program(2048, 64, fp8=True),
    Program(32, 32, fp8=True, heads=(11, 1), options=True),
    Program(2048, 64, fp8=True, head_size=64, block_size=64, options=True),
    Program(2048, 64, fp8=True, head_size=96, heads=(16, 1)),
    Program(2048, 64, fp8=True, head_size=256, heads=(16, 8), options=True),
)


def step(q, k, v, cache, kv_lens, block_tables, cu_q_lens, num_decode, scale, *, program):
    num_heads, num_kv_heads = program.heads
    tiling = mosaic_gpu.tiling_for(
        CORES, Parameters(), num_kv_heads=num_kv_heads, head_size=program.head_size, narrow=program.fp8
    )
    plan = op.prepare(
        kv_lens, block_tables, cu_q_lens, num_decode,
        num_tokens=program.tokens, block_size=program.block_size, tiling=tiling,
    )  # fmt: skip
    options = {"sinks": jnp.ones(num_heads), "window": 1000, "soft_cap": 30.0} if program.options else {}
    scales = {"k_scale": scale, "v_scale": scale} if program.fp8 else {}
    return mosaic_gpu.attend(q, k, v, cache, plan, scale=0.1, **options, **scales)


def main() -> None:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)

    def cache_of(program):
        shape = (BLOCKS * 16 // program.block_size, 2, program.heads[1], program.block_size, program.head_size)
        return array(shape, jnp.uint8 if program.fp8 else program.dtype)

    def lower(program):
        tokens, rows, (num_heads, num_kv_heads) = program.tokens, program.rows, program.heads
        new = array((tokens, num_kv_heads, program.head_size), program.dtype)
        return jax.jit(functools.partial(step, program=program), donate_argnums=3).lower(
            array((tokens, num_heads, program.head_size), program.dtype), new, new, cache_of(program),
            array((rows,), jnp.int32), array((rows, MAX_LEN // program.block_size), jnp.int32),
            array((rows + 1,), jnp.int32), array((), jnp.int32), array((num_kv_heads,), jnp.float32),
        )  # fmt: skip

    lowered = [lower(program) for program in PROGRAMS]
    for program, first in zip(PROGRAMS, lowered, strict=True):
        again, cache = lower(program), cache_of(program)
        compiled = again.compile()
        memory = compiled.memory_analysis()
        shape = rf"(bf16|f16|u8|f8e4m3fn)\[{cache.shape[0]},"
        report = {
            "program": str(program),
            "cache": cache.size * cache.dtype.itemsize,
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
            "copies": len(re.findall(rf"= {shape}.* copy\(", compiled.as_text())),
            "same_text": again.as_text() == first.as_text(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
