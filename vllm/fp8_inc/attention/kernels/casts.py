# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The device's cast of activations to FP8, as Fp8Format.cast, on rows of numbers."""

from numba import njit
from numba.core import types

from vllm.fp8_inc.attention.kernels.rows import (
    AT_ONCE,
    BF16,
    FP16,
    bf16_to_float,
    convert_row,
)
from vllm.fp8_inc.attention.kernels.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    addresses,
    broadcast,
    emitted,
    load,
    loop,
    offset,
    shuffle,
    splat,
    store,
    vector,
)

# bfloat16 numbers as two vectors of 8: what one unpack instruction of AVX2 takes.
_HALVES = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
# Where the numbers are after both halves lie one after the other.
_ORDER = _HALVES[0] + _HALVES[1]
# To the unit in which E4M3 and float16 have the same denormals; see bf16_to_fp8.
_TO_FLOAT16 = 2.0**-8 * (1 + 2.0**-20)


def bf16_to_fp8(b, bits, quant_scale, maximum):
    """<16 x i16> bits of bfloat16 to <16 x i8> codes, by way of float16.

    2^-8 of an E4M3 number is a float16 number, and denormals of one are denormals of
    the other, so that rounding away 7 bits of a float16 is the cast. A bfloat16 has
    8 significant bits and is exact in float16, but for those below 2^-9. There the
    conversion would turn one that lies just above the tie at 2^-10 into the tie;
    2^-20 of every number is added so that it stays above. It is too little to move
    any other over a tie.

    Args:
        b: The builder.
        bits: <16 x i16>.
        quant_scale: float; the product is rounded to bfloat16, as on the device.
        maximum: float, the largest finite value of the flavour.

    Returns:
        The codes, where a NaN became the largest finite one, and the float16
        numbers' sizes as <16 x i16>: above 0x7C00 for NaN.
    """
    kind, scale = bits.type, broadcast(b, quant_scale, AT_ONCE // 2)
    parts = []
    for lanes in _HALVES:
        # The upper half of a float32 is a bfloat16.
        pairs = [index for lane in lanes for index in (lane, AT_ONCE + lane)]
        wide = shuffle(b, splat(kind, 0), bits, pairs)
        values = b.bitcast(wide, vector(F32, AT_ONCE // 2))
        values = _round_to_bf16(b, b.fmul(values, scale))
        values = b.fmul(values, splat(values.type, _TO_FLOAT16))
        half = b.fptrunc(values, vector(F16, AT_ONCE // 2))
        parts.append(b.bitcast(half, vector(I16, AT_ONCE // 2)))
    half = shuffle(b, *parts, range(AT_ONCE))
    size = b.and_(half, splat(kind, 0x7FFF))
    top = b.fptrunc(b.fmul(maximum, F32(2.0**-8)), F16)
    top = broadcast(b, b.bitcast(top, I16), AT_ONCE)
    codes = b.select(b.icmp_unsigned("<", size, top), size, top)
    last = b.and_(b.lshr(codes, splat(kind, 7)), splat(kind, 1))
    codes = b.lshr(b.add(b.add(codes, splat(kind, 0x3F)), last), splat(kind, 7))
    sign = b.and_(b.lshr(half, splat(kind, 8)), splat(kind, 0x80))
    codes = b.trunc(b.or_(codes, sign), vector(I8, AT_ONCE))
    return shuffle(b, codes, codes, _ORDER), size


def float_to_fp8(b, values, is_nan, maximum, nan_sign):
    """<n x float> to codes: to nearest even, saturating, as Fp8Format.encode.

    Args:
        b: The builder.
        values: <n x float>.
        is_nan: <n x i1>, which of them are NaN.
        maximum: float, the largest finite value of the flavour.
        nan_sign: i32, 0x80 where NaN keeps its sign, else 0.
    """
    lanes = values.type.count
    kind, floats = vector(I32, lanes), values.type
    bits = b.bitcast(values, kind)
    sign = b.and_(b.lshr(bits, splat(kind, 24)), splat(kind, 0x80))
    size = b.bitcast(b.and_(bits, splat(kind, 0x7FFFFFFF)), floats)
    top = broadcast(b, maximum, lanes)
    size = b.select(b.fcmp_ordered(">", size, top), top, size)
    bits = b.bitcast(size, kind)
    last = b.and_(b.lshr(bits, splat(kind, 20)), splat(kind, 1))
    normal = b.lshr(b.add(b.add(bits, splat(kind, 0x7FFFF)), last), splat(kind, 20))
    normal = b.sub(normal, splat(kind, (127 - 7) << 3))
    # 2^14 has the denormals' spacing, so the addition rounds to it.
    denormal = b.bitcast(b.fadd(size, splat(floats, 2.0**14)), kind)
    denormal = b.sub(denormal, splat(kind, 0x46800000))
    small = b.fcmp_ordered("<", size, splat(floats, 2.0**-6))
    codes = b.or_(b.select(small, denormal, normal), sign)
    nan = b.or_(splat(kind, 0x7F), b.and_(sign, broadcast(b, nan_sign, lanes)))
    return b.trunc(b.select(is_nan, nan, codes), vector(I8, lanes))


def _round_to_bf16(b, values):
    """The nearest bfloat16, as float; NaN may become anything."""
    kind = vector(I32, values.type.count)
    bits = b.bitcast(values, kind)
    last = b.and_(b.lshr(bits, splat(kind, 16)), splat(kind, 1))
    rounded = b.add(b.add(bits, splat(kind, 0x7FFF)), last)
    return b.bitcast(b.and_(rounded, splat(kind, -(2**16))), values.type)


def _round_to_fp16(b, values):
    """The nearest float16, as float."""
    half = b.fptrunc(values, vector(F16, values.type.count))
    return b.fpext(half, values.type)


def float_cast(to_float, to_product):
    """Makes the cast of 16 numbers by way of float32, for a dtype.

    The product with the quant scale is rounded to that dtype, as on the device.
    """

    def cast(b, values, quant_scale, maximum, nan_sign):
        exact = b.fmul(to_float(b, values), broadcast(b, quant_scale, AT_ONCE))
        is_nan = b.fcmp_unordered("uno", exact, exact)
        return float_to_fp8(b, to_product(b, exact), is_nan, maximum, nan_sign)

    return cast


def _row_of(element, size_of, cast):
    """Makes the function that casts rows of one dtype."""

    @emitted(*[types.int64] * 3, types.float32, types.float32, types.int64)
    def row(b, source, target, size, quant_scale, maximum, nan_sign):
        sign = b.trunc(nan_sign, I32)

        def convert(address):
            values = load(b, address, vector(element, AT_ONCE), size_of)
            return cast(b, values, quant_scale, maximum, sign)

        convert_row(b, source, target, size, size_of, convert, 1)

    return row


@emitted(*[types.int64] * 3, types.float32, types.float32, result=types.int64)
def _from_bf16(b, source, target, size, quant_scale, maximum):
    """Casts a row of bfloat16; returns whether it has a NaN, which is not cast."""
    kind = vector(I16, AT_ONCE)

    def body(i, largest):
        bits = load(b, offset(b, source, i, 2 * AT_ONCE), kind, 2)
        codes, sizes = bf16_to_fp8(b, bits, quant_scale, maximum)
        store(b, codes, offset(b, target, i, AT_ONCE), 1)
        return [b.select(b.icmp_unsigned(">", sizes, *largest), sizes, *largest)]

    (largest,) = loop(b, b.sdiv(size, I64(AT_ONCE)), [splat(kind, 0)], body)
    nan = b.icmp_unsigned(">", largest, splat(kind, 0x7C00))
    return b.zext(b.bitcast(nan, I16), I64)


_from_bf16_with_nan = _row_of(I16, 2, float_cast(bf16_to_float, _round_to_bf16))
_from_fp16 = _row_of(
    F16,
    2,
    float_cast(lambda b, x: b.fpext(x, vector(F32, AT_ONCE)), _round_to_fp16),
)
_from_float = _row_of(F32, 4, float_cast(lambda b, x: x, lambda b, x: x))


@njit
def cast_row(kind, source, target, size, quant_scale, maximum, nan_sign):
    """Casts ``size`` activations of any dtype to codes."""
    if kind == BF16:
        if _from_bf16(source, target, size, quant_scale, maximum):
            _from_bf16_with_nan(source, target, size, quant_scale, maximum, nan_sign)
    elif kind == FP16:
        _from_fp16(source, target, size, quant_scale, maximum, nan_sign)
    else:
        _from_float(source, target, size, quant_scale, maximum, nan_sign)


@emitted(*[types.int64] * 4)
def scatter_row(b, source, target, stride, size):
    """``size`` codes to a column, ``stride`` bytes apart."""

    def body(i, _):
        at = b.mul(i, I64(AT_ONCE))
        codes = load(b, b.add(source, at), vector(I8, AT_ONCE), 1)
        first = b.add(target, b.mul(at, stride))
        for lane, address in enumerate(addresses(b, first, stride, AT_ONCE)):
            store(b, b.extract_element(codes, I32(lane)), address, 1)
        return []

    loop(b, b.sdiv(size, I64(AT_ONCE)), [], body)


@emitted(*[types.int64] * 5)
def transpose(b, source, source_stride, target, target_stride, size):
    """16 rows of ``size`` codes to ``size`` rows of 16."""
    low = [index for lane in range(8) for index in (lane, AT_ONCE + lane)]
    high = [index + 8 for index in low]

    def body(i, _):
        at = b.mul(i, I64(AT_ONCE))
        first = b.add(source, at)
        rows = [
            load(b, address, vector(I8, AT_ONCE), 1)
            for address in addresses(b, first, source_stride, AT_ONCE)
        ]
        for _step in range(4):
            pairs = zip(rows[:8], rows[8:])
            rows = [shuffle(b, x, y, lanes) for x, y in pairs for lanes in (low, high)]
        first = b.add(target, b.mul(at, target_stride))
        for row, address in zip(rows, addresses(b, first, target_stride, AT_ONCE)):
            store(b, row, address, 1)
        return []

    loop(b, b.sdiv(size, I64(AT_ONCE)), [], body)
