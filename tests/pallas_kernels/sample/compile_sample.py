"""Compiles the Hopper sampling for an H200 that need not be there; prints one JSON line a program.

Run by test_mosaic_sample.py, which sets the environment that this needs before jax starts.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from octavo.pallas_kernels.sample import mosaic_gpu
from octavo.pallas_kernels.sample.cases import Case, make_settings

TARGET = pathlib.Path(__file__).parents[1] / "h200.txtpb"


def main() -> None:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    placed = functools.partial(
        jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(topology.devices[0])
    )  # fmt: skip

    def lower(case: Case, adjusted: bool):
        shapes = jax.tree.map(lambda x: placed(x.shape, x.dtype), jax.eval_shape(lambda: make_settings(case)))
        changed = placed((case.rows, case.size), jnp.float32) if adjusted else None
        draw = functools.partial(mosaic_gpu.sample, drawable=case.size - 100)
        return jax.jit(lambda x, s, a: draw(x, s, adjusted=a)).lower(
            placed((case.rows, case.size), case.dtype), shapes, changed
        )

    for case, adjusted in (
        (Case("plain", cuts=False), False),
        (Case("cuts", rows=32), False),
        (Case("adjusted", size=50257, dtype="bfloat16"), True),
    ):
        lowered = lower(case, adjusted)
        compiled = lowered.compile()
        text = compiled.as_text()
        report = {
            "kernels": text.count('custom_call_target="mosaic_gpu'),
            "loops": [name for name in ("while(", "conditional(", "sort(") if f" {name}" in text],
            "temp": compiled.memory_analysis().temp_size_in_bytes,
            "same_text": lower(case, adjusted).as_text() == lowered.as_text(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
