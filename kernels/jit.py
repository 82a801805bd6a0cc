"""Decorators for rules and loops, and the few instructions Python lacks.

With jit_lanes, vectors for CPU loops, and jit_cuda, this is all that imports numba.

A **rule** is a scalar function that holds arithmetic (an optimizer step, a hash, a random draw). It has no
signature, so that a loop of any backend may call it. A **CPU loop** moves data: it takes its range of work
`begin, end` first and is called through `oneemb.kernels.threads.Threads`, without the interpreter lock.

A **CUDA loop** is one thread's work of a launch, written against numba's `cuda` module under that name, and is
launched by `oneemb.kernels.launch`. Nothing of CUDA is imported before the first launch: `oneemb.kernels.jit_cuda`
then gives the names below that are marked so their meaning, on a GPU or in numba's simulator.

Weights narrower than 32 bits have no arithmetic of their own on CPUs, and numba has no bfloat16 at all. Their
bits travel in integer arrays, and the array's dtype says how to read them:

    float32  ->  float32 weights        uint16  ->  float16 bits        int16  ->  bfloat16 bits

`to_float32` reads a weight of any of the three and `from_float32` rounds to nearest even for storing.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.ir as ir
import numba
import numpy as np
from numba import types
from numba.core import caching, cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

__all__ = [
    "CudaLoop", "around_compiling", "compiling", "cpu", "cuda", "external", "float_bits", "from_float32",
    "get_ready_to_compile", "keep_rolled", "lanes_mixed", "load", "move",
    "mul_high", "natural", "prefetch", "prefetch_row", "prefetch_word", "rule", "set_word", "store", "to_float32",
    "uint_as_float", "word_at",
]  # fmt: skip

# Bytes of a line of the cache.
_LINE_BYTES = 64

# No fastmath: the same numbers on every run. error_model="numpy": a division makes inf or nan, as in torch,
# instead of a Python exception in the middle of a loop.
_OPTIONS = dict(nogil=True, error_model="numpy", fastmath=False)


# Who compiles a loop, or loads one that was compiled, holds this lock of numba's.
compiling = global_compiler_lock


class Compiling:
    """What is done around a compilation, by whoever knows of signals: numba keeps its lock for ever where an interrupt
    comes within it. storage/turns.py sets it."""

    def __init__(self) -> None:
        self.begin: Callable[[], None] = lambda: None
        self.end: Callable[[], None] = lambda: None


around_compiling = Compiling()


def get_ready_to_compile() -> None:
    """Let numba look at functions of Python now, before any is replaced: it knows them by what they are."""
    around_compiling.begin()
    try:
        with compiling._lock:  # which several threads may ask for at once
            cpu_target.target_context.refresh()
            cpu_target.typing_context.refresh()
    finally:
        around_compiling.end()


def rule(function):
    """Compile a scalar function that loops may call. Its types are those of its arguments."""
    return _cached(numba.njit(function, **_OPTIONS))


def cpu(function):
    """Compile a CPU loop: one core's share of the work, run without the interpreter lock."""
    return _cached(numba.njit(function, **_OPTIONS))


def part(function):
    """Compile a piece of CPU loops into each loop that calls it. Arrays are costly to pass: nothing is called here."""
    return _cached(numba.njit(function, forceinline=True, **_OPTIONS))


def external(name: str, result: str, arguments: list[str]) -> Any:
    """A function of the C library that loops may call. Types are numba's names; `int32*` is a pointer to int32."""

    def of(type_name: str) -> Any:
        return types.CPointer(of(type_name[:-1])) if type_name.endswith("*") else getattr(types, type_name)

    return types.ExternalFunction(name, of(result)(*map(of, arguments)))


class CudaLoop:
    """A CUDA loop, or a function that CUDA loops call, as its author wrote it; jit_cuda compiles it when it first runs.

    `loop.at(V=4)` is the loop with the global name V, and that of each function it calls, bound to 4: a constant of
    the compiled code. A constant may be a rule.
    """

    def __init__(self, function: Any, *, inner: bool = False, constants: tuple[tuple[str, Any], ...] = ()):
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.function = function
        self.inner = inner
        self.constants = constants
        self._variants: dict[tuple[tuple[str, Any], ...], CudaLoop] = {}

    def at(self, **constants: Any) -> "CudaLoop":
        """The same loop with these names bound to constants. Equal constants give the same object."""
        key = tuple(sorted({**dict(self.constants), **constants}.items()))
        if key not in self._variants:
            self._variants[key] = CudaLoop(self.function, inner=self.inner, constants=key)
        return self._variants[key]


