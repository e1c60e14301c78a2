# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Vector code for numba: LLVM IR on vector types, which LLVM fits to any CPU.

No function here names an instruction, so the same text serves AVX2, AVX-512 and
arm64. Memory is addressed by int64 addresses, in bytes.
"""

import inspect
from collections.abc import Callable, Sequence

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.core.codegen import get_host_cpu_features
from numba.core.config import CPU_FEATURES
from numba.extending import intrinsic

F16, F32 = ir.HalfType(), ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def cpu_features() -> set[str]:
    """The features that numba compiles for, as LLVM names them."""
    text = get_host_cpu_features() if CPU_FEATURES is None else CPU_FEATURES
    return {name[1:] for name in text.split(",") if name.startswith("+")}


# float32 numbers in a vector.
LANES = 16 if "avx512f" in cpu_features() else 8


def check_cpu() -> None:
    """Refuses what would make LLVM abort the process.

    Raises:
        NotImplementedError: Where float16 cannot be converted by an instruction.
    """
    x86 = llvm.get_process_triple().startswith(("x86", "i686"))
    if x86 and "f16c" not in cpu_features():
        raise NotImplementedError(
            "the attention kernels need a CPU with F16C, as every CPU with AVX2 has"
        )


def emitted(*arguments: types.Type, result: types.Type = types.void):
    """Makes a function for numba out of one that emits its IR.

    Args:
        arguments: Types of what follows the builder in the decorated function.
        result: Type of what it returns; void: nothing.
    """

    def decorate(emit: Callable) -> Callable:
        def define(typing_context, *_):
            def generate(context, builder, signature, values):
                out = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else out

            return result(*arguments), generate

        define.__name__ = emit.__name__
        define.__doc__ = emit.__doc__
        define.__signature__ = inspect.signature(emit)
        return intrinsic(define)

    return decorate


def vector(element: ir.Type, lanes: int | None = None) -> ir.VectorType:
    return ir.VectorType(element, lanes or LANES)


def splat(of: ir.VectorType, value: float) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(of, [value] * of.count)


def broadcast(b: ir.IRBuilder, value: ir.Value, lanes: int | None = None) -> ir.Value:
    """A vector of one scalar."""
    lanes = lanes or LANES
    undefined = ir.Constant(vector(value.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, value, I32(0))
    return shuffle(b, first, first, [0] * lanes)


def shuffle(
    b: ir.IRBuilder, one: ir.Value, other: ir.Value, lanes: Sequence[int]
) -> ir.Value:
    mask = ir.Constant(vector(I32, len(lanes)), list(lanes))
    return b.shuffle_vector(one, other, mask)


def load(b: ir.IRBuilder, address: ir.Value, of: ir.Type, align: int = 4) -> ir.Value:
    value = b.load(b.inttoptr(address, of.as_pointer()))
    value.align = align
    return value


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 4) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = align


def offset(b: ir.IRBuilder, address: ir.Value, count, size: int = 1) -> ir.Value:
    """``address`` + ``count`` * ``size`` bytes; ``count`` may be a Python integer."""
    if isinstance(count, int):
        return b.add(address, I64(count * size)) if count else address
    return b.add(address, b.mul(count, I64(size)) if size != 1 else count)


def addresses(
    b: ir.IRBuilder, first: ir.Value, stride: ir.Value, count: int
) -> list[ir.Value]:
    """``count`` addresses, ``stride`` bytes apart."""
    out = [first]
    for _ in range(count - 1):
        out.append(b.add(out[-1], stride))
    return out


def fma(b: ir.IRBuilder, one: ir.Value, other: ir.Value, plus: ir.Value) -> ir.Value:
    kind = one.type
    name = f"llvm.fma.v{kind.count}f32"
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(kind, [kind] * 3), name
    )
    return b.call(function, [one, other, plus])


def loop(
    b: ir.IRBuilder,
    count: ir.Value,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Emits ``for i in range(count): carried = body(i, carried)``."""
    before = b.block
    head = b.append_basic_block("head")
    inside = b.append_basic_block("inside")
    after = b.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(I64(0), before)
    values = [b.phi(value.type) for value in carried]
    for phi, value in zip(values, carried):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", i, count), inside, after)
    b.position_at_end(inside)
    new = body(i, values)
    i.add_incoming(b.add(i, I64(1)), b.block)
    for phi, value in zip(values, new):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)
    return values


@emitted(types.int64, types.int64, result=types.int64)
def fetch_add(b, address, value):
    """Adds to an int64 shared between threads; returns what it was before."""
    pointer = b.inttoptr(address, I64.as_pointer())
    return b.atomic_rmw("add", pointer, value, "seq_cst")


@emitted(types.int64, result=types.voidptr)
def pointer(b, address):
    """An address that carray takes."""
    return b.inttoptr(address, I8.as_pointer())


@intrinsic
def address_of(typing_context, record):
    """The address that a typed pointer holds."""

    def generate(context, builder, signature, values):
        return builder.ptrtoint(values[0], I64)

    return types.int64(record), generate


@njit
def floats(address, count):
    """The float32 numbers at an address, as an array."""
    return carray(pointer(address), count, np.float32)
