# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The inner loops of attention: logits, online softmax and output of a tile, float32.

A tile is some tokens' keys and values as float32 rows. Logits and probabilities lie
as [token, row], so that softmax takes LANES rows at once without a reduction across
lanes; a row is a query of a head. What a tile adds is kept relative to the highest
logit so far (``highest``, ``total``, as in online softmax, arXiv 1805.02867).
"""

from numba import njit
from numba.core import types

from vllm.fp8_inc.attention.kernels.vectors import (
    F32,
    I32,
    I64,
    LANES,
    addresses,
    broadcast,
    emitted,
    fma,
    load,
    loop,
    offset,
    shuffle,
    splat,
    store,
    vector,
)

# Rows that the inner loops take at once; queries are padded to a multiple.
ROWS = 4
# Tokens that ``logits_of`` takes at once; tiles are padded to a multiple.
TOKENS = 3
# A logit that no token has.
LOWEST = -1e30

_int = types.int64
_LOG2_E, _MAGIC = 1.4426950408889634, 1.5 * 2**23
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Taylor coefficients of exp beyond 1 + x, highest first: enough for |x| <= ln(2)/2.
_EXP = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)


def exp(b, x):
    """e^x of a vector for x <= 0; NaN stays NaN."""
    kind = x.type
    bits = vector(I32, kind.count)
    low = splat(kind, -87.0)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    # Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
    rounded = fma(b, x, splat(kind, _LOG2_E), splat(kind, _MAGIC))
    n = b.fsub(rounded, splat(kind, _MAGIC))
    x = fma(b, n, splat(kind, -_LN2_HIGH), x)
    x = fma(b, n, splat(kind, -_LN2_LOW), x)
    p = splat(kind, _EXP[0])
    for coefficient in (*_EXP[1:], 1.0, 1.0):
        p = fma(b, p, x, splat(kind, coefficient))
    power = b.shl(b.bitcast(rounded, bits), splat(bits, 23))
    return b.bitcast(b.add(b.bitcast(p, bits), power), kind)


def _sums(b, four):
    """<4 x float>: the sum of the lanes of each of four vectors."""
    while four[0].type.count > 4:
        half = four[0].type.count // 2
        low, high = list(range(half)), list(range(half, 2 * half))
        four = [b.fadd(shuffle(b, x, x, low), shuffle(b, x, x, high)) for x in four]
    pairs = [
        b.fadd(shuffle(b, x, y, [0, 4, 2, 6]), shuffle(b, x, y, [1, 5, 3, 7]))
        for x, y in (four[:2], four[2:])
    ]
    return b.fadd(shuffle(b, *pairs, [0, 1, 4, 5]), shuffle(b, *pairs, [2, 3, 6, 7]))


@emitted(_int, _int, _int, _int, _int, _int, _int)
def dot_products(b, query, query_stride, key, key_stride, logits, logits_stride, size):
    """logits[t, r] = query[r] . key[t] for ROWS rows and TOKENS tokens."""
    rows = addresses(b, query, query_stride, ROWS)
    tokens = addresses(b, key, key_stride, TOKENS)
    kind = vector(F32)

    def body(i, sums):
        at = b.mul(i, I64(4 * LANES))
        keys = [load(b, b.add(token, at), kind) for token in tokens]
        out = list(sums)
        for r, row in enumerate(rows):
            q = load(b, b.add(row, at), kind)
            for t, k in enumerate(keys):
                out[t * ROWS + r] = fma(b, q, k, out[t * ROWS + r])
        return out

    zero = splat(kind, 0.0)
    steps = b.sdiv(size, I64(LANES))
    sums = loop(b, steps, [zero] * (ROWS * TOKENS), body)
    for t, at in enumerate(addresses(b, logits, logits_stride, TOKENS)):
        store(b, _sums(b, sums[t * ROWS : (t + 1) * ROWS]), at)


@emitted(_int, _int, _int, _int, _int, _int)
def softmax_step(b, logits, logits_stride, tokens, highest, total, decay):
    """Turns the logits of LANES rows into e^(logit - highest).

    Raises ``highest`` to this tile's, and writes to ``decay`` what earlier sums must
    be multiplied by; ``total`` is multiplied already.
    """
    kind = vector(F32)
    before = load(b, highest, kind)

    def at(t):
        return b.add(logits, b.mul(t, logits_stride))

    def larger(t, values):
        x = load(b, at(t), kind)
        return [b.select(b.fcmp_ordered(">", x, values[0]), x, values[0])]

    (now,) = loop(b, tokens, [before], larger)

    def exponential(t, values):
        x = exp(b, b.fsub(load(b, at(t), kind), now))
        store(b, x, at(t))
        return [b.fadd(values[0], x)]

    factor = exp(b, b.fsub(before, now))
    (sums,) = loop(b, tokens, [splat(kind, 0.0)], exponential)
    store(b, now, highest)
    store(b, factor, decay)
    store(b, fma(b, load(b, total, kind), factor, sums), total)


def _folded(b, values, join):
    """Joins the lanes of a vector; the result is in every lane."""
    lanes, step = values.type.count, values.type.count // 2
    while step:
        turned = [(lane + step) % lanes for lane in range(lanes)]
        values = join(values, shuffle(b, values, values, turned))
        step //= 2
    return values


@emitted(_int, _int, _int, _int, _int)
def softmax_row(b, logits, tokens, highest, total, decay):
    """``softmax_step`` for one row of contiguous logits; 16 divides ``tokens``."""
    kind = vector(F32)
    before = broadcast(b, load(b, highest, F32))

    def larger(x, y):
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def at(i):
        return offset(b, logits, i, 4 * LANES)

    steps = b.sdiv(tokens, I64(LANES))
    (now,) = loop(b, steps, [before], lambda i, m: [larger(load(b, at(i), kind), m[0])])
    now = _folded(b, now, larger)

    def exponential(i, values):
        x = exp(b, b.fsub(load(b, at(i), kind), now))
        store(b, x, at(i))
        return [b.fadd(values[0], x)]

    factor = exp(b, b.fsub(before, now))
    (sums,) = loop(b, steps, [splat(kind, 0.0)], exponential)
    sums = fma(b, broadcast(b, load(b, total, F32)), factor, _folded(b, sums, b.fadd))
    for value, address in ((now, highest), (factor, decay), (sums, total)):
        store(b, b.extract_element(value, I32(0)), address)


def _outer_products(width):
    """Makes the function for ``width`` vectors of each row."""

    @emitted(*[_int] * 9)
    def outer_products(
        b, out, out_stride, left, left_k, left_r, decay, right, right_stride, count
    ):
        """out[r] = decay[r] * out[r] + sum over k of left[k, r] * right[k]."""
        rows = addresses(b, out, out_stride, ROWS)
        kind = vector(F32)
        sums = []
        for r, row in enumerate(rows):
            factor = broadcast(b, load(b, offset(b, decay, r, 4), F32))
            for w in range(width):
                value = load(b, offset(b, row, w, 4 * LANES), kind)
                sums.append(b.fmul(value, factor))

        def body(k, sums):
            values = b.add(right, b.mul(k, right_stride))
            vectors = [
                load(b, offset(b, values, w, 4 * LANES), kind) for w in range(width)
            ]
            factors = addresses(b, b.add(left, b.mul(k, left_k)), left_r, ROWS)
            out = []
            for r, address in enumerate(factors):
                factor = broadcast(b, load(b, address, F32))
                for w in range(width):
                    out.append(fma(b, factor, vectors[w], sums[r * width + w]))
            return out

        sums = loop(b, count, sums, body)
        for r, row in enumerate(rows):
            for w in range(width):
                store(b, sums[r * width + w], offset(b, row, w, 4 * LANES))

    return outer_products


_outer_1, _outer_2, _outer_3 = (_outer_products(width) for width in (1, 2, 3))


@njit
def outer(
    out, out_stride, rows, left, left_k, left_r, decay, right, right_stride, count, size
):
    """out[r, :size] = decay[r] * out[r, :size] + sum over k of left[k, r] * right[k].

    Strides are in bytes, left's of k and of r; ``rows`` is a multiple of ROWS, ``size``
    one of LANES.
    """
    vectors = size // LANES
    done = 0
    while done < vectors:
        width = min(3, vectors - done)
        at = 4 * done * LANES
        for r in range(0, rows, ROWS):
            o, x, y = out + r * out_stride + at, left + r * left_r, right + at
            d = decay + 4 * r
            if width == 3:
                _outer_3(o, out_stride, x, left_k, left_r, d, y, right_stride, count)
            elif width == 2:
                _outer_2(o, out_stride, x, left_k, left_r, d, y, right_stride, count)
            else:
                _outer_1(o, out_stride, x, left_k, left_r, d, y, right_stride, count)
        done += width


@njit
def logits_of(
    query, query_stride, rows, key, key_stride, tokens, size, logits, logits_stride
):
    """logits[t, r] = query[r] . key[t]; TOKENS divides the tokens that are computed."""
    for r in range(0, rows, ROWS):
        for t in range(0, tokens, TOKENS):
            dot_products(
                query + r * query_stride,
                query_stride,
                key + t * key_stride,
                key_stride,
                logits + t * logits_stride + 4 * r,
                logits_stride,
                size,
            )


@njit
def softmax_of(logits, logits_stride, rows, tokens, highest, total, decay):
    """``softmax_step`` for all rows; memory for a multiple of LANES rows is touched."""
    for r in range(0, rows, LANES):
        at = 4 * r
        softmax_step(
            logits + at, logits_stride, tokens, highest + at, total + at, decay + at
        )
