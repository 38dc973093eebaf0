"""What a step may cost: one device call, nothing compiled, no copy of the cache, no full vocabulary on the host."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from octavo.configs.engine import default_decode_rungs, default_token_rungs
from octavo.engine.buckets import make_ladder
from tests.references.engine_runs import request, run

COMPILED = "/jax/core/compile/backend_compile_duration"
TRACED = "/jax/core/compile/jaxpr_trace_duration"


@contextlib.contextmanager
def count_events(*names):
    """How often jax reports each of these events inside the block."""
    counts = dict.fromkeys(names, 0)

    def listen(event, duration, **kwargs):
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_counter_counts():
    with count_events(COMPILED, TRACED) as counts:
        jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(3)).block_until_ready()
    assert counts[COMPILED] >= 1
    assert counts[TRACED] >= 1


EVERY_FEATURE = [
    {},
    {"logprobs": None},
    {"logprobs": None, "temperature": 1.0, "seed": 3},
    {"logprobs": None, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"logprobs": None, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logprobs": 0, "logit_bias": {5: 3.0}, "allowed_token_ids": list(range(3, 60))},
    {"logprobs": 5, "prompt_logprobs": 5},
    {"prompt_logprobs": 0, "max_tokens": 0, "logprobs": None},
    {"logprobs": None, "bad_words_token_ids": [[5], [6, 7]], "min_tokens": 4},
    {"n": 3, "temperature": 1.0},
    {"cache_salt": "x", "priority": 1},
]


def mixed_load():
    """Every combination's first appearance, at many different lengths."""
    requests = []
    for i in range(44):
        params = EVERY_FEATURE[i % len(EVERY_FEATURE)]
        requests.append(request(f"f{i}", [3 + (i * 7 + j) % 300 for j in range(1 + i * 4)], **params))
    return requests


def test_nothing_compiles_after_warm_up_and_each_step_is_one_device_call(make_core):
    core = make_core(pool=40)
    plans, launch = [], core.runner.launch

    def counting_launch(plan):
        before = core.runner.num_device_calls
        sampled = launch(plan)
        assert core.runner.num_device_calls == before + 1
        plans.append(plan)
        return sampled

    core.runner.launch = counting_launch
    with count_events(COMPILED, TRACED) as counts:
        run(core, [request("alone", [5, 6, 7], logprobs=None)])
        run(core, mixed_load())
    assert counts == {COMPILED: 0, TRACED: 0}
    assert core.runner.num_device_calls == len(plans)
    assert core.runner.num_load_calls == sum(len(plan.loads) for plan in plans)
    assert {plan.program[2] for plan in plans} == {"plain", "full", "logprobs", "prompt"}


def test_the_state_is_updated_in_place(make_core):
    """All of the donated state aliases the result, and no temporary is as large as one layer's cache."""
    core = make_core(num_gpu_blocks_override=4096)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(core.runner.state))
    layer_bytes = core.runner.state.kv[0].nbytes
    for program, compiled in core.runner.warm_up.programs.items():
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == state_bytes, program
        assert memory.temp_size_in_bytes < layer_bytes, program


def test_results_are_small(make_core):
    """O(k) for a row, never O(vocabulary)."""
    core = make_core()
    sizes, fetch = [], core.runner.fetch

    def measuring_fetch(sampled):
        sizes.append((sampled.rows.shape, None if sampled.prompt is None else sampled.prompt.shape))
        return fetch(sampled)

    core.runner.fetch = measuring_fetch
    run(core, mixed_load()[:11])
    assert {shape for shape, _ in sizes} <= {(4, 3), (4, 4 + 2 * 5)}
    assert {shape for _, shape in sizes} == {None, (48, 2 + 2 * 5)}


START = """
import json, sys, jax
from octavo.configs.engine import EngineConfig
from octavo.engine.core import EngineCore
events = []
jax.monitoring.register_event_listener(lambda event, **kwargs: events.append(event))
core = EngineCore(EngineConfig(model=sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=2,
                               max_num_batched_tokens=16, num_gpu_blocks_override=32, warmup="full"))
core.close()
print(json.dumps({name: sum(e.endswith(name) for e in events) for name in ("cache_hits", "cache_misses")}))
"""


def test_a_second_start_finds_every_program(checkpoint, tmp_path, repository):
    def start():
        environment = {**os.environ, "OCTAVO_CACHE_DIR": str(tmp_path), "XLA_FLAGS": ""}
        done = subprocess.run(
            [sys.executable, "-c", START, str(checkpoint())],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    first, second = start(), start()
    assert first["cache_misses"] > 0
    assert second["cache_misses"] == 0
    assert second["cache_hits"] >= first["cache_misses"]
    assert pathlib.Path(tmp_path, "programs").is_dir()


def test_progressive_warm_up_serves_before_everything_is_compiled(make_core):
    core = make_core(warmup="progressive", decode_rungs=(1, 2, 4), token_rungs=(16, 48))
    ladder = core.runner.warm_up.ladder
    assert set(ladder.coarse) <= ladder.ready
    first = run(core, [request("a", [5, 6, 7])])[("a", 0)]
    core.runner.warm_up.wait(timeout=120)
    assert ladder.ready == set(ladder.programs)
    assert run(core, [request("a", [5, 6, 7])])[("a", 0)].token_ids == first.token_ids


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_program_budget(platform):

    rows, budget = (16, 512) if platform == "cpu" else (256, 2048)
    ladder = make_ladder(default_decode_rungs(rows, platform), default_token_rungs(rows, budget, platform), platform)
    assert len(ladder.programs) + 2 <= (12 if platform == "cpu" else 40)
