# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Rows of a cache to float32, for the kernels that read; every format of a cache."""

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from vllm.fp8_inc.attention.kernels.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    broadcast,
    emitted,
    load,
    loop,
    offset,
    splat,
    store,
    vector,
)

# What a cache holds, as kernels are told.
FP8, BF16, FP16, FLOAT32 = range(4)
# The kernels read FP8 as 2^-8 of its value; whoever calls folds it into a scale.
FP8_UNIT = 256.0

# numpy's name of a slot in memory.
SLOT = np.int64

AT_ONCE = 16  # numbers; every row size is a multiple
_LINE = 64  # bytes that memory moves at once


def fp8_to_float(b, codes, max_code):
    """<n x i8> codes to float32, divided by FP8_UNIT.

    E4M3 is the upper half of float16 but for one exponent bit: shifted there, it
    stands for 2^-8 of its value, denormals included. Codes above ``max_code`` take
    exponent 31, which makes infinity of Gaudi2's 0x78 and NaN of all others.
    """
    lanes = codes.type.count
    wide = b.zext(codes, vector(I16, lanes))
    kind = wide.type
    signed = b.ashr(b.shl(wide, splat(kind, 8)), splat(kind, 1))
    bits = b.and_(signed, splat(kind, 0xBFFF - 2**16))
    size = b.and_(wide, splat(kind, 0x7F))
    special = b.icmp_signed(">", size, broadcast(b, b.trunc(max_code, I16), lanes))
    bits = b.or_(bits, b.and_(b.sext(special, kind), splat(kind, 0x7C00)))
    return b.fpext(b.bitcast(bits, vector(F16, lanes)), vector(F32, lanes))


def bf16_to_float(b, bits):
    """<n x i16> bits of bfloat16 to float32."""
    kind = vector(I32, bits.type.count)
    wide = b.shl(b.zext(bits, kind), splat(kind, 16))
    return b.bitcast(wide, vector(F32, kind.count))


def float_to_bf16(b, values):
    """<n x float> to bits of bfloat16, to nearest even; NaN stays NaN."""
    kind = vector(I32, values.type.count)
    bits = b.bitcast(values, kind)
    last = b.and_(b.lshr(bits, splat(kind, 16)), splat(kind, 1))
    rounded = b.add(b.add(bits, splat(kind, 0x7FFF)), last)
    is_nan = b.fcmp_unordered("uno", values, values)
    rounded = b.select(is_nan, b.or_(bits, splat(kind, 1 << 22)), rounded)
    return b.trunc(b.lshr(rounded, splat(kind, 16)), vector(I16, kind.count))


def convert_row(b, source, target, size, source_bytes, convert, target_bytes=4):
    def body(i, _):
        out = convert(offset(b, source, i, AT_ONCE * source_bytes))
        store(b, out, offset(b, target, i, AT_ONCE * target_bytes), target_bytes)
        return []

    loop(b, b.sdiv(size, size.type(AT_ONCE)), [], body)


@emitted(types.int64, types.int64, types.int64, types.int64)
def fp8_row(b, source, target, size, max_code):
    """``size`` codes at ``source`` to float32 at ``target``, in FP8_UNIT."""
    convert_row(
        b,
        source,
        target,
        size,
        1,
        lambda a: fp8_to_float(b, load(b, a, vector(I8, AT_ONCE), 1), max_code),
    )


@emitted(*[types.int64] * 6)
def fp8_columns(b, source, stride, target, target_stride, size, max_code):
    """``size`` rows of 16 codes, each row ``stride`` bytes on, as ``fp8_row``."""

    def body(i, _):
        codes = load(b, b.add(source, b.mul(i, stride)), vector(I8, AT_ONCE), 1)
        out = fp8_to_float(b, codes, max_code)
        store(b, out, b.add(target, b.mul(i, target_stride)))
        return []

    loop(b, size, [], body)


@emitted(types.int64, types.int64, types.int64)
def bf16_row(b, source, target, size):
    """``size`` bfloat16 at ``source`` to float32 at ``target``."""
    convert_row(
        b,
        source,
        target,
        size,
        2,
        lambda a: bf16_to_float(b, load(b, a, vector(I16, AT_ONCE), 2)),
    )


@emitted(types.int64, types.int64, types.int64)
def fp16_row(b, source, target, size):
    """``size`` float16 at ``source`` to float32 at ``target``."""
    convert_row(
        b,
        source,
        target,
        size,
        2,
        lambda a: b.fpext(load(b, a, vector(F16, AT_ONCE), 2), vector(F32, AT_ONCE)),
    )


@emitted(types.int64, types.int64, types.int64)
def float_row(b, source, target, size):
    """``size`` float32 at ``source`` to ``target``."""
    convert_row(b, source, target, size, 4, lambda a: load(b, a, vector(F32, AT_ONCE)))


@emitted(types.int64, types.int64)
def zero_row(b, target, size):
    """Writes ``size`` zeros of float32."""
    convert_row(b, target, target, size, 4, lambda a: splat(vector(F32, AT_ONCE), 0.0))


@emitted(types.int64, types.int64)
def prefetch_row(b, source, size):
    """Asks for ``size`` bytes to be brought near."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")

    def body(i, _):
        line = b.inttoptr(offset(b, source, i, _LINE), pointer)
        b.call(function, [line, I32(0), I32(2), I32(1)])  # to read, to L2, data
        return []

    loop(b, b.sdiv(size, size.type(_LINE)), [], body)


@emitted(types.int64, types.int64, types.int64, types.float32)
def scale_row(b, source, target, size, factor):
    """target = source * factor, ``size`` float32 numbers."""
    convert_row(
        b,
        source,
        target,
        size,
        4,
        lambda a: b.fmul(
            load(b, a, vector(F32, AT_ONCE)), broadcast(b, factor, AT_ONCE)
        ),
    )


@emitted(types.int64, types.int64, types.int64)
def to_bf16_row(b, source, target, size):
    """``size`` float32 at ``source`` to bfloat16 at ``target``."""
    convert_row(
        b,
        source,
        target,
        size,
        4,
        lambda a: float_to_bf16(b, load(b, a, vector(F32, AT_ONCE))),
        2,
    )


@emitted(types.int64, types.int64, types.int64)
def to_fp16_row(b, source, target, size):
    """``size`` float32 at ``source`` to float16 at ``target``."""
    convert_row(
        b,
        source,
        target,
        size,
        4,
        lambda a: b.fptrunc(load(b, a, vector(F32, AT_ONCE)), vector(F16, AT_ONCE)),
        2,
    )


@njit
def itemsize(kind):
    """Bytes of a number."""
    if kind == FP8:
        return 1
    return 4 if kind == FLOAT32 else 2


@njit
def write_row(kind, source, target, size):
    """Writes float32 numbers as bfloat16, float16 or float32."""
    if kind == BF16:
        to_bf16_row(source, target, size)
    elif kind == FP16:
        to_fp16_row(source, target, size)
    else:
        float_row(source, target, size)


@njit
def read_row(kind, max_code, source, target, size):
    """Reads a row of any format."""
    if kind == FP8:
        fp8_row(source, target, size, max_code)
    elif kind == BF16:
        bf16_row(source, target, size)
    elif kind == FP16:
        fp16_row(source, target, size)
    else:
        float_row(source, target, size)
