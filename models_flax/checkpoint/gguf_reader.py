"""GGUF tensors under Hugging Face names, unpacked.

llama.cpp stores the rotary dimensions of the llama architecture interleaved; here they
are put back into halves, so that models see one layout.
"""

import math

import numpy as np

from octavo.configs.errors import LoadError
from octavo.models_flax.checkpoint.gguf_config import ROPE_FACTORS, uniform
from octavo.models_flax.checkpoint.gguf_file import GGUFFile
from octavo.models_flax.checkpoint.gguf_unpack import unpack
from octavo.models_flax.checkpoint.tensors import DTYPES, TensorInfo

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFReader:
    """The tensors of one file; ignores `rope_freqs.weight`, which went into the config."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        arch = file.metadata["general.architecture"]
        heads = uniform(file, f"{arch}.attention.head_count")
        kv_heads = uniform(file, f"{arch}.attention.head_count_kv", heads)
        self._interleaved = {"q_proj": heads, "k_proj": kv_heads} if arch == "llama" else {}
        self._names = {hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        if len(self._names) != sum(name != ROPE_FACTORS for name in file.tensors):
            raise LoadError(f"{file.path.name}: a tensor appears under two names")
        self.tensors = {
            hf: TensorInfo(file.tensors[name].shape, file.tensors[name].kind) for hf, name in self._names.items()
        }

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Float tensors as stored, packed ones in `dtype`."""
        tensor = self._file.tensors[self._names[name]]
        raw = self._file.data(self._names[name])
        if tensor.kind in DTYPES:
            values = raw.view(DTYPES[tensor.kind]).reshape(tensor.shape)
        else:
            values = unpack(raw, tensor.kind, dtype).reshape(tensor.shape)
        module = name.rpartition(".")[0].rpartition(".")[2]
        heads = self._interleaved.get(module)
        return values if heads is None else _halves(values, heads, name)


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; other names stay, and the loader refuses them."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return name
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{suffix}"
    block, _, part = stem.rpartition(".")
    if block.startswith("blk.") and part in _LAYER:
        return f"model.layers.{block.removeprefix('blk.')}.{_LAYER[part]}.{suffix}"
    return name


def _halves(values: np.ndarray, heads: int, name: str) -> np.ndarray:
    rows, rest = values.shape[0], values.shape[1:]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise LoadError(f"{name}: {rows} rows do not divide into {heads} heads of even size")
    split = values.reshape(heads, rows // heads // 2, 2, math.prod(rest))
    return split.swapaxes(1, 2).reshape(values.shape)
