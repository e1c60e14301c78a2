# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The inner loops of MLA's tile in bfloat16, for CPUs with AVX512_BF16.

One instruction multiplies 16 pairs of bfloat16 and adds both products of a pair to a
float32. Logits and output are the same sum of outer products: pairs of one operand are
broadcast, and the other has 16 pairs side by side. Logits pair numbers of the latent,
the output pairs tokens.
"""

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from vllm.fp8_inc.attention.kernels.rows import (
    AT_ONCE,
    bf16_to_float,
    float_to_bf16,
    fp8_to_float,
)
from vllm.fp8_inc.attention.kernels.tiles import LOWEST, exp
from vllm.fp8_inc.attention.kernels.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    addresses,
    broadcast,
    cpu_features,
    emitted,
    fma,
    load,
    loop,
    offset,
    splat,
    store,
    vector,
)

# Whether the CPU has the instruction. LLVM aborts the process where it meets it on
# another one.
HAS_DOT = "avx512bf16" in cpu_features()

# Numbers in a vector; heads are padded to a multiple.
WIDE = 16
_INSTRUCTION = "llvm.x86.avx512bf16.dpbf16ps.512"
_FLOATS, _PAIRS = vector(F32, WIDE), vector(I32, WIDE)
# Accumulators: their rows times their vectors. An AVX-512 CPU has 32 registers.
_SUMS = 16
# Pairs of a latent that are taken before addresses are computed again.
_UNROLLED = 8
_int = types.int64


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def dot(b, sums, x, y):
    """sums + x[0] * y[0] + x[1] * y[1] for pairs of bfloat16.

    Args:
        b: The builder.
        sums: <16 x float>.
        x: <16 x i32>, pairs; the first of a pair is in the lower half.
        y: As x.
    """
    if not HAS_DOT:
        return _two_products(b, sums, x, y)
    pairs = ir.VectorType(_BFloat(), 2 * WIDE)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, pairs, pairs])
    function = cgutils.get_or_insert_function(b.module, kind, _INSTRUCTION)
    return b.call(function, [sums, b.bitcast(x, pairs), b.bitcast(y, pairs)])


def _two_products(b, sums, x, y):
    """What the instruction computes, for tests on other CPUs."""
    for of in (_second, _first):
        sums = fma(b, of(b, x), of(b, y), sums)
    return sums


def _first(b, pairs):
    return b.bitcast(b.shl(pairs, splat(_PAIRS, 16)), _FLOATS)


def _second(b, pairs):
    return b.bitcast(b.and_(pairs, splat(_PAIRS, -(2**16))), _FLOATS)


def _joined(b, first, second):
    """Pairs of <16 x i16> and <16 x i16>."""
    high = b.shl(b.zext(second, _PAIRS), splat(_PAIRS, 16))
    return b.or_(b.zext(first, _PAIRS), high)


def _sum(b, sums, width, left, right, count, step, unrolled=1):
    """Adds ``count`` outer products to accumulators [rows, width].

    Args:
        b: The builder.
        sums: The accumulators.
        width: Vectors of a row.
        left: Addresses of each row's first pair.
        right: Address of the first vector.
        count: i64, a multiple of ``unrolled``.
        step: i64 bytes to the next pair of a row, and to the next vectors.
        unrolled: Products of a turn.
    """
    left_step, right_step = step

    def body(i, sums):
        k = b.mul(i, I64(unrolled))
        rows = [b.add(row, b.mul(k, left_step)) for row in left]
        vectors = b.add(right, b.mul(k, right_step))
        for u in range(unrolled):
            values = [
                load(b, offset(b, vectors, w, 4 * WIDE), _PAIRS) for w in range(width)
            ]
            new = []
            for r, row in enumerate(rows):
                pair = load(b, b.add(row, b.mul(I64(u), left_step)), I32)
                pair = broadcast(b, pair, WIDE)
                of_row = sums[r * width : (r + 1) * width]
                new += [dot(b, s, pair, v) for s, v in zip(of_row, values)]
            sums = new
            vectors = b.add(vectors, right_step)
        return sums

    return loop(b, b.sdiv(count, I64(unrolled)), sums, body)


def _logits(width):
    """Makes the function for ``width`` vectors of heads."""

    @emitted(*[_int] * 7, types.float32)
    def logits(b, out, out_stride, key, key_stride, query, query_stride, count, scale):
        """out[t] = scale * sum over k of key[t, k] * query[k]."""
        rows = _SUMS // width
        keys = addresses(b, key, key_stride, rows)
        zeros = [splat(_FLOATS, 0.0)] * _SUMS
        step = I64(4), query_stride
        sums = _sum(b, zeros, width, keys, query, count, step, _UNROLLED)
        factor = broadcast(b, scale, WIDE)
        for r, row in enumerate(addresses(b, out, out_stride, rows)):
            for w in range(width):
                value = b.fmul(sums[r * width + w], factor)
                store(b, value, offset(b, row, w, 4 * WIDE))

    return logits


def _output(width):
    """Makes the function for ``width`` vectors of a result."""

    @emitted(*[_int] * 8)
    def output(
        b, out, out_stride, left, left_stride, decay, right, right_stride, count
    ):
        """out[r] = decay[r] * out[r] + sum over k of left[k, r] * right[k]."""
        rows = addresses(b, out, out_stride, _SUMS // width)
        sums = []
        for r, row in enumerate(rows):
            factor = broadcast(b, load(b, offset(b, decay, r, 4), F32), WIDE)
            for w in range(width):
                value = load(b, offset(b, row, w, 4 * WIDE), _FLOATS)
                sums.append(b.fmul(value, factor))
        lefts = [offset(b, left, r, 4) for r in range(len(rows))]
        step = left_stride, right_stride
        sums = _sum(b, sums, width, lefts, right, count, step)
        for r, row in enumerate(rows):
            for w in range(width):
                store(b, sums[r * width + w], offset(b, row, w, 4 * WIDE))

    return output


_logits_1, _logits_2, _logits_4 = (_logits(width) for width in (1, 2, 4))
_output_1, _output_2, _output_4 = (_output(width) for width in (1, 2, 4))


@njit
def logits_of(out, line, key, key_stride, tokens, query, heads, size, scale):
    """out[t, head] = scale * key[t] . query[head].

    Args:
        out: float32, ``line`` bytes a token; memory for tokens padded to WIDE.
        line: Also the bytes of a pair of all heads in ``query``.
        key: Rows of bfloat16, ``key_stride`` bytes apart.
        tokens: How many.
        query: [size / 2, heads] pairs of bfloat16.
        heads: A multiple of WIDE.
        size: Numbers of a row, a multiple of 16.
        scale: Multiplies the result.
    """
    vectors, count = heads // WIDE, size // 2
    done = 0
    while done < vectors:
        left = vectors - done
        width = 4 if left >= 4 else 2 if left >= 2 else 1
        at = 4 * WIDE * done
        for t in range(0, tokens, _SUMS // width):
            o, k, q = out + t * line + at, key + t * key_stride, query + at
            if width == 4:
                _logits_4(o, line, k, key_stride, q, line, count, scale)
            elif width == 2:
                _logits_2(o, line, k, key_stride, q, line, count, scale)
            else:
                _logits_1(o, line, k, key_stride, q, line, count, scale)
        done += width


@njit
def output_of(out, size, weights, line, heads, decay, values, pairs):
    """out[head] = decay[head] * out[head] + sum over tokens of weight * value.

    Args:
        out: [heads, size] float32.
        size: A multiple of WIDE.
        weights: [pairs, heads] pairs of bfloat16, ``line`` bytes a row.
        heads: A multiple of WIDE.
        decay: [heads] float32.
        values: [pairs, size] pairs of bfloat16.
        pairs: Of tokens.
    """
    vectors, row = size // WIDE, 4 * size
    done = 0
    while done < vectors:
        left = vectors - done
        width = 4 if left >= 4 else 2 if left >= 2 else 1
        at = 4 * WIDE * done
        for r in range(0, heads, _SUMS // width):
            o, w = out + r * row + at, weights + 4 * r
            d, v = decay + 4 * r, values + at
            if width == 4:
                _output_4(o, row, w, line, d, v, row, pairs)
            elif width == 2:
                _output_2(o, row, w, line, d, v, row, pairs)
            else:
                _output_1(o, row, w, line, d, v, row, pairs)
        done += width


@emitted(*[_int] * 7)
def softmax(b, logits, line, tokens, weights, highest, total, decay):
    """Turns logits of WIDE heads into pairs of e^(logit - highest) as bfloat16.

    As ``tiles.softmax_step``, but that ``total`` is the sum of what was rounded. A
    token that completes the last pair gets the weight of the lowest logit.
    """
    before = load(b, highest, _FLOATS)

    def at(t):
        return b.add(logits, b.mul(t, line))

    def larger(t, values):
        x = load(b, at(t), _FLOATS)
        return [b.select(b.fcmp_ordered(">", x, values[0]), x, values[0])]

    (now,) = loop(b, tokens, [before], larger)
    store(b, splat(_FLOATS, LOWEST), at(tokens))

    def weigh(pair, values):
        first, sums = b.mul(pair, I64(2)), values[0]
        both = []
        for t in (first, b.add(first, I64(1))):
            x = exp(b, b.fsub(load(b, at(t), _FLOATS), now))
            both.append(float_to_bf16(b, x))
            sums = b.fadd(sums, bf16_to_float(b, both[-1]))
        store(b, _joined(b, *both), b.add(weights, b.mul(pair, line)))
        return [sums]

    pairs = b.sdiv(b.add(tokens, I64(1)), I64(2))
    (sums,) = loop(b, pairs, [splat(_FLOATS, 0.0)], weigh)
    factor = exp(b, b.fsub(before, now))
    store(b, now, highest)
    store(b, factor, decay)
    store(b, fma(b, load(b, total, _FLOATS), factor, sums), total)


def _reader(element, itemsize, bits_of):
    """Makes the function that reads two rows of one dtype."""

    @emitted(*[_int] * 7)
    def read(b, first, second, row, pairs, latent, size, max_code):
        """Two rows of a cache as bfloat16 at ``row``, and their latents as pairs."""
        next_row = b.add(row, b.mul(size, I64(2)))

        def both(i):
            out = []
            for source, target in ((first, row), (second, next_row)):
                codes = load(
                    b,
                    offset(b, source, i, AT_ONCE * itemsize),
                    vector(element, AT_ONCE),
                    itemsize,
                )
                out.append(bits_of(b, codes, max_code))
                store(b, out[-1], offset(b, target, i, 2 * AT_ONCE), 2)
            return out

        def paired(i, _):
            store(b, _joined(b, *both(i)), offset(b, pairs, i, 4 * AT_ONCE))
            return []

        def alone(i, _):
            both(b.add(i, of_latent))
            return []

        of_latent = b.sdiv(latent, I64(AT_ONCE))
        loop(b, of_latent, [], paired)
        loop(b, b.sub(b.sdiv(size, I64(AT_ONCE)), of_latent), [], alone)

    return read


def _fp8_bits(b, codes, max_code):
    """Exact: a code has 4 significant bits."""
    bits = b.bitcast(fp8_to_float(b, codes, max_code), _PAIRS)
    return b.trunc(b.lshr(bits, splat(_PAIRS, 16)), vector(I16, WIDE))


read_fp8 = _reader(I8, 1, _fp8_bits)
read_bf16 = _reader(I16, 2, lambda b, bits, _: bits)


@emitted(*[_int] * 4)
def pairs_to_column(b, source, target, stride, size):
    """``size`` bfloat16 as pairs, ``stride`` bytes apart; a multiple of 16."""
    lanes = AT_ONCE // 2

    def body(i, _):
        pairs = load(b, offset(b, source, i, 4 * lanes), vector(I32, lanes), 2)
        first = b.add(target, b.mul(b.mul(i, I64(lanes)), stride))
        for lane, address in enumerate(addresses(b, first, stride, lanes)):
            store(b, b.extract_element(pairs, I32(lane)), address)
        return []

    loop(b, b.sdiv(size, I64(AT_ONCE)), [], body)
