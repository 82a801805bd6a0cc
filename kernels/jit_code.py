"""Instructions that Python lacks, for rules and CPU loops: memory by address, prefetches, bits of numbers.

CPUs have no arithmetic for weights narrower than 32 bits, and numba has no bfloat16. Their bits are kept in integer
arrays, and the array's dtype says how to read them:

    float32  ->  float32 weights        uint16  ->  float16 bits        int16  ->  bfloat16 bits

`to_float32` reads a weight of any of the three and `from_float32` rounds to nearest even for storing.

numba runs functions marked `intrinsic` while it compiles their caller, with numba's types and LLVM's values. Neither
have type hints, hence `Any`.
"""

from typing import Any, no_type_check

import llvmlite
import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from oneemb.kernels.jit import Number, rule

# Bytes of a line of the cache.
_LINE_BYTES = 64


@intrinsic
def float_bits(typingctx: Any, x: Any) -> Any:
    """The 32 bits of a float32 as a uint32, or the 64 of a float64 as a uint64."""
    if x == types.float64:
        return types.uint64(x), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(64))
    if x != types.float32:
        return None
    return types.uint32(x), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def uint_as_float(typingctx: Any, x: Any) -> Any:
    """The float32 whose 32 bits are this uint32, or the float64 whose 64 are this uint64."""
    if x == types.uint64:
        return types.float64(x), lambda context, builder, sig, args: builder.bitcast(args[0], ir.DoubleType())
    if x != types.uint32:
        return None
    return types.float32(x), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _half_to_float(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def mul_high(typingctx: Any, x: Any, y: Any) -> Any:
    """The high 64 bits of the 128-bit product of two uint64."""
    if x != types.uint64 or y != types.uint64:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(x, y), codegen


# Whether the CPU has four 64-bit products in one instruction. Without it vectors are slower than single numbers.
_WIDE_PRODUCTS = llvmlite.binding.get_host_cpu_features().get("avx512dq", False)


@intrinsic
def lanes_mixed(
    typingctx: Any, word_X: Any, begin: Any, end: Any, lanes: Any, before: Any, bits: Any, after: Any
) -> Any:
    """Four lanes after word_X[begin:end], 4 words at a time, each lane one of them:

        lane = rotate_left(lane + word * before, bits) * after

    All numbers are uint64; `lanes` is a tuple of four, and so is the result.
    """
    u64 = types.uint64
    wanted = (u64, u64, types.UniTuple(u64, 4), u64, u64, u64)
    if (begin, end, lanes, before, bits, after) != wanted or word_X.dtype != u64:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        words = context.make_array(sig.args[0])(context, builder, args[0]).data
        begin, end, lanes, *number_3 = args[1:]
        lane_4 = cgutils.unpack_tuple(builder, lanes, 4)
        width = 4 if _WIDE_PRODUCTS else 1  # lanes in one register
        kind = ir.VectorType(i64, width) if width > 1 else i64

        def together(numbers: Any) -> Any:
            if width == 1:
                return numbers[0]
            vector = ir.Constant(kind, ir.Undefined)
            for i in range(width):
                vector = builder.insert_element(vector, numbers[i], ir.IntType(32)(i))
            return vector

        before, bits, after = (together([number] * width) for number in number_3)
        rest = builder.sub(together([i64(64)] * width), bits)
        start = [together(lane_4[i : i + width]) for i in range(0, 4, width)]
        entry = builder.block
        head, body, leave = (builder.append_basic_block(name) for name in ("lanes", "lanes.body", "lanes.end"))
        builder.branch(head)
        builder.position_at_end(head)
        x = builder.phi(i64)
        x.add_incoming(begin, entry)
        now = [builder.phi(kind) for _ in start]
        for phi, value in zip(now, start, strict=True):
            phi.add_incoming(value, entry)
        builder.cbranch(builder.icmp_unsigned("<", x, end), body, leave)
        builder.position_at_end(body)
        for i, phi in enumerate(now):
            place = builder.gep(words, [builder.add(x, i64(i * width))])
            word = builder.load(builder.bitcast(place, kind.as_pointer()), align=8)
            mixed = builder.add(phi, builder.mul(word, before))
            turned = builder.or_(builder.shl(mixed, bits), builder.lshr(mixed, rest))
            phi.add_incoming(builder.mul(turned, after), body)
        x.add_incoming(builder.add(x, i64(4)), body)
        builder.branch(head)
        builder.position_at_end(leave)
        if width > 1:
            now = [builder.extract_element(now[0], ir.IntType(32)(i)) for i in range(width)]
        return cgutils.pack_array(builder, now)

    return types.UniTuple(u64, 4)(word_X, *wanted), codegen


@rule
def natural(x: Number) -> Number:
    """x, which must not be negative, as an index. For a signed index numba adds a test for counting from the end."""
    return np.uint64(x)


@intrinsic
def keep_rolled(typingctx: Any) -> Any:
    """Inside a loop: keeps LLVM from unrolling it.

    A loop that makes few turns, each time another number of them, would become several short loops whose branches no
    processor predicts.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # An empty instruction. LLVM must not make convergent code depend on more conditions, so it does not unroll.
        nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "", side_effect=True)
        builder.call(nothing, []).attributes.add("convergent")
        return context.get_dummy_value()

    return types.void(), codegen


def _prefetch(builder: Any, address: Any, level: Any) -> None:
    """Prefetch the line at an address, an integer, into the cache of this level, 1 or 2."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    i32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, i32(0), i32(4 - level), i32(1)])


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetch `array[index]` of a 1-D array into the first-level cache."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array_type, index_type = sig.args
        view = context.make_array(array_type)(context, builder, args[0])
        (stride,) = cgutils.unpack_tuple(builder, view.strides, 1)
        place = context.cast(builder, args[1], index_type, types.intp)
        _prefetch(builder, builder.add(builder.ptrtoint(view.data, stride.type), builder.mul(place, stride)), 1)
        return context.get_dummy_value()

    return types.void(array, index), codegen


@intrinsic
def prefetch_row(typingctx: Any, array: Any, row: Any, column: Any, columns: Any) -> Any:
    """Prefetch `array[row, column : column + columns]` of a C-contiguous 2-D array into the second-level cache.

    Every line of it, since the processor's own prefetcher starts too late for a short run. Into the second level, since
    the first one can wait for few lines at once, fewer than the prefetched rows have.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array_type = sig.args[0]
        view = context.make_array(array_type)(context, builder, args[0])
        row_bytes = cgutils.unpack_tuple(builder, view.strides)[0]
        word = row_bytes.type
        row, column, columns = (
            context.cast(builder, value, kind, types.intp) for value, kind in zip(args[1:], sig.args[1:], strict=True)
        )
        element_bytes = word(array_type.dtype.bitwidth // 8)
        begin = builder.add(builder.ptrtoint(view.data, word), builder.mul(row, row_bytes))
        begin = builder.add(begin, builder.mul(column, element_bytes))
        size = builder.mul(columns, element_bytes)
        with cgutils.for_range_slice(builder, word(0), size, word(_LINE_BYTES), intp=word) as (offset, _):
            _prefetch(builder, builder.add(begin, offset), 2)
        # The last line is another one if the row begins in the middle of a line; else it is prefetched twice.
        _prefetch(builder, builder.add(begin, builder.sub(size, word(1))), 2)
        return context.get_dummy_value()

    return types.void(array, row, column, columns), codegen


def _word_pointer(builder: Any, address: Any, index: Any) -> Any:
    place = builder.add(address, builder.mul(index, ir.IntType(64)(8)))
    return builder.inttoptr(place, ir.IntType(64).as_pointer())


@intrinsic
def word_at(typingctx: Any, address: Any, index: Any) -> Any:
    """The int64 `index` words after an address: for arrays that are too many to be arguments of a loop."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_word_pointer(builder, *args))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def set_word(typingctx: Any, address: Any, index: Any, word: Any) -> Any:
    """Write the int64 `index` words after an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _word_pointer(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def call_at(typingctx: Any, address: Any, arguments: Any) -> Any:
    """Call the C function at an address, with a tuple of integers, and return its result, an int32. Each argument is
    passed as 64 bits, of which a function that takes fewer reads the lowest."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * len(arguments))
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.sext(builder.call(function, cgutils.unpack_tuple(builder, args[1])), ir.IntType(64))

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@intrinsic
def prefetch_word(typingctx: Any, address: Any, index: Any) -> Any:
    """Prefetch the word `index` words after an address into the first-level cache."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _prefetch(builder, builder.ptrtoint(_word_pointer(builder, *args), ir.IntType(64)), 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def end_of_line(typingctx: Any, address: Any, c: Any, id: Any, high: Any, low_bits: Any) -> Any:
    """Place in a line of four cells (id, word), the cells c to c + 3 after an address, at which a search ends: 0 to 3.

    That is the first cell whose id is this one and whose word is `high` above its `low_bits` lowest bits, or whose word
    is 0; 4 = none. The line is one vector, and its address a multiple of 64.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address, c, id, high, low_bits = args
        i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        words = ir.VectorType(i64, 8)

        def in_turn(even: Any, odd: Any) -> Any:
            two = builder.insert_element(words(ir.Undefined), even, i32(0))
            two = builder.insert_element(two, odd, i32(1))
            return builder.shuffle_vector(two, words(ir.Undefined), ir.VectorType(i32, 8)([0, 1] * 4))

        pointer = builder.inttoptr(builder.add(address, builder.mul(c, i64(16))), words.as_pointer())
        line = builder.load(pointer, align=_LINE_BYTES)
        shifted = builder.lshr(line, in_turn(i64(0), low_bits))
        equal = builder.bitcast(builder.icmp_unsigned("==", shifted, in_turn(id, high)), i8)
        empty = builder.bitcast(builder.icmp_unsigned("==", line, words([0] * 8)), i8)
        # Bit 2 k is of the id of cell k, bit 2 k + 1 of its word; bit 9 stands for cell 4.
        ends = builder.and_(builder.or_(builder.and_(equal, builder.shl(equal, i8(1))), empty), i8(0xAA))
        first = builder.cttz(builder.or_(builder.zext(ends, i64), i64(1 << 9)), ir.IntType(1)(1))
        return builder.lshr(first, i64(1))

    return types.int64(*[types.int64] * 5), codegen


@intrinsic
def half_at(typingctx: Any, address: Any, index: Any) -> Any:
    """The unsigned 16-bit number `index` numbers after an address, as an int64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.load(_half_pointer(builder, *args)), ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def set_half(typingctx: Any, address: Any, index: Any, half: Any) -> Any:
    """Write the low 16 bits of an int64 `index` 16-bit numbers after an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[2], ir.IntType(16)), _half_pointer(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _half_pointer(builder: Any, address: Any, index: Any) -> Any:
    place = builder.add(address, builder.mul(index, ir.IntType(64)(2)))
    return builder.inttoptr(place, ir.IntType(16).as_pointer())


@intrinsic
def equal_of_line(typingctx: Any, address: Any, mask: Any, bits: Any) -> Any:
    """Number of the first of six int64 at an address whose bits under `mask` are `bits`: 0 to 5; 6 = none. The address
    is a multiple of 64; the 64 bytes from there on are read."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        words = ir.VectorType(i64, 8)

        def everywhere(number: Any) -> Any:
            one = builder.insert_element(words(ir.Undefined), number, i32(0))
            return builder.shuffle_vector(one, words(ir.Undefined), ir.VectorType(i32, 8)([0] * 8))

        line = builder.load(builder.inttoptr(args[0], words.as_pointer()), align=_LINE_BYTES)
        equal = builder.icmp_unsigned("==", builder.and_(line, everywhere(args[1])), everywhere(args[2]))
        first = builder.or_(builder.and_(builder.bitcast(equal, i8), i8(0x3F)), i8(0x40))
        return builder.cttz(builder.zext(first, i64), ir.IntType(1)(1))

    return types.int64(*[types.int64] * 3), codegen


def to_float32(x: Number) -> Number:
    """The float32 value of a stored weight: exact for each of the three formats."""
    raise TypeError("to_float32 is for compiled loops")


def from_float32(x: Number, like: Number) -> Number:
    """The stored form of a float32, in the format of `like`; rounds to nearest, ties to even."""
    raise TypeError("from_float32 is for compiled loops")


def as_stored(x: Number, like: Number) -> Number:
    """A stored weight in the format of `like`: its very bits where that is its own."""
    raise TypeError("as_stored is for compiled loops")


# Without type hints, here and below: numba compares this signature, hints and all, with those of the lambdas.
@overload(to_float32, inline="always")
@no_type_check
def _to_float32(x):
    if x == types.float32:
        return lambda x: x
    if x == types.uint16:
        return lambda x: _half_to_float(x)
    if x == types.int16:
        return lambda x: uint_as_float(np.uint32(np.uint32(np.uint16(x)) << np.uint32(16)))
    return None


@overload(from_float32, inline="always")
@no_type_check
def _from_float32(x, like):
    if like == types.float32:
        return lambda x, like: x
    if like == types.uint16:
        return lambda x, like: _float_to_half(x)
    if like == types.int16:

        def to_bfloat16(x, like):
            bits = float_bits(x)
            if x != x:
                return np.int16(0x7FC0)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.int16(np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)))

        return to_bfloat16
    return None


@no_type_check
def _as_stored(x, like):
    if x == like:
        return lambda x, like: x
    return lambda x, like: from_float32(to_float32(x), like)


overload(as_stored, inline="always")(_as_stored)
