"""Vectors of 16 float32, for CPU loops that LLVM does not vectorize itself: sums over rows, dot products.

    x = load_lanes(row_SX, s, d) * scale       16 weights of row s from column d on, whatever their stored format
    store_lanes(sum_1D, 0, d, x + load_lanes(sum_1D, 0, d))

Arithmetic works on each lane as on a float32 number, so a loop over lanes gives the bits of a loop over numbers.
Processors with narrower registers use several for one vector. The last `dim % LANES` weights of a row need a loop over
numbers.

Wide vectors have 64 numbers, in several registers, so that a sum over many rows stays in registers instead of being
read from memory again for each row.
"""

import operator
from collections.abc import Callable
from typing import Any, no_type_check

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

LANES = 16
"""Numbers of a vector."""

WIDE = 64
"""Numbers of a wide vector."""

# Bytes of a line of the cache; size in bytes from which on an array is written past the caches.
_LINE_BYTES = 64
_STREAM_MIN = 1 << 23

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_WEIGHTS = (types.float32, types.uint16, types.int16)  # see oneemb.kernels.jit_code


class _LanesType(types.Type):
    def __init__(self, count: int) -> None:
        super().__init__(name=f"Lanes({count})")
        self.count = count

    def of(self, element: ir.Type) -> ir.VectorType:
        """Type of a vector of `count` elements of another type."""
        return ir.VectorType(element, self.count)

    @property
    def numbers(self) -> ir.VectorType:
        return self.of(ir.FloatType())


_lanes, _wide = _LanesType(LANES), _LanesType(WIDE)


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes_type: Any) -> None:
        super().__init__(manager, lanes_type, lanes_type.numbers)


