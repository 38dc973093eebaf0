"""The cases of kernels.py through the attention that torch ships: dense keys and values. Needs torch and a GPU.

Tried for each case: scaled_dot_product_attention with each back end that knows grouped queries (rows of
equal lengths only), variable-length attention, and, if asked for, flex_attention; the fastest counts. Calls
are captured in one CUDA graph over rotating keys and values, and the median of its replays is taken.
"""

import inspect
import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from octavo.pallas_kernels.ragged_paged_attention.cases import Case
from octavo.pallas_kernels.ragged_paged_attention.timing import calls_of, kv_bytes
from octavo.pallas_kernels.timing import POOL_BYTES

REPLAYS = 15


def fastest(case: Case, *, flex: bool = False) -> tuple[float, str] | None:
    """(seconds of one call, what it went through), or None where nothing that torch ships can run the case."""
    best = None
    for name, calls in _ways(case, flex):
        try:
            seconds = _seconds(calls)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            print(f"    torch {name}: {str(error).strip().splitlines()[0][:150]}", flush=True)
            continue
        if best is None or seconds < best[0]:
            best = seconds, name
    torch.cuda.empty_cache()
    return best


def _ways(case: Case, flex: bool) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Each way, as the calls of one graph."""
    if case.kv_dtype != "bfloat16":
        return
    copies = min(calls_of(case), max(1, -(-POOL_BYTES // kv_bytes(case))))
    lengths = set(case.rows)
    count = calls_of(case)
    if len(lengths) == 1:
        q_len, length = next(iter(lengths))
        rows = len(case.rows)
        queries = _normal(rows, case.num_heads, q_len, case.head_size)
        dense = [
            tuple(_normal(rows, case.num_kv_heads, length, case.head_size) for _ in range(2)) for _ in range(copies)
        ]
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            if q_len not in (1, length):
                break  # its causal mask begins at the upper left
            options = {"is_causal": q_len > 1, "enable_gqa": True}

            def dot(i: int, backend: SDPBackend = backend, options: dict[str, Any] = options) -> Any:
                with sdpa_kernel([backend]):
                    return scaled_dot_product_attention(queries, *dense[i % copies], **options)

            yield f"sdpa {backend.name.lower()}", [lambda i=i: dot(i) for i in range(count)]
        if flex and q_len > 1:
            yield from _flex(queries, dense, q_len, length, count)
        del queries, dense
    yield from _variable_length(case, copies, count)


def _flex(queries: Any, dense: list[Any], q_len: int, length: int, count: int) -> Iterator[tuple[str, list[Any]]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shift = length - q_len
    mask = create_block_mask(lambda b, h, q, k: q + shift >= k, None, None, q_len, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def one(i: int) -> Any:
        return compiled(queries, *dense[i % len(dense)], block_mask=mask, enable_gqa=True)

    yield "flex_attention", [lambda i=i: one(i) for i in range(count)]


def _variable_length(case: Case, copies: int, count: int) -> Iterator[tuple[str, list[Any]]]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    q_lens, kv_lens = zip(*case.rows, strict=True)
    ends = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in (q_lens, kv_lens)]
    queries = _normal(sum(q_lens), case.num_heads, case.head_size)
    dense = [tuple(_normal(sum(kv_lens), case.num_kv_heads, case.head_size) for _ in range(2)) for _ in range(copies)]

    def one(i: int) -> Any:
        return varlen_attn(queries, *dense[i % copies], *ends, max(q_lens), max(kv_lens), **options)

    yield "varlen_attn", [lambda i=i: one(i) for i in range(count)]


def _normal(*shape: int) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _seconds(calls: list[Callable[[], Any]]) -> float:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        graph.replay()
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)
