"""Faults that other engines had, by their number in the list of cases, each through the whole offline engine.

Only what the tests beside this one leave out. The model is scripted, and its logits are wider than its tokenizer.
"""

import math
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from octavo.engine import Engine, RequestError, RequestOutput, SamplingParams, startup
from octavo.engine.buckets import Ladder, make_ladder
from octavo.engine.kv_groups import KVGroups
from octavo.engine.scheduler import Scheduler
from tests.references.byte_tokenizer import SPECIAL_TOKENS, byte_ids, piece_id
from tests.references.fake_engine import long, make, tokens
from tests.references.table_model import EOS, TableModel, chain

V, WITH_TEXT = 320, 300  # ids from 300 up have logits and no string
GAP = 310
A, B, C, D, E, X = byte_ids("abcdex")
DIGITS = byte_ids("0123456789")
IM_END = SPECIAL_TOKENS["<|im_end|>"]
HELLO = piece_id(b"hello")
SCRIPT: dict = {
    **chain(A, HELLO, EOS, B, IM_END, D, D),  # both ends are declared by the model
    C: {C: 20.0, A: 15.0, X: 14.0},
    E: {GAP: 30.0, X: 20.0},
    X: X,
    **dict.fromkeys(DIGITS, dict.fromkeys(DIGITS, 20.0)),  # a random walk
}
GREEDY = {"temperature": 0.0}


def coarse_ladder(*arguments: Any) -> Ladder:
    """Two programs, which can serve everything."""
    ladder = make_ladder(*arguments)
    return Ladder(programs=ladder.coarse, coarse=ladder.coarse)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = TableModel(
        table=SCRIPT, vocab_size=V, tokenizer_size=WITH_TEXT, generation_config={"eos_token_id": [EOS, IM_END]}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "make_ladder", coarse_ladder)
        engine = Engine(
            str(model.write(tmp_path_factory.mktemp("cases"))),
            progress=False,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=64,
            decode_rungs=(4,),
            token_rungs=(48,),
            max_logprobs=5,
        )
    with engine:
        yield engine


def one(engine: Engine, prompt: str | list[int], **params: object) -> RequestOutput:
    return engine.generate(prompt, SamplingParams(**(GREEDY | params)), use_tqdm=False)[0]


def test_ignore_eos_ignores_what_the_model_declares_and_nothing_else(engine: Engine) -> None:
    """B006, B123: config.json's id and those of generation_config.json."""
    assert one(engine, "a").outputs[0].token_ids == [HELLO, EOS]
    assert one(engine, "b").outputs[0].token_ids == [IM_END]
    ignored = one(engine, "a", ignore_eos=True, max_tokens=6).outputs[0]
    assert ignored.token_ids == [HELLO, EOS, B, IM_END, D, D]
    assert (ignored.finish_reason, ignored.stop_reason) == ("length", None)
    stopped = one(engine, "a", ignore_eos=True, max_tokens=6, stop_token_ids=[IM_END]).outputs[0]
    assert (stopped.token_ids[-1], stopped.finish_reason, stopped.stop_reason) == (IM_END, "stop", IM_END)
    assert stopped.text == "hellob", "B004: real text before the stop token stays"


def test_prompt_logprobs_do_not_come_from_the_cache(engine: Engine) -> None:
    """B028, B032: one entry a prompt token, computed, whatever ran before."""
    prompt = "c" * 40 + "x"
    first = one(engine, prompt, max_tokens=1, prompt_logprobs=2)
    one(engine, prompt, max_tokens=1)
    again = one(engine, prompt, max_tokens=1, prompt_logprobs=2)
    assert again.num_cached_tokens == 0
    assert first.prompt_logprobs is not None and again.prompt_logprobs is not None
    assert len(again.prompt_logprobs) == 41
    for left, right in zip(first.prompt_logprobs[1:], again.prompt_logprobs[1:], strict=True):
        assert left is not None and right is not None
        assert {i: x.logprob for i, x in left.items()} == pytest.approx({i: x.logprob for i, x in right.items()})
    last = again.prompt_logprobs[-1]
    assert last is not None and (list(last), last[X].rank) == ([X, C, A], 3)