def _pointer(context: Any, builder: Any, array_type: Any, place: Any, kind: Any) -> Any:
    """Pointer to a vector that begins at array[row, column]. `place` is (array, row, column), without negative
    indexes."""
    array, row, column = place
    view = context.make_array(array_type)(context, builder, array)
    row_bytes = cgutils.unpack_tuple(builder, view.strides)[0]
    element_bytes = _I64(array_type.dtype.bitwidth // 8)
    begin = builder.add(builder.mul(row, row_bytes), builder.mul(column, element_bytes))
    return builder.inttoptr(builder.add(builder.ptrtoint(view.data, _I64), begin), kind.as_pointer())


def _is_rows(array: Any, *indexes: Any) -> bool:
    return isinstance(array, types.Array) and array.ndim == 2 and array.layout == "C" and set(indexes) == {types.int64}


def _load(lanes: _LanesType, array: Any, row: Any, column: Any) -> Any:
    if not _is_rows(array, row, column) or array.dtype not in _WEIGHTS:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        kind = lanes.numbers if dtype == types.float32 else lanes.of(_I16)
        loaded = builder.load(_pointer(context, builder, sig.args[0], args, kind), align=dtype.bitwidth // 8)
        if dtype == types.float32:
            return loaded
        if dtype == types.uint16:
            return builder.fpext(builder.bitcast(loaded, lanes.of(ir.HalfType())), lanes.numbers)
        words = builder.zext(loaded, lanes.of(_I32))
        return builder.bitcast(builder.shl(words, _all(words, 16)), lanes.numbers)

    return lanes(array, row, column), codegen


@intrinsic
def load_lanes(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 16] as float32. `array` is C-contiguous, in one of the three formats of weights."""
    return _load(_lanes, array, row, column)


@intrinsic
def load_wide(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Load 64 weights; see `load_lanes`."""
    return _load(_wide, array, row, column)


@intrinsic
def store_lanes(typingctx: Any, array: Any, row: Any, column: Any, x: Any) -> Any:
    """array[row, column : column + len(x)] = x, in the array's format, rounded to nearest, ties to even."""
    if not _is_rows(array, row, column) or array.dtype not in _WEIGHTS or not isinstance(x, _LanesType):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, stored, lanes = sig.args[0].dtype, args[3], sig.args[3]
        halves = lanes.of(_I16)
        if dtype == types.uint16:
            stored = builder.bitcast(builder.fptrunc(stored, lanes.of(ir.HalfType())), halves)
        elif dtype == types.int16:
            bits = builder.bitcast(stored, lanes.of(_I32))
            odd = builder.and_(builder.lshr(bits, _all(bits, 16)), _all(bits, 1))
            rounded = builder.add(builder.add(bits, _all(bits, 0x7FFF)), odd)
            rounded = builder.trunc(builder.lshr(rounded, _all(bits, 16)), halves)
            nan = builder.fcmp_unordered("uno", stored, stored)
            stored = builder.select(nan, halves([0x7FC0] * lanes.count), rounded)
        pointer = _pointer(context, builder, sig.args[0], args[:3], stored.type)
        builder.store(stored, pointer, align=dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, row, column, x), codegen


@intrinsic
def move_lanes(typingctx: Any, to: Any, to_row: Any, to_column: Any, array: Any, row: Any, column: Any) -> Any:
    """to[to_row, to_column : to_column + 16] = array[row, column : column + 16], bit for bit; both have one dtype."""
    if not _is_rows(to, to_row, to_column, row, column) or not _is_rows(array, row) or to.dtype != array.dtype:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = sig.args[0].dtype.bitwidth
        kind = ir.VectorType(ir.IntType(bits), LANES)
        moved = builder.load(_pointer(context, builder, sig.args[3], args[3:], kind), align=bits // 8)
        builder.store(moved, _pointer(context, builder, sig.args[0], args[:3], kind), align=bits // 8)
        return context.get_dummy_value()

    return types.void(to, to_row, to_column, array, row, column), codegen


@intrinsic
def stream_lanes(typingctx: Any, to: Any, to_row: Any, to_column: Any, array: Any, row: Any, column: Any) -> Any:
    """`move_lanes` with a non-temporal store: the CPU does not read the target's cache line first. The target must be
    aligned, as `bypasses_caches` checks. A loop that calls this function ends with `end_stream`."""
    if not _is_rows(to, to_row, to_column, row, column) or not _is_rows(array, row) or to.dtype != array.dtype:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = sig.args[0].dtype.bitwidth
        kind = ir.VectorType(ir.IntType(bits), LANES)
        moved = builder.load(_pointer(context, builder, sig.args[3], args[3:], kind), align=bits // 8)
        store = builder.store(moved, _pointer(context, builder, sig.args[0], args[:3], kind), align=LANES * bits // 8)
        store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(to, to_row, to_column, array, row, column), codegen


@intrinsic
def end_stream(typingctx: Any) -> Any:
    """Make all writes of `stream_lanes` visible to other threads before any later write."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def bypasses_caches(array_NX: np.ndarray) -> bool:
    """True if these rows are aligned and larger than a core's caches: then non-temporal instructions write them."""
    if array_NX.nbytes < _STREAM_MIN:  # This test comes first, since reading the address takes microseconds.
        return False
    return array_NX.ctypes.data % _LINE_BYTES == 0 and array_NX.strides[0] % _LINE_BYTES == 0


def copy_lanes(to: Any, to_row: Any, to_column: Any, array: Any, row: Any, column: Any) -> None:
    """Copy lanes between arrays of weights: rounded if their formats differ, otherwise bit for bit."""
    raise TypeError("copy_lanes is for compiled loops")


@no_type_check  # see oneemb.kernels.jit_code
def _copy_lanes(to, to_row, to_column, array, row, column):
    if to.dtype == array.dtype:
        return lambda to, to_row, to_column, array, row, column: move_lanes(
            to, to_row, to_column, array, row, column
        )  # fmt: skip
    return lambda to, to_row, to_column, array, row, column: store_lanes(
        to, to_row, to_column, load_lanes(array, row, column)
    )


overload(copy_lanes, inline="always")(_copy_lanes)


@intrinsic
def load_bytes(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Load array[row, column : column + 16] of uint8, each number converted to float32."""
    if not _is_rows(array, row, column) or array.dtype != types.uint8:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, sig.args[0], args, _lanes.of(_I8))
        return builder.sitofp(builder.zext(builder.load(pointer, align=1), _lanes.of(_I32)), _lanes.numbers)

    return _lanes(array, row, column), codegen


def _load_parts(bits: int, array: Any, row: Any, column: Any) -> Any:
    """Load 16 numbers of `bits` bits each; the first number of a byte is in its lowest bits."""
    if not _is_rows(array, row, column) or array.dtype != types.uint8:
        return None
    each = 8 // bits  # numbers of a byte

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        some, words = ir.VectorType(_I8, LANES // each), _lanes.of(_I32)
        loaded = builder.load(_pointer(context, builder, sig.args[0], args, some), align=1)
        repeated = words([i // each for i in range(LANES)])
        all_parts = builder.zext(builder.shuffle_vector(loaded, some(ir.Undefined), repeated), words)
        shifts = words([bits * i for i in range(each)] * (LANES // each))
        parts = builder.and_(builder.lshr(all_parts, shifts), words([(1 << bits) - 1] * LANES))
        return builder.sitofp(parts, _lanes.numbers)

    return _lanes(array, row, column), codegen


@intrinsic
def load_nibbles(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 8] of uint8 as 16 float32: the lower half of a byte, then its upper half."""
    return _load_parts(4, array, row, column)


@intrinsic
def load_pairs(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 4] of uint8 as 16 float32: each byte is four numbers of 2 bits, the lowest first."""
    return _load_parts(2, array, row, column)


@intrinsic
def float_within(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 4] of uint8, read as the 4 bytes of one float32."""
    if not _is_rows(array, row, column) or array.dtype != types.uint8:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, sig.args[0], args, ir.FloatType()), align=1)

    return types.float32(array, row, column), codegen


@intrinsic
def half_within(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """array[row, column : column + 2] of uint8, read as the 2 bytes of one float16; returned as float32."""
    if not _is_rows(array, row, column) or array.dtype != types.uint8:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.load(_pointer(context, builder, sig.args[0], args, _I16), align=1)
        return builder.fpext(builder.bitcast(half, ir.HalfType()), ir.FloatType())

    return types.float32(array, row, column), codegen


def _all(like: Any, number: Any) -> Any:
    """Vector of the type of `like` whose elements all are one constant."""
    return like.type([number] * like.type.count)


def _same(builder: Any, lanes: Any, number: Any) -> Any:
    first = builder.insert_element(lanes.numbers(ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(first, lanes.numbers(ir.Undefined), lanes.of(_I32)([0] * lanes.count))


@intrinsic
def same_lanes(typingctx: Any, number: Any) -> Any:
    """A vector of this float32, 16 times."""
    if number != types.float32:
        return None
    return _lanes(number), lambda context, builder, sig, args: _same(builder, _lanes, args[0])


@intrinsic
def same_wide(typingctx: Any, number: Any) -> Any:
    """A wide vector of this float32, 64 times."""
    if number != types.float32:
        return None
    return _wide(number), lambda context, builder, sig, args: _same(builder, _wide, args[0])


@intrinsic
def multiply_add(typingctx: Any, x: Any, y: Any, sum: Any) -> Any:
    """sum + x * y, rounded once. y is a float32; x and sum are both lanes or both float32."""
    if y != types.float32 or x != sum or not (x == y or isinstance(x, _LanesType)):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, y, sum = args
        name = "llvm.fma.f32"
        if isinstance(sig.args[0], _LanesType):
            y, name = _same(builder, sig.args[0], y), f"llvm.fma.v{sig.args[0].count}f32"
        function_type = ir.FunctionType(x.type, [x.type] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [x, y, sum])

    return x(x, y, sum), codegen


@intrinsic
def sum_lanes(typingctx: Any, x: Any) -> Any:
    """The sum of all lanes, by halves: lanes 8 to 15 are added to lanes 0 to 7, then lanes 4 to 7 to lanes 0 to 3,
    ..."""
    if x != _lanes:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
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


def _operator(function: Callable[..., Any], instruction: str) -> None:
    @intrinsic
    def of_lanes(typingctx: Any, x: Any, y: Any) -> Any:
        lanes = x if isinstance(x, _LanesType) else y

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            both = [
                _same(builder, lanes, number) if kind == types.float32 else number
                for number, kind in zip(args, sig.args, strict=True)
            ]
            return getattr(builder, instruction)(*both)

        return lanes(x, y), codegen

    @overload(function, inline="always")
    @no_type_check  # see oneemb.kernels.jit_code
    def of_kinds(x, y):
        vector = x if isinstance(x, _LanesType) else y
        if isinstance(vector, _LanesType) and {x, y} <= {vector, types.float32}:
            return lambda x, y: of_lanes(x, y)
        return None


for _function, _instruction in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"),
):  # fmt: skip
    _operator(_function, _instruction)
