"""Vectors of 16 float32 for CPU loops that LLVM's own vectorizer does not see through: sums over rows, dot products.

    x = load_lanes(row_SX, s, d) * scale       16 weights of row s from column d on, whatever their stored format
    store_lanes(sum_1D, 0, d, x + load_lanes(sum_1D, 0, d))

Lanes are computed on as float32 numbers are, each for itself, so a loop over lanes gives the bits of a loop over
numbers. Processors with narrower registers use several for one vector. The last `dim % LANES` weights of a row are the
business of a loop over numbers.
"""

import operator

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

__all__ = ["LANES", "load_lanes", "move_lanes", "same_lanes", "store_lanes", "sum_lanes"]

LANES = 16
"""Numbers of a vector."""

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_WORDS, _HALF_WORDS = ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_WEIGHTS = (types.float32, types.uint16, types.int16)  # see to_float32 in oneemb.kernels.jit


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes_type):
        super().__init__(manager, lanes_type, _VECTOR)


def _pointer(context, builder, array_type, place, kind):
    """Where 16 elements from array[row, column] on lie, the three of `place`. Rows are not counted from the end."""
    array, row, column = place
    view = context.make_array(array_type)(context, builder, array)
    row_bytes = cgutils.unpack_tuple(builder, view.strides)[0]
    element_bytes = _I64(array_type.dtype.bitwidth // 8)
    begin = builder.add(builder.mul(row, row_bytes), builder.mul(column, element_bytes))
    return builder.inttoptr(builder.add(builder.ptrtoint(view.data, _I64), begin), kind.as_pointer())


def _is_rows(array, *indexes):
    return isinstance(array, types.Array) and array.ndim == 2 and array.layout == "C" and set(indexes) == {types.int64}


@intrinsic
def load_lanes(typingctx, array, row, column):
    """array[row, column : column + 16] as float32. `array` is C-contiguous, in one of the three formats of weights."""
    if not _is_rows(array, row, column) or array.dtype not in _WEIGHTS:
        return None

    def codegen(context, builder, sig, args):
        dtype = sig.args[0].dtype
        kind = _VECTOR if dtype == types.float32 else _HALF_WORDS
        loaded = builder.load(_pointer(context, builder, sig.args[0], args, kind), align=dtype.bitwidth // 8)
        if dtype == types.float32:
            return loaded
        if dtype == types.uint16:
            return builder.fpext(builder.bitcast(loaded, _HALVES), _VECTOR)
        return builder.bitcast(builder.shl(builder.zext(loaded, _WORDS), _WORDS([16] * LANES)), _VECTOR)

    return _lanes(array, row, column), codegen


@intrinsic
def store_lanes(typingctx, array, row, column, x):
    """array[row, column : column + 16] = x, in the array's format, rounded to nearest, ties to even."""
    if not _is_rows(array, row, column) or array.dtype not in _WEIGHTS or x != _lanes:
        return None

    def codegen(context, builder, sig, args):
        dtype, stored = sig.args[0].dtype, args[3]
        if dtype == types.uint16:
            stored = builder.bitcast(builder.fptrunc(stored, _HALVES), _HALF_WORDS)
        elif dtype == types.int16:
            bits = builder.bitcast(stored, _WORDS)
            odd = builder.and_(builder.lshr(bits, _WORDS([16] * LANES)), _WORDS([1] * LANES))
            rounded = builder.add(builder.add(bits, _WORDS([0x7FFF] * LANES)), odd)
            rounded = builder.trunc(builder.lshr(rounded, _WORDS([16] * LANES)), _HALF_WORDS)
            nan = builder.fcmp_unordered("uno", stored, stored)
            stored = builder.select(nan, _HALF_WORDS([0x7FC0] * LANES), rounded)
        pointer = _pointer(context, builder, sig.args[0], args[:3], stored.type)
        builder.store(stored, pointer, align=dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, row, column, x), codegen


@intrinsic
def move_lanes(typingctx, to, to_row, to_column, array, row, column):
    """to[to_row, to_column : to_column + 16] = array[row, column : column + 16], bits of elements of one dtype."""
    if not _is_rows(to, to_row, to_column, row, column) or not _is_rows(array, row) or to.dtype != array.dtype:
        return None

    def codegen(context, builder, sig, args):
        bits = sig.args[0].dtype.bitwidth
        kind = ir.VectorType(ir.IntType(bits), LANES)
        moved = builder.load(_pointer(context, builder, sig.args[3], args[3:], kind), align=bits // 8)
        builder.store(moved, _pointer(context, builder, sig.args[0], args[:3], kind), align=bits // 8)
        return context.get_dummy_value()

    return types.void(to, to_row, to_column, array, row, column), codegen


def _same(builder, number):
    one = builder.insert_element(_VECTOR(ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(one, _VECTOR(ir.Undefined), _WORDS([0] * LANES))


@intrinsic
def same_lanes(typingctx, number):
    """16 times this float32."""
    if number != types.float32:
        return None
    return _lanes(number), lambda context, builder, sig, args: _same(builder, args[0])


@intrinsic
def sum_lanes(typingctx, x):
    """The sum of all lanes: lanes 8 to 15 added to 0 to 7, of the sums 4 to 7 to 0 to 3, and so on."""
    if x != _lanes:
        return None

    def codegen(context, builder, sig, args):
        rest, lanes = args[0], LANES
        while lanes > 1:
            lanes //= 2
            low, high = (
                builder.shuffle_vector(rest, rest, ir.VectorType(_I32, lanes)(list(range(begin, begin + lanes))))
                for begin in (0, lanes)
            )
            rest = builder.fadd(low, high)
        return builder.extract_element(rest, _I32(0))

    return types.float32(x), codegen


def _operator(function, instruction):
    @intrinsic
    def of_lanes(typingctx, x, y):
        def codegen(context, builder, sig, args):
            both = [
                _same(builder, number) if given == types.float32 else number
                for number, given in zip(args, sig.args, strict=True)
            ]
            return getattr(builder, instruction)(*both)

        return _lanes(x, y), codegen

    @overload(function, inline="always")
    def of_kinds(x, y):
        if {x, y} in ({_lanes}, {_lanes, types.float32}):
            return lambda x, y: of_lanes(x, y)
        return None


for _function, _instruction in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"),
):  # fmt: skip
    _operator(_function, _instruction)