def test_logprobs_are_raw_and_finite(engine: Engine) -> None:
    """B029, B033, B036: before bias, masks, penalties and temperature; the chosen token is there with its rank."""
    raw = one(engine, "c", max_tokens=1, logprobs=3).outputs[0].logprobs
    assert raw is not None and list(raw[0]) == [C, A, X]
    changed = {"logit_bias": {C: -100.0, A: -100.0}, "temperature": 0.9, "top_k": 1, "repetition_penalty": 1.5}
    for logprobs, found in ((0, [X]), (1, [X, C])):
        sample = one(engine, "c", max_tokens=1, logprobs=logprobs, **changed).outputs[0]
        assert sample.token_ids == [X]
        assert sample.logprobs is not None and list(sample.logprobs[0]) == found
        entry = sample.logprobs[0][X]
        assert (entry.rank, entry.logprob) == (3, pytest.approx(raw[0][X].logprob))
        assert sample.cumulative_logprob is not None and math.isfinite(sample.cumulative_logprob)


def test_no_output_is_a_prompt_that_was_computed(engine: Engine) -> None:
    """B053"""
    result = one(engine, "abc", max_tokens=0, prompt_logprobs=0)
    assert (result.outputs[0].token_ids, result.outputs[0].text) == ([], "")
    assert (result.outputs[0].finish_reason, result.finished) == ("length", True)
    assert result.prompt_logprobs is not None
    assert [entry and list(entry) for entry in result.prompt_logprobs] == [None, [B], [C]]


def test_a_seed_gives_the_same_in_any_company(engine: Engine) -> None:
    """B042, B043: alone, beside others seeded or not, in any order, and twice in one batch."""
    mine = SamplingParams(temperature=1.0, seed=42, max_tokens=20)
    (alone,) = engine.generate("0", mine, use_tqdm=False)
    assert len(set(alone.outputs[0].token_ids)) > 3
    others = [
        SamplingParams(temperature=1.0, max_tokens=9),
        SamplingParams(temperature=1.7, seed=7, top_k=3, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=3),
    ]
    for place in range(len(others) + 1):
        params = [*others[:place], mine, *others[place:], mine]
        results = engine.generate(["0"] * len(params), params, use_tqdm=False)
        assert results[place].outputs == results[-1].outputs == alone.outputs
    two = SamplingParams(temperature=1.0, seed=42, max_tokens=20, n=2)
    first, second = (engine.generate("0", two, use_tqdm=False)[0].outputs for _ in range(2))
    assert first == second
    assert first[0].token_ids == alone.outputs[0].token_ids != first[1].token_ids


def test_every_spelling_of_no_top_k(engine: Engine) -> None:
    """B039, B051: 0, -1 and more than the vocabulary draw alike; a real one does not."""
    draws = {
        k: one(engine, "0", temperature=1.0, seed=5, max_tokens=30, top_k=k).outputs[0].token_ids
        for k in (0, -1, V, 10**9, 1)
    }
    assert draws[0] == draws[-1] == draws[V] == draws[10**9]
    assert len(set(draws[0])) > 5


def test_ids_without_a_string_are_never_given_out(engine: Engine) -> None:
    """B086, B122: though the model likes one best, and a request pushes it."""
    for params in ({}, {"temperature": 2.0, "seed": 1}, {"logit_bias": {GAP: 100.0}}, {"repetition_penalty": 0.01}):
        sample = one(engine, "e", max_tokens=8, **params).outputs[0]
        assert max(sample.token_ids) < WITH_TEXT
    assert one(engine, "e", max_tokens=2).outputs[0].text == "xx"


@pytest.mark.parametrize(
    "attack", [{"logit_bias": {GAP: 100.0}}, {"allowed_token_ids": [GAP, C]}, {"bad_words": ["x"]}]
)
@pytest.mark.parametrize("first", [True, False])
def test_masks_do_not_reach_a_neighbour(engine: Engine, attack: dict, first: bool) -> None:
    """B045, B046: whichever comes first."""
    victim = SamplingParams(temperature=1.0, allowed_token_ids=[X], max_tokens=12, ignore_eos=True)
    attacker = SamplingParams(temperature=1.0, presence_penalty=1.0, max_tokens=12, ignore_eos=True, **attack)
    params = [victim, attacker] if first else [attacker, victim]
    results = engine.generate(["c", "c"], params, use_tqdm=False)
    assert results[0 if first else 1].outputs[0].token_ids == [X] * 12


def test_prompts_times_samples_are_in_order(engine: Engine) -> None:
    """B057: by prompt, then by sample."""
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=5)
    results = engine.generate(["0", [A], "0"], params, use_tqdm=False)
    assert [[o.index for o in r.outputs] for r in results] == [[0, 1]] * 3
    assert results[0].outputs == results[2].outputs
    assert [o.token_ids for o in results[1].outputs] == [[HELLO, EOS]] * 2
    assert results[0].metrics.num_generation_tokens == 10


