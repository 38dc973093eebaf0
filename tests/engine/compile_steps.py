"""Compiles whole engine steps for a device that need not be there; prints one JSON line a program.

python -m tests.engine.compile_steps h200|v5e [FOLDER of XLA's dump]. Run by test_compiled_steps.py,
which sets the environment that this needs before jax starts.
"""

import contextlib
import json
import math
import pathlib
import re
import sys

import jax
from jax.experimental import topologies

from tests.references.abstract_engine import abstract_runner

ROOT = pathlib.Path(__file__).parents[2]
LLAMA_8B = json.loads((ROOT / "benchmarks/models/llama-3.1-8b/config.json").read_text())
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "rms_norm_eps": 1e-5, "rope_theta": 100000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip


def main(target: str, dumped: pathlib.Path | None) -> None:
    if target == "h200":
        text = (ROOT / "tests/pallas_kernels/h200.txtpb").read_text()
        device = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices[0]
        runner = abstract_runner(LLAMA_8B, device, attention="mosaic_gpu", num_blocks=8192)
        programs = ((256, 256, "plain"), (2048, 256, "plain"))
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    else:
        device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
        runner = abstract_runner(SMOLLM2, device, attention="tpu", num_blocks=8192, rows=64, tokens=512)
        programs = ((64, 64, "plain"), (512, 64, "plain"))
        chip = jax.sharding.AbstractDevice(device_kind=device.device_kind, platform="tpu", num_cores=1)
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=chip))
    for program in programs:
        with context:
            lowered = runner.lower_step(program)
        report(target, program, runner, lowered.compile(), dumped)


def report(target: str, program: tuple[int, int, str], runner: object, compiled: object, dumped: object) -> None:
    make, config = runner.config.cache_spec, runner.config
    one = 2 * math.prod(make(config.groups[0], runner._num_blocks, config.block_size).shape)  # bytes of one layer
    memory, text = compiled.memory_analysis(), compiled.as_text()
    line = {
        "program": program,
        "layers": len(runner._layer_specs),
        "layer_bytes": one,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "largest_copy": largest_copy(text),
    }
    if dumped is not None:
        line["thunks"] = thunks(max(dumped.glob("*.thunk_sequence_after_thunk_passes.txt")).read_text())
    print(json.dumps(line), flush=True)


def largest_copy(text: str) -> int:
    """Elements of the largest array that an optimised module copies or transposes."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(", text)
    return max((math.prod(int(n) for n in dims.split(",") if n) for dims in found), default=0)


def thunks(text: str) -> dict[str, int]:
    """How often each kind of thunk is in a sequence; those inside a command buffer are indented."""
    outside = re.findall(r"^\d+: (k\w+)", text, re.MULTILINE)
    inside = re.findall(r"^\s+\d+: (k\w+)", text, re.MULTILINE)
    return {f"outside {kind}": outside.count(kind) for kind in outside} | {
        f"inside {kind}": inside.count(kind) for kind in inside
    }


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None)