class _Cuda:
    """`@cuda` marks a CUDA loop, `@cuda.inner` a function that CUDA loops call. In their bodies `cuda` is numba's."""

    def __call__(self, function: Any) -> CudaLoop:
        return CudaLoop(function)

    def inner(self, function: Any) -> CudaLoop:
        return CudaLoop(function, inner=True)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.{name} has a meaning in CUDA loops only")


cuda: Any = _Cuda()


def load(out_V, array, row, column):
    """In CUDA loops: out_V[i] = to_float32(array[row, column + i]) for V weights, 16 bytes at a time where V > 1."""
    raise TypeError("load is for CUDA loops")


def store(array, row, column, in_V):
    """In CUDA loops: array[row, column + i] = from_float32(in_V[i]) for V weights, 16 bytes at a time where V > 1."""
    raise TypeError("store is for CUDA loops")


def move(to, to_row, to_column, array, row, column):
    """In CUDA loops: copy V elements' bits between arrays of one dtype, 16 bytes at a time where V > 1."""
    raise TypeError("move is for CUDA loops")


@functools.cache
def _sources_digest() -> str:
    """Stands for all that compiled code depends on: every kernel's source, and the compiler."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


class _Locator(caching._CacheLocator):
    """Keeps compiled code in the user's cache folder, under the digest of all kernels.

    numba's own locators look at the file of the loop alone and would go on using a loop whose rule, in another file,
    has changed. Ours also serves an install that cannot be written to, and the same version installed anew.
    """

    def __init__(self, function, file):
        self._name = f"{Path(file).stem}-{function.__code__.co_firstlineno}"

    def get_cache_path(self):
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return os.path.join(root, "oneemb", "kernels", _sources_digest())

    def get_source_stamp(self):
        return _sources_digest()

    def get_disambiguator(self):
        return self._name

    @classmethod
    def from_function(cls, function, file):
        locator = cls(function, file)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]


class _Cache(caching.FunctionCache):
    _impl_class = _CacheImpl


def _cached(dispatcher):
    """Let the dispatcher keep its compiled code in a file; without a folder to write to, only in memory."""
    try:
        dispatcher._cache = _Cache(dispatcher.py_func)
    except (AttributeError, RuntimeError):  # jit is switched off; no locator found a folder
        pass
    compile_for_args = getattr(dispatcher, "_compile_for_args", None)
    if compile_for_args is not None:

        def compile_whole(*args, **kwargs):
            around_compiling.begin()
            try:
                return compile_for_args(*args, **kwargs)
            finally:
                around_compiling.end()

        dispatcher._compile_for_args = compile_whole
    return dispatcher


@intrinsic
def float_bits(typingctx, x):
    """The 32 bits of a float32 as a uint32."""
    if x != types.float32:
        return None
    return types.uint32(x), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def uint_as_float(typingctx, x):
    """The float32 whose 32 bits are this uint32."""
    if x != types.uint32:
        return None
    return types.float32(x), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _half_to_float(typingctx, x):
    def codegen(context, builder, sig, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx, x):
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def mul_high(typingctx, x, y):
    """The high 64 bits of the 128-bit product of two uint64."""
    if x != types.uint64 or y != types.uint64:
        return None

    def codegen(context, builder, sig, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(x, y), codegen


# Four 64-bit products in one instruction. Without it, vectors would be slower than one number after the other.
_WIDE_PRODUCTS = llvmlite.binding.get_host_cpu_features().get("avx512dq", False)


@intrinsic
def lanes_mixed(typingctx, word_X, begin, end, lanes, before, bits, after):
    """Four lanes after word_X[begin:end], 4 words at a time, each lane one of them:

        lane = rotate_left(lane + word * before, bits) * after

    All numbers are uint64; `lanes` is a tuple of four, and so is the result.
    """
    u64 = types.uint64
    wanted = (u64, u64, types.UniTuple(u64, 4), u64, u64, u64)
    if (begin, end, lanes, before, bits, after) != wanted or word_X.dtype != u64:
        return None

    def codegen(context, builder, sig, args):
        i64 = ir.IntType(64)
        words = context.make_array(sig.args[0])(context, builder, args[0]).data
        begin, end, lanes, *number_3 = args[1:]
        lane_4 = cgutils.unpack_tuple(builder, lanes, 4)
        width = 4 if _WIDE_PRODUCTS else 1  # lanes in one register
        kind = ir.VectorType(i64, width) if width > 1 else i64

        def together(numbers):
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
def natural(x):
    """x, which is not below zero, as an index. Of any other one, numba asks first whether it counts from the end."""
    return np.uint64(x)


@intrinsic
def keep_rolled(typingctx):
    """Inside a loop: keeps LLVM from unrolling it.

    Of a loop that makes a few turns, each time another number of them, unrolling leaves over several short ones, whose
    branches no processor foresees.
    """

    def codegen(context, builder, sig, args):
        # No instruction at all. What is convergent may not be made to depend on more conditions than it does.
        nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "", side_effect=True)
        builder.call(nothing, []).attributes.add("convergent")
        return context.get_dummy_value()

    return types.void(), codegen


def _prefetch(builder, address, level):
    """Ask the cache of this level, 1 or 2, for the line at an address, an integer."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    i32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, i32(0), i32(4 - level), i32(1)])


