"""The names, the labels and the arithmetic of /metrics, without a server."""

import pathlib
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from octavo.configs.engine import EngineConfig
from octavo.engine.admission import RequestLimits
from octavo.engine.observer import FinishedRequest
from octavo.engine.stats import EngineFacts, EngineStats
from octavo.server.metrics import Metrics, length_buckets

VLLM = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_params_max_tokens", "iteration_tokens_total", "cache_config_info",
]  # fmt: skip


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(metrics.render()[0].decode())
        for sample in family.samples
    }
    return samples.get((f"octavo:{name}", tuple(sorted({"model_name": "m", **labels}.items()))))


def record(**changes: object) -> FinishedRequest:
    values = {
        "finish_reasons": ("stop", "length"),
        "num_prompt_tokens": 7,
        "num_generation_tokens": 12,
        "num_cached_tokens": 0,
        "max_tokens": 9,
        "n": 2,
        "arrival_time": 100.0,
        "scheduled_time": 100.5,
        "first_token_time": 101.0,
        "last_token_time": 103.0,
        "finish_time": 103.5,
    }
    return FinishedRequest(**(values | changes))  # type: ignore[arg-type]


def described(metrics: Metrics) -> Metrics:
    facts = EngineFacts(
        limits=RequestLimits(**dict.fromkeys(RequestLimits.__struct_fields__, 1)),
        max_length=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        block_size=16,
        num_blocks=99,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
        platform="cpu",
        device_kind="cpu",
        architecture="A",
        eos_token_ids=(),
        default_sampling_params={},
    )
    metrics.describe(EngineConfig(model="m"), facts)
    return metrics


def test_vllms_names_are_there_from_the_start(repository: pathlib.Path) -> None:
    names = {family.name for family in parse_text(described(Metrics("m")).render()[0].decode())}
    assert {f"octavo:{name}" for name in VLLM} <= names
    documented = (repository / "docs/serving.md").read_text()
    for name in names:
        if name.startswith("octavo:") and not name.endswith("_created"):
            assert re.search(rf"`{name}(_total)?`", documented), f"{name} is not in docs/serving.md"


def test_the_cache_says_its_own_type() -> None:
    assert 'cache_dtype="float8_e4m3fn"' in described(Metrics("m")).render()[0].decode()


def test_counters_follow_the_engine_and_never_shrink() -> None:
    """B130: vLLM's loop died of a negative increment."""
    metrics = Metrics("m")
    metrics.on_stats(EngineStats(2, 1, 0.5, 10, 20, 30, 15, 1))
    metrics.on_stats(EngineStats(0, 0, 0.0, 12, 25, 30, 15, 1))
    assert value(metrics, "num_requests_running") == value(metrics, "kv_cache_usage_perc") == 0
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "generation_tokens_total")) == (12, 25)
    assert (value(metrics, "prefix_cache_queries_total"), value(metrics, "prefix_cache_hits_total")) == (30, 15)
    assert value(metrics, "num_preemptions_total") == 1
    assert (value(metrics, "iteration_tokens_total_count"), value(metrics, "iteration_tokens_total_sum")) == (2, 37)
    metrics.on_stats(EngineStats(0, 0, 0.0, 1, 1, 1, 1, 0))
    metrics.on_stats(EngineStats(0, 0, 0.0, 2, 1, 1, 1, 0))
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "generation_tokens_total")) == (13, 25)


def test_a_finished_request() -> None:
    metrics = Metrics("m")
    metrics.on_finished(record())
    sums = {
        "e2e_request_latency_seconds": 3.5,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_time_per_output_token_seconds": 2.0 / 5,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 12,
        "request_params_n": 2,
        "request_params_max_tokens": 9,
    }
    for name, expected in sums.items():
        assert value(metrics, name + "_sum") == pytest.approx(expected), name
        assert value(metrics, name + "_count") == 1, name
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="error") == 0


def test_latencies_of_tokens() -> None:
    """Each bucket holds what is at most its bound."""
    metrics = Metrics("m")
    metrics.on_tokens([0.5], [0.001, 0.0011, 0.03, 99.0])
    at_most = {bound: value(metrics, "inter_token_latency_seconds_bucket", le=bound) for bound in ("0.001", "0.0025")}
    assert at_most == {"0.001": 1, "0.0025": 2}
    ends = [value(metrics, "inter_token_latency_seconds_bucket", le=bound) for bound in ("0.05", "40.0", "+Inf")]
    assert ends == [3, 3, 4]
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(99.0321)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5


def test_a_request_that_never_ran() -> None:
    metrics = Metrics("m")
    never = dict.fromkeys(("scheduled_time", "first_token_time", "last_token_time"))
    metrics.on_finished(record(finish_reasons=("abort",), num_generation_tokens=0, n=1, **never))
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "e2e_request_latency_seconds_count") == 1


PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text", PROMETHEUS_ACCEPTS])
def test_the_names_keep_their_colon(accept: str) -> None:
    metrics = described(Metrics('odd "name"\n\\'))
    metrics.on_tokens([0.1], [0.01, 0.02])
    metrics.http.observe("/health", "GET", 200, 0.1)
    text, kind = metrics.render(accept)
    assert kind.startswith("text/plain; version=0.0.4")
    families = list(parse_text(text.decode()))
    assert "octavo:request_success_total" in {sample.name for family in families for sample in family.samples}
    assert not re.search(r"^octavo_", text.decode(), re.MULTILINE)


def test_registries_are_apart() -> None:
    one, other = Metrics("m"), Metrics("m")
    one.on_tokens([0.1], [])
    assert value(other, "time_to_first_token_seconds_count") == 0


def test_odd_statuses_have_a_class() -> None:
    metrics = Metrics("m")
    for status in (0, 99, 499, 600, 999):
        metrics.http.observe("/x", "GET", status, -1.0)
    text = metrics.render()[0].decode()
    assert set(re.findall(r'http_requests_total\{[^}]*status="(\w+)"', text)) == {"1xx", "4xx", "5xx"}


def test_a_token_costs_little() -> None:
    """The bar for the whole server is 60 µs a token; a stream alone has one step a token."""
    metrics = Metrics("m")
    began = time.process_time()
    for step in range(5000):
        metrics.on_stats(EngineStats(1, 0, 0.1, step, step, step, 0, 0))
        metrics.on_tokens([], [0.01])
    assert (time.process_time() - began) / 5000 < 30e-6


def test_length_buckets() -> None:
    assert length_buckets(60) == (1, 2, 5, 10, 20, 50)
