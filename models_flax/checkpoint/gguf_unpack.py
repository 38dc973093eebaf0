"""Unpacks GGUF's block-quantised values into the type that a model computes in.

The arithmetic is the `gguf` package's, in float32; here it runs on pieces that fit into a core's cache, on several
threads, so that a tensor costs its own memory and a few MiB. Refuses nothing: `gguf_file` knows what we can unpack.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import gguf.quants
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
CHUNK = 1 << 18  # values unpacked at a time; each takes about 20 bytes of temporaries
MAX_THREADS = 16


def unpack(raw: np.ndarray, kind: str, dtype: np.dtype) -> np.ndarray:
    """u8[bytes] of whole blocks -> [values] in `dtype`, in order.

    Args:
      raw: the packed bytes.
      kind: one of `PACKED`.
      dtype: float32, float16 or bfloat16.
    """
    quantization = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    num_blocks = raw.size // block_bytes
    out = np.empty(num_blocks * block, dtype)
    step = max(CHUNK // block, 1)

    def unpack_from(first: int) -> None:
        packed = raw[first * block_bytes : (first + step) * block_bytes]
        # A damaged scale may be no number, or too large for `dtype`: that is for whoever reads the logits.
        with np.errstate(invalid="ignore", over="ignore"):
            # As one row: the package unpacks row by row.
            out[first * block : (first + step) * block] = gguf.quants.dequantize(packed[None], quantization)[0]

    chunks = range(0, num_blocks, step)
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(chunks))
    if threads <= 1:
        for first in chunks:
            unpack_from(first)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="gguf") as pool:
            for _ in pool.map(unpack_from, chunks):  # raises what a thread raised
                pass
    return out
