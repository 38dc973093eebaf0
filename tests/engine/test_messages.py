"""Messages between the processes: whole there and back, and nothing else gets through."""

import math
import pickle

import msgspec
import pytest

from octavo.configs.engine import EngineConfig
from octavo.engine import messages
from octavo.engine.admission import RequestLimits
from octavo.engine.errors import ConfigError, EngineDeadError, KVCacheMemoryError, LoadError, RequestError
from octavo.engine.messages import (
    Abort,
    Add,
    Failed,
    Hello,
    MessageError,
    Ready,
    Refused,
    ResetDone,
    ResetPrefixCache,
    Start,
    Step,
    Stop,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from octavo.engine.process import join_events
from octavo.engine.request import FinishReason, Request, SamplingParams, TokenEvent, TopLogprobs
from octavo.engine.stats import EngineFacts, EngineStats

REQUEST = Request(
    request_id="r",
    prompt_token_ids=[0, 2**31 - 1],
    params=SamplingParams(
        n=3,
        temperature=1,
        seed=-(2**63),
        stop=["a", "日本"],
        stop_token_ids=[5],
        logit_bias={7: -100, 8: 0.5},
        allowed_token_ids=[7, 8],
        max_tokens=2**63 - 1,
        prompt_logprobs=0,
    ),
    eos_token_ids=(1, 2),
    bad_words_token_ids=[[1], [2, 3]],
    arrival_time=12.5,
    priority=-(2**31),
    cache_salt="\0é",
)
CONFIG = EngineConfig(
    model="/m",
    decode_rungs=(1, 4),
    gpu_memory_utilization=1,
    hf_overrides={"rope": {"a": [1, None, 2.5]}},
    override_generation_config={"temperature": 0.5},
)
FACTS = EngineFacts(
    limits=RequestLimits(
        max_model_len=128,
        vocab_size=320,
        sampled_vocab_size=300,
        max_logprobs=5,
        max_constrained_rows=4,
        block_sizes=(16,),
        usable_blocks=(63,),
    ),
    max_length=128,
    max_num_seqs=4,
    max_num_batched_tokens=48,
    block_size=16,
    num_blocks=64,
    dtype="float32",
    kv_dtype="float32",
    platform="cpu",
    device_kind="cpu",
    architecture="LlamaForCausalLM",
    eos_token_ids=(2,),
    default_sampling_params={"temperature": 0.5, "max_tokens": 7},
)
ENTRY = TopLogprobs(3, -0.5, 1, [3, 4], [-0.5, -math.inf])
EVENTS = [
    TokenEvent("r", 0, [3], [ENTRY], [None, ENTRY], None, None, 16, 1.25),
    TokenEvent("r", 1, [], finish_reason=FinishReason.ERROR, error="not a number"),
    TokenEvent("r", 2, [3, 4], finish_reason=FinishReason.STOP, stop_reason=4),
]


TO_ENGINE = (
    *(Start(CONFIG, 320, True, 20), Start(CONFIG, None, False, 30)),
    *(Add(REQUEST), Abort("r"), Abort("r", 2), ResetPrefixCache(7), Stop()),
)
FROM_ENGINE = (
    *(Hello("token"), Ready(FACTS), Refused("r", "why", "prompt"), ResetDone(7, False), Failed("LoadError", "why")),
    Step(EVENTS, EngineStats(running=2, kv_usage=0.5)),
)


def test_all_messages_there_and_back() -> None:
    for messages_, decode, other in (
        (TO_ENGINE, decode_to_engine, decode_from_engine),
        (FROM_ENGINE, decode_from_engine, decode_to_engine),
    ):
        for message in messages_:
            assert decode(encode(message)) == message
            with pytest.raises(MessageError, match="does not decode"):
                other(encode(message))


def test_values_that_are_no_finite_numbers_pass() -> None:
    entry = TopLogprobs(3, math.nan, 1, [3], [-math.inf])
    step = decode_from_engine(encode(Step([TokenEvent("r", 0, [3], [entry])], EngineStats())))
    assert isinstance(step, Step) and step.events[0].logprobs is not None
    assert math.isnan(step.events[0].logprobs[0].logprob)
    assert step.events[0].logprobs[0].top_logprobs == [-math.inf]


NO_MESSAGES = (
    (b"", "0 bytes that are no message"),
    (b"OCT", "3 bytes that are no message"),
    (b"GET / HTTP/1.1\r\n", "16 bytes that are no message"),
    (pickle.dumps({"a": print}), "bytes that are no message"),
    (b"OCT\x07" + encode(Stop())[4:], "a message of version 7, this is version 1"),
    (messages.PREFIX, "does not decode"),
    (messages.PREFIX + b"\xc1", "does not decode"),
    (messages.PREFIX + pickle.dumps([1]), "does not decode"),
    (messages.PREFIX + b"\x91" * 100_000, "does not decode"),
    (messages.PREFIX + msgspec.msgpack.encode(["Nonsense"]), "does not decode"),
    (messages.PREFIX + msgspec.msgpack.encode(["Abort", 5]), "does not decode"),
    (messages.PREFIX + msgspec.msgpack.encode({"type": "Stop"}), "does not decode"),
    (messages.PREFIX + b"\xdd\xff\xff\xff\xff", "does not decode"),
    (encode(Add(REQUEST))[:-5], "does not decode"),
)


def test_what_is_no_message_is_refused() -> None:
    for frame, message in NO_MESSAGES:
        for decode in (decode_to_engine, decode_from_engine):
            with pytest.raises(MessageError, match=message):
                decode(frame)


def test_a_request_is_checked_when_it_is_read() -> None:
    fields = msgspec.to_builtins(REQUEST)
    for change in ({"priority": 2**40}, {"request_id": ""}, {"params": {"temperature": -1}}, {"params": {"x": 1}}):
        frame = messages.PREFIX + msgspec.msgpack.encode(["Add", {**fields, **change}])
        with pytest.raises(MessageError, match="does not decode"):
            decode_to_engine(frame)
        assert messages.request_id_of(frame) == change.get("request_id", "r")


def test_the_id_of_what_is_no_request() -> None:
    for frame in (b"", b"junk", encode(Stop()), encode(Abort("a")), messages.PREFIX + b"\x92\xa3Add\x01"):
        assert messages.request_id_of(frame) is None


def test_what_cannot_be_sent_is_refused() -> None:
    request = msgspec.structs.replace(REQUEST, cache_salt="\ud800")
    with pytest.raises(MessageError, match=r"Add cannot be sent: .*surrogates"):
        encode(Add(request))
    with pytest.raises(MessageError, match="Start cannot be sent"):
        encode(Start(EngineConfig(model="m", hf_overrides={"x": object()}), None, False, 0))


def test_a_failure_keeps_its_class() -> None:
    for kind in (ConfigError, KVCacheMemoryError, LoadError, EngineDeadError):
        error = Failed(kind.__name__, "why").error()
        assert (type(error), str(error)) == (kind, "why")
    assert type(Failed("RequestError", "why").error()) is EngineDeadError
    assert type(Failed(RequestError.__name__, "why").error()) is EngineDeadError


def test_joined_events_say_what_the_single_ones_said() -> None:
    first = TokenEvent("r", 0, [3], [ENTRY], [None, ENTRY], None, None, 16, 1.25)
    second = TokenEvent("r", 0, [4, 5], [ENTRY, ENTRY], None, None, None, 16, 1.25)
    last = TokenEvent("r", 0, [6], [ENTRY], None, FinishReason.STOP, 6, 16, 1.25)
    assert join_events([first]) is first
    assert join_events([first, second, last]) == TokenEvent(
        "r", 0, [3, 4, 5, 6], [ENTRY] * 4, [None, ENTRY], FinishReason.STOP, 6, 16, 1.25
    )
    plain = [TokenEvent("r", 1, [token]) for token in (1, 2)]
    error = TokenEvent("r", 1, [], finish_reason=FinishReason.ERROR, error="why")
    assert join_events([*plain, error]) == TokenEvent("r", 1, [1, 2], finish_reason=FinishReason.ERROR, error="why")
