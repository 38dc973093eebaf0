"""Ragged paged attention: `api` has the contract."""

from octavo.pallas_kernels.ragged_paged_attention.api import (
    AttentionPlan,
    CacheSpec,
    Tiling,
    cache_dtype,
    cache_spec,
    prepare,
)
from octavo.pallas_kernels.ragged_paged_attention.blocks import copy_blocks, read_blocks, write_blocks
from octavo.pallas_kernels.ragged_paged_attention.dispatch import Heads, Implementation, choose
from octavo.pallas_kernels.ragged_paged_attention.worklist import Workers

__all__ = [
    "AttentionPlan",
    "CacheSpec",
    "Heads",
    "Implementation",
    "Tiling",
    "Workers",
    "cache_dtype",
    "cache_spec",
    "choose",
    "copy_blocks",
    "prepare",
    "read_blocks",
    "write_blocks",
]