@intrinsic
def prefetch(typingctx, array, index):
    """Ask the first cache for `array[index]` of a 1-D array, which will be read soon."""

    def codegen(context, builder, sig, args):
        array_type, index_type = sig.args
        view = context.make_array(array_type)(context, builder, args[0])
        (stride,) = cgutils.unpack_tuple(builder, view.strides, 1)
        place = context.cast(builder, args[1], index_type, types.intp)
        _prefetch(builder, builder.add(builder.ptrtoint(view.data, stride.type), builder.mul(place, stride)), 1)
        return context.get_dummy_value()

    return types.void(array, index), codegen


@intrinsic
def prefetch_row(typingctx, array, row, column, columns):
    """Ask the second cache for `array[row, column : column + columns]` of a C-contiguous 2-D array, to be read soon.

    For every line of it: the processor's own prefetcher starts too late for a short run. And for no nearer cache: the
    first one can wait for few lines at once, fewer than the rows on their way have.
    """

    def codegen(context, builder, sig, args):
        array_type = sig.args[0]
        view = context.make_array(array_type)(context, builder, args[0])
        row_bytes = cgutils.unpack_tuple(builder, view.strides)[0]
        word = row_bytes.type
        row, column, columns = (
            context.cast(builder, given, kind, types.intp) for given, kind in zip(args[1:], sig.args[1:], strict=True)
        )
        element_bytes = word(array_type.dtype.bitwidth // 8)
        begin = builder.add(builder.ptrtoint(view.data, word), builder.mul(row, row_bytes))
        begin = builder.add(begin, builder.mul(column, element_bytes))
        size = builder.mul(columns, element_bytes)
        with cgutils.for_range_slice(builder, word(0), size, word(_LINE_BYTES), intp=word) as (offset, _):
            _prefetch(builder, builder.add(begin, offset), 2)
        # The last line once more, unless the row begins in the middle of one.
        _prefetch(builder, builder.add(begin, builder.sub(size, word(1))), 2)
        return context.get_dummy_value()

    return types.void(array, row, column, columns), codegen


def _word_pointer(builder, address, index):
    place = builder.add(address, builder.mul(index, ir.IntType(64)(8)))
    return builder.inttoptr(place, ir.IntType(64).as_pointer())


@intrinsic
def word_at(typingctx, address, index):
    """The int64 that lies `index` words after an address: memory of arrays that are too many to pass to a loop."""

    def codegen(context, builder, sig, args):
        return builder.load(_word_pointer(builder, *args))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def set_word(typingctx, address, index, word):
    """Write the int64 that lies `index` words after an address."""

    def codegen(context, builder, sig, args):
        builder.store(args[2], _word_pointer(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch_word(typingctx, address, index):
    """Ask the first cache for the word that lies `index` words after an address."""

    def codegen(context, builder, sig, args):
        _prefetch(builder, builder.ptrtoint(_word_pointer(builder, *args), ir.IntType(64)), 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def to_float32(x):
    """The float32 value of a stored weight: exact for each of the three formats."""
    raise TypeError("to_float32 is for compiled loops")


def from_float32(x, like):
    """The stored form of a float32, in the format of `like`; rounds to nearest, ties to even."""
    raise TypeError("from_float32 is for compiled loops")


@overload(to_float32, inline="always")
def _to_float32(x):
    if x == types.float32:
        return lambda x: x
    if x == types.uint16:
        return lambda x: _half_to_float(x)
    if x == types.int16:
        return lambda x: uint_as_float(np.uint32(np.uint32(np.uint16(x)) << np.uint32(16)))
    return None


@overload(from_float32, inline="always")
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
