"""Every Mosaic-GPU call that our kernels make: that API changes with each release of jax.

Knows no op. Kernels are warp-specialised: a warpgroup (128 threads) is one "thread" here,
`warpgroup()` tells which. What the interpreter lacks (a register operand of wgmma,
`run_state`) has its detour here, so that kernels have one text.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

Barrier = plgpu.Barrier
arrive = plgpu.barrier_arrive
wait = plgpu.barrier_wait
commit_smem = plgpu.commit_smem
copy_in = plgpu.copy_gmem_to_smem
copy_out = plgpu.copy_smem_to_gmem
set_registers = plgpu.set_max_registers
GMEM = plgpu.GMEM
ds = pl.ds
when = pl.when

WARPGROUP = 128  # threads
LOG2E = math.log2(math.e)
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one number per row of a matrix fragment
MATRIX = plgpu.Layout.WGMMA


def run(
    body: Callable[..., None],
    *operands: Any,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    grid: dict[str, int],
    warpgroups: int | None,
    interpret: bool,
    name: str,
    approximate: bool = True,
) -> Any:
    """Runs `body(*operands, *out, **scratch)` in every block of the grid.

    `warpgroups` None is a block of one, whose threads can reduce a vector together. `approximate` math is
    that of the special function unit: log has an absolute error of 1e-7 there, no relative one.
    """

    def named(*references: Any, **scratches: Any) -> None:
        if not interpret:
            _fix_name(name)()
        body(*references, **scratches)

    kernel = plgpu.kernel(
        named,
        out_type=list(out),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate, reduction_scratch_bytes=16 if warpgroups is None else 0
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )
    return tuple(kernel(*operands))


@functools.cache
def _fix_name(name: str) -> Callable[[], Any]:
    """Says what a dump of the kernel would be called, which jax otherwise numbers through the process.

    That number is part of the compilation cache's key: programs lowered in another order, or one more
    of them, would not be found by the next start.
    """

    @plgpu.inline_mgpu()
    def fix(context: Any) -> None:
        context.module.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)

    return fix


def warpgroup() -> jax.Array:
    return lax.axis_index("warpgroup")


def tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the swizzled form that wgmma reads; the last axis is a multiple of 32 bytes."""
    swizzle = swizzle_of(shape[-1], dtype)
    elements = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle)))


def swizzle_of(columns: int, dtype: Any) -> int:
    """The widest swizzle, in bytes, that divides a row."""
    return next(n for n in (128, 64, 32) if columns * jnp.dtype(dtype).itemsize % n == 0)