@pytest.mark.parametrize("messages", [[], [[]], "hello", None, [{}], [{"role": "user"}]])
def test_conversations_that_are_none(engine: Engine, messages: object) -> None:
    """B054"""
    with pytest.raises(RequestError):
        engine.chat(messages, use_tqdm=False)  # type: ignore[arg-type]


def test_streams_survive_preemption(engine: Engine) -> None:
    """B102: with held-back text, seeds and penalties nothing is repeated or taken back."""
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=60, stop=["777", "0123"], frequency_penalty=0.3 * (i % 2), logprobs=1
        )
        for i in range(6)
    ]
    prompts = [[random.Random(i).choice(DIGITS) for _ in range(40)] for i in range(6)]
    expected = engine.generate(prompts, params, use_tqdm=False)
    roomy = engine.core.scheduler
    engine.core.scheduler = tight = Scheduler(roomy.config, engine.core.runner.warm_up.ladder, KVGroups([12], [16]))
    try:
        ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        texts, outputs = dict.fromkeys(ids, ""), {}
        while len(outputs) < len(ids):
            pieces, complete = engine.step()
            for piece in pieces:
                texts[piece.request_id] += piece.text
            outputs |= {output.request_id: output for output in complete}
        while engine.core.has_unfinished:
            engine.step()
    finally:
        engine.core.scheduler = roomy
    assert tight.stats.num_preemptions > 0
    for request_id, before in zip(ids, expected, strict=True):
        sample, wanted = outputs[request_id].outputs[0], before.outputs[0]
        assert (sample.token_ids, sample.text, sample.stop_reason) == (
            wanted.token_ids,
            wanted.text,
            wanted.stop_reason,
        )
        assert texts[request_id] == wanted.text
        assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)


def test_prompt_logprobs_of_every_length_keep_the_memory(engine: Engine) -> None:
    """B034: nothing as wide as the vocabulary stays on the host."""
    process = psutil.Process()

    def run() -> int:
        for length in range(1, 120, 2):
            result = one(engine, [C] * length, max_tokens=1, prompt_logprobs=5)
            assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == length
        return process.memory_info().rss

    before = run()
    assert run() - before < 32 << 20


def test_an_engine_listens_on_no_socket(engine: Engine) -> None:
    """A5"""
    one(engine, "a")
    open_sockets = psutil.Process().net_connections(kind="inet")
    assert [c.laddr for c in open_sockets if c.status == psutil.CONN_LISTEN] == []


def test_cached_tokens_are_counted_when_a_request_runs() -> None:
    """B095, B097: not when it came, if its blocks were given to others while it waited."""
    prompt = tokens(16)
    scheduled = make(blocks=8, rows=1)
    scheduled.add("a", prompt, **long(2))
    scheduled.run()
    scheduled.add("evicts", tokens(24, seed=1), **long(8))  # all eight blocks
    scheduled.add("waits", prompt, **long(2))
    scheduled.run()
    scheduled.check_outputs()
    assert scheduled.cached("waits") == 0
    scheduled.add("again", prompt, **long(2))
    scheduled.run()
    assert scheduled.cached("again") == 12, "full blocks, and at least one token is computed"


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_one_request_under_priority(depth: int) -> None:
    """B101: n > 1, preempted by better ones, ends with the tokens it gives alone."""
    scheduled = make(blocks=12, rows=4, budget=16, depth=depth, policy="priority")
    scheduled.add("family", tokens(9), n=3, priority=5, **long(16))
    for step in range(3):
        for _ in range(3):
            scheduled.step()
        scheduled.add(f"better{step}", tokens(10, seed=step), priority=-step, n=2, **long(14))
    scheduled.run()
    scheduled.check_outputs()
    assert scheduled.scheduler.stats.num_preemptions > 0


def test_allowed_ids_without_a_string_are_refused(engine: Engine) -> None:
    """B045, A3: between the tokenizer's last id and the logits' width there is nothing to say."""
    with pytest.raises(RequestError, match="allowed_token_ids holds only ids without a string"):
        engine.generate("a", SamplingParams(allowed_token_ids=[WITH_TEXT, GAP]), use_tqdm=False)
    result = engine.generate("a", SamplingParams(**GREEDY, allowed_token_ids=[GAP, X], max_tokens=2), use_tqdm=False)
    assert result[0].outputs[0].token_ids == [X, X]