def plain(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in row-major order."""
    return plgpu.SMEM(shape, dtype)


def either(*references: Any) -> Any:
    """Shared memory for one of them at a time: what was written through one is not read through another."""
    return plgpu.RefUnion(*references)


def rows_full(rows: int, value: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROWS)


def matrix_full(shape: tuple[int, int], value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), MATRIX)


def rows_load(ref: Any) -> jax.Array:
    """A vector from global memory, one number per row."""
    return plgpu.load(ref, layout=ROWS, optimized=False)


def vector_load(ref: Any) -> jax.Array:
    """A vector of 64 or a multiple of 128 numbers from global memory."""
    return rows_load(ref) if ref.shape[0] % WARPGROUP else ref[...]


def vector_zeros(size: int) -> jax.Array:
    return rows_full(size, 0.0) if size % WARPGROUP else jnp.zeros((size,), jnp.float32)


def lanes(size: int, width: int) -> Any:
    """The layout of a vector whose neighbouring `width` numbers lie in one thread."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=width)


def lanes_load(ref: Any, width: int) -> jax.Array:
    """A vector of a multiple of 128 * width numbers, which a thread reads `width` at a time."""
    return plgpu.load(ref, layout=lanes(ref.shape[0], width), optimized=False)


def lanes_full(size: int, width: int, value: Any, dtype: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((size,), value, dtype), lanes(size, width))


def lanes_iota(size: int, width: int, dtype: Any = jnp.int32) -> jax.Array:
    return plgpu.broadcasted_iota(dtype, (size,), 0, layout=lanes(size, width))


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def matmul(a: Any, b: Any, shape: tuple[int, ...]) -> jax.Array:
    """f32 a @ b, both in shared memory."""

    def body(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: jax.Array, p: jax.Array, b: Any, staging: Any | None) -> jax.Array:
    """acc + p @ b, with p in registers; `staging` (interpreter only) is shared memory for p."""
    if staging is not None:
        return acc + _staged_matmul(p, b, acc.shape, staging)

    def body(ref: Any) -> None:
        plgpu.wgmma(ref, p, b)

    return pl.run_state(body)(plgpu.ACC.init(acc))


def overlap(
    a: Any,
    b: Any,
    shape: tuple[int, int],
    acc: jax.Array,
    p: jax.Array,
    v: Any,
    staging: Any | None,
    *,
    between: Callable[[], None],
    issued: Callable[[], None],
    use: Callable[[jax.Array], Any],
) -> tuple[jax.Array, Any]:
    """(acc + p @ v, use(a @ b)), where `use` runs while the tensor cores still work on p @ v.

    Args:
      a, b: in shared memory; a @ b has `shape`.
      acc: f32 registers.
      p: 16-bit registers.
      v: in shared memory.
      staging: shared memory for p (interpreter only).
      between: called after a @ b was issued and before p @ v is.
      issued: called when both are issued.
      use: turns a @ b into what the caller wants of it.
    """
    if staging is not None:
        s = matmul(a, b, shape)
        between()
        acc = acc + _staged_matmul(p, v, acc.shape, staging)
        issued()
        return acc, use(s)

    def body(s_ref: Any, acc_ref: Any) -> tuple[jax.Array, Any]:
        acc_ref[...] = acc
        plgpu.wgmma(s_ref, a, b)
        between()
        plgpu.wgmma(acc_ref, p, v)
        issued()
        used = use(plgpu.wgmma_accumulator_load(s_ref, wait_n=1))
        return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0), used

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32))


def settled(values: Any) -> Any:
    """The same values, computed here: the compiler moves no arithmetic across.

    ptxas serialises products in flight (C7513) when registers of a later product are defined
    under them, and LLVM likes to carry a loop's 16-bit values as the 32-bit ones they come from.
    """
    return lax.optimization_barrier(values)


def _staged_matmul(p: jax.Array, b: Any, shape: tuple[int, ...], staging: Any) -> jax.Array:
    staging[...] = p
    plgpu.commit_smem()
    return matmul(staging, b, shape)


def zero_rows_from(ref: Any, first: jax.Array) -> None:
    """Zeroes rows first … of a tile in shared memory, whatever they hold."""
    values = plgpu.load(ref, layout=MATRIX, optimized=False)
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX)
    ref[...] = jnp.where(row < first, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def widen(narrow: Any, wide: Any) -> None:
    """Copies an fp8 tile in shared memory into a swizzled float16 one.

    In a loop over pieces: unrolled, their addresses alone would fill a producer's registers.
    """
    rows, columns = narrow.shape
    width = columns if columns <= 128 else 128
    layout = plgpu.Layout.SMEM_GMEM_COPY((32, width), wide.dtype, swizzle_of(columns, wide.dtype))

    def some(i: jax.Array, _: Any) -> None:
        for column in range(0, columns, width):
            part = pl.ds(i * 32, 32), pl.ds(column, width)
            values = plgpu.load(narrow.at[part], layout=layout, optimized=False)
            wide[part] = values.astype(wide.dtype)

    lax.fori_loop(0, rows // 32, some, None)
    plgpu.commit_smem()


def store_done(reads_only: bool = False) -> None:
    plgpu.wait_smem_to_gmem(0, wait_read_only=reads_only)
