"""Compiles CUDA loops: for a GPU, for numba's simulator, or for a GPU that is not in this machine.

Imported at the first launch only. With NUMBA_ENABLE_CUDASIM=1 numba runs a loop as Python, with a thread of the machine
for each CUDA thread, and `load`, `store` and the like are Python functions; rules stay compiled, so the simulator and
the CPU compute with the same machine code.

Invariants:
- rules on integers agree with the CPU bit for bit;
- rules with +, -, *, / and sqrt agree with the CPU bit for bit: products are not contracted with sums, which libNVVM
  does by default, and sqrt and division are the correctly rounded ones;
- rules that call log or pow differ from the CPU by the libraries' difference in float64, at most 2 ulp of it.
"""

import contextlib
import contextvars
import functools
import importlib.metadata
import importlib.util
import types as python_types
from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba import cuda, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from oneemb.kernels import jit, jit_code
from oneemb.kernels.cuda_arguments import Signature, dimensions
from oneemb.kernels.jit import SIMULATED, CudaLoop, Number

COMPILES = not SIMULATED and importlib.util.find_spec("numba_cuda") is not None
"""Whether loops can be compiled. numba.cuda alone proves nothing: numba has an older one without the package."""

_plain = contextvars.ContextVar("_plain", default=False)


@contextlib.contextmanager
def without_contraction() -> Iterator[None]:
    """Compile inside without contraction: a product and a sum are rounded one after the other.

    Loops are compiled with `lto=False`: a linker that is given LTO-IR contracts, whatever libNVVM was told.
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


if COMPILES:
    from numba.cuda.cudadrv import nvvm

    _compile_ir = nvvm.compile_ir

    def _compile_ir_plain(llvmir: Any, **options: Any) -> Any:
        # numba-cuda has no option for this, but libNVVM has. Kernels of other packages keep its default.
        if _plain.get():
            options.setdefault("fma", False)
        return _compile_ir(llvmir, **options)

    nvvm.compile_ir = _compile_ir_plain


def simulated_array(array: np.ndarray) -> Any:
    """A host array as the simulator's device array, on the same memory."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(array)


# ---- binding names -----------------------------------------------------------------------------------------------


@functools.cache
def bound(loop: CudaLoop, constants: tuple[tuple[str, Any], ...]) -> Any:
    """The loop's function with its global names bound to constants and to what they mean on this device."""
    function = loop.function
    names = dict(function.__globals__)
    of = dict(constants)
    width = of.get("V", 1)
    meaning = {
        id(jit.cuda): _simulated_cuda if SIMULATED else cuda,
        id(jit.load): _load(width),
        id(jit.store): _store(width),
        id(jit.move): _move(width),
        id(jit.pair): _pair,
        id(jit_code.to_float32): _to_float32,
        id(jit_code.from_float32): _from_float32,
    }
    for name in _names_in(function.__code__):
        value = of.get(name, names.get(name))
        if isinstance(value, CudaLoop):
            value = _device_function(value, constants)
        elif id(value) in meaning:
            value = meaning[id(value)]
        elif SIMULATED and isinstance(value, numba.core.registry.CPUDispatcher):
            value = simulated_rule(value)
        if name in of or name in names:
            names[name] = value
    clone = python_types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    clone.__module__, clone.__qualname__ = function.__module__, function.__qualname__
    return clone


def _names_in(code: python_types.CodeType) -> set[str]:
    inside = [const for const in code.co_consts if isinstance(const, python_types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inside))


@functools.cache
def _device_function(loop: CudaLoop, constants: tuple[tuple[str, Any], ...]) -> Any:
    constants = tuple(sorted({**dict(constants), **dict(loop.constants)}.items()))
    function = bound(loop, constants)
    return function if SIMULATED else cuda.jit(device=True, lto=False)(function)


@functools.cache
def kernel_of(loop: CudaLoop) -> Any:
    """numba's form of a loop, launched by kernel[grid, block](*arrays): in the simulator, and for comparison."""
    function = bound(loop, loop.constants)
    return cuda.jit(function) if SIMULATED else cuda.jit(function, lto=False)


def compile_ptx(loop: CudaLoop, signature: Signature, compute_capability: tuple[int, int]) -> str:
    """The loop as PTX for a GPU that need not be in this machine."""
    from numba.cuda import dispatcher

    # Compiling a rule asks the current device for its compute capability, even if one is given.
    device = python_types.SimpleNamespace(compute_capability=compute_capability)
    jit.around_compiling.begin()
    try:
        with jit.compiling:  # `dispatcher` is that of all threads.
            current, dispatcher.get_current_device = dispatcher.get_current_device, lambda: device
            try:
                with without_contraction():
                    ptx, _ = cuda.compile(
                        bound(loop, loop.constants), numba_types(signature), device=False, abi="numba",
                        cc=compute_capability, output="ptx",
                    )  # fmt: skip
            finally:
                dispatcher.get_current_device = current
    finally:
        jit.around_compiling.end()
    return ptx


def link(ptx: str, compute_capability: tuple[int, int]) -> bytes:
    """PTX as a cubin, the code of one kind of GPU, by the toolkit's linker."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch="sm_{}{}".format(*compute_capability))
    return bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)


def numba_types(signature: Signature) -> tuple:
    """numba's types of a signature."""
    return tuple(_numba_type(kind) for kind in signature)


def _numba_type(kind: Any) -> Any:
    from numba.cuda import types as cuda_types

    if isinstance(kind, tuple):
        return cuda_types.BaseTuple.from_types(numba_types(kind))
    dtype, ndim = dimensions(kind)
    element = cuda_types.boolean if dtype == "bool" else getattr(cuda_types, dtype)
    return element if ndim is None else cuda_types.Array(element, ndim, "C")


@functools.cache
def tools() -> str:
    """Versions of all that compiles loops.

    Raises:
        ImportError: the linker is older than the compiler, whose code it would not take.
    """
    from cuda.bindings import nvjitlink, nvvm

    compiler, linker = _version("nvidia-nvvm"), nvjitlink.version()
    if compiler != "-" and linker < tuple(map(int, compiler.split(".")[:2])):
        raise ImportError(
            f"nvidia-nvvm {compiler} compiles what nvidia-nvjitlink {linker[0]}.{linker[1]} cannot link; run: pip"
            f" install 'nvidia-nvvm=={linker[0]}.{linker[1]}.*', or install an nvidia-nvjitlink that is not older"
        )
    names = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc")
    versions = [f"{name} {_version(name)}" for name in names]
    return ", ".join([*versions, f"libNVVM {nvvm.version()} {nvvm.ir_version()}", f"nvJitLink {nvjitlink.version()}"])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


# ---- in the simulator --------------------------------------------------------------------------------------------


class _SimulatedCuda:
    """numba's `cuda` in the simulator, for the threads of the running launch."""

    def __getattr__(self, name: str) -> Any:
        from numba.cuda.simulator import kernel

        return getattr(kernel._get_kernel_context(), name)


_simulated_cuda = _SimulatedCuda()


@functools.cache
def simulated_rule(dispatcher: Any) -> Any:
    """A rule that loops in Python can call: takes the simulator's arrays, and returns numbers of NumPy's types.

    Compiled functions return Python's numbers: a float32 would become a float64 at its next use.
    """
    known: dict[tuple[type, ...], Any] = {}  # what becomes of the result, by the types of scalars

    def call(*args: Any) -> Any:
        args = tuple(getattr(getattr(arg, "_item", arg), "_ary", arg) for arg in args)
        result = dispatcher(*args)
        kinds = tuple(map(type, args))
        cast = known.get(kinds)
        if cast is None:
            cast = _cast_of_result(dispatcher, args)
            if all(issubclass(kind, (np.generic, float)) for kind in kinds):
                known[kinds] = cast
        return cast(result)

    return call


_CASTS: dict[Any, Any] = {
    types.float32: np.float32, types.float64: np.float64, types.uint64: np.uint64, types.int64: np.int64,
    types.uint32: np.uint32, types.int32: np.int32, types.uint16: np.uint16, types.int16: np.int16,
}  # fmt: skip


def _cast_of_result(dispatcher: Any, args: tuple[Any, ...]) -> Any:
    """The function that gives the result of a rule, called with `args`, its NumPy type."""
    kinds = tuple(map(numba.typeof, args))
    with global_compiler_lock:  # A compiled rule can be called a moment before it is listed.
        overloads = dict(dispatcher.overloads)
    resolved = overloads.get(kinds)
    if resolved is None:
        resolved = next(iter(overloads.values())) if len(overloads) == 1 else None
    assert resolved is not None, f"{dispatcher.py_func.__name__} has no version for {kinds}"
    kind = resolved.signature.return_type
    if not isinstance(kind, types.BaseTuple):
        return _CASTS.get(kind, _same)
    casts = [_CASTS.get(part_kind, _same) for part_kind in kind]
    return lambda result: tuple(cast(part) for cast, part in zip(casts, result, strict=True))


def _same(x: Any) -> Any:
    return x


@jit.rule
def _weight_to_float(x: Number) -> Number:
    return jit_code.to_float32(x)


@jit.rule
def _weight_from_float(x: Number, like: Number) -> Number:
    return jit_code.from_float32(x, like)


# ---- weights of any format -----------------------------------------------------------------------------------------


if SIMULATED:
    # Float32 stays as it is: a call of a compiled rule takes longer than all else that a thread does for a weight.
    _widen, _narrow = simulated_rule(_weight_to_float), simulated_rule(_weight_from_float)

    def _to_float32(x: Any) -> Any:
        return x if type(x) is np.float32 else _widen(x)

    def _from_float32(x: Any, like: Any) -> Any:
        return x if type(x) is type(like) is np.float32 else _narrow(x, like)

else:

    @intrinsic
    def _to_float32(typingctx: Any, x: Any) -> Any:
        """jit_code.to_float32, as instructions."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _widened(builder, args[0], sig.args[0])

        return types.float32(x), codegen

    @intrinsic
    def _from_float32(typingctx: Any, x: Any, like: Any) -> Any:
        """jit_code.from_float32, as instructions."""

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _narrowed(builder, args[0], sig.args[1])

        return like(types.float32, like), codegen


def _widened(builder: Any, value: Any, kind: Any) -> Any:
    if kind == types.float32:
        return value
    if kind == types.uint16:
        return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
    assert kind == types.int16
    return builder.bitcast(builder.shl(builder.zext(value, _WORD), _WORD(16)), ir.FloatType())


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    if kind == types.float32:
        return value
    if kind == types.uint16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    assert kind == types.int16
    word, short = ir.IntType(32), ir.IntType(16)
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.trunc(builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16)), short)
    return builder.select(builder.fcmp_unordered("uno", value, value), short(0x7FC0), rounded)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any, element: Any) -> Any:
    """The address of array[row, column], an argument of the loop, as a pointer to `element` in global memory: the
    processor need not find out which memory an address is of."""
    view = context.make_array(kind)(context, builder, array)
    stride = cgutils.unpack_tuple(builder, view.strides, kind.ndim)
    offset = builder.add(builder.mul(row, stride[0]), builder.mul(column, stride[1]))
    place = builder.add(builder.ptrtoint(view.data, stride[0].type), offset)
    return builder.inttoptr(place, element.as_pointer(_GLOBAL))


_GLOBAL = 1  # NVVM's address space
_WORD = ir.IntType(32)
_WIDE = ir.VectorType(_WORD, 4)  # vectors of 16-bit elements would be moved 8 bytes at a time


def _load_bits(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any, width: int) -> Any:
    """The bits of `width` elements of array[row, column:] as integers of their size; several are read 16 bytes at a
    time."""
    bits = kind.dtype.bitwidth
    element = ir.IntType(bits)
    if width == 1:
        return [builder.load(_pointer(context, builder, kind, array, row, column, element), align=bits // 8)]
    found = []
    for first in range(0, width, 128 // bits):
        at = builder.add(column, column.type(first))
        wide = builder.load(_pointer(context, builder, kind, array, row, at, _WIDE), align=16)
        for i in range(4):
            word = builder.extract_element(wide, _WORD(i))
            found += [builder.trunc(builder.lshr(word, _WORD(at)), element) if bits < 32 else word
                      for at in range(0, 32, bits)]  # fmt: skip
    return found


def _store_bits(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any, values: Any) -> None:
    """The reverse of `_load_bits`."""
    bits = kind.dtype.bitwidth
    if len(values) == 1:
        pointer = _pointer(context, builder, kind, array, row, column, ir.IntType(bits))
        builder.store(values[0], pointer, align=bits // 8)
        return
    a_word = 32 // bits
    for first in range(0, len(values), 4 * a_word):
        wide = ir.Constant(_WIDE, ir.Undefined)
        for i in range(4):
            parts = values[first + i * a_word : first + (i + 1) * a_word]
            word = parts[0]
            if bits < 32:
                low, high = (builder.zext(part, _WORD) for part in parts)
                word = builder.or_(low, builder.shl(high, _WORD(16)))
            wide = builder.insert_element(wide, word, _WORD(i))
        at = builder.add(column, column.type(first))
        builder.store(wide, _pointer(context, builder, kind, array, row, at, _WIDE), align=16)


def _simulated_load(width: int) -> Any:
    def load(out_V: Any, array: Any, row: Any, column: Any) -> None:
        for i in range(width):
            out_V[i] = _to_float32(array[row, column + i])

    return load


@functools.cache
def _load(width: int) -> Any:
    if SIMULATED:
        return _simulated_load(width)

    @intrinsic
    def load(typingctx: Any, out_V: Any, array: Any, row: Any, column: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            out = context.make_array(sig.args[0])(context, builder, args[0])
            row, column = (context.cast(builder, args[i], sig.args[i], types.intp) for i in (2, 3))
            kind = sig.args[1]
            for i, bits in enumerate(_load_bits(context, builder, kind, args[1], row, column, width)):
                if kind.dtype == types.float32:
                    bits = builder.bitcast(bits, ir.FloatType())
                builder.store(_widened(builder, bits, kind.dtype), builder.gep(out.data, [_WORD(i)]))
            return context.get_dummy_value()

        return types.void(out_V, array, row, column), codegen

    return load


def _simulated_store(width: int) -> Any:
    def store(array: Any, row: Any, column: Any, in_V: Any) -> None:
        for i in range(width):
            array[row, column + i] = _from_float32(np.float32(in_V[i]), array[row, column + i])

    return store


@functools.cache
def _store(width: int) -> Any:
    if SIMULATED:
        return _simulated_store(width)

    @intrinsic
    def store(typingctx: Any, array: Any, row: Any, column: Any, in_V: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            source = context.make_array(sig.args[3])(context, builder, args[3])
            row, column = (context.cast(builder, args[i], sig.args[i], types.intp) for i in (1, 2))
            kind, values = sig.args[0], []
            for i in range(width):
                bits = _narrowed(builder, builder.load(builder.gep(source.data, [_WORD(i)])), kind.dtype)
                values.append(builder.bitcast(bits, _WORD) if kind.dtype == types.float32 else bits)
            _store_bits(context, builder, kind, args[0], row, column, values)
            return context.get_dummy_value()

        return types.void(array, row, column, in_V), codegen

    return store


def _simulated_move(width: int) -> Any:
    def move(to: Any, to_row: Any, to_column: Any, array: Any, row: Any, column: Any) -> None:
        for i in range(width):
            to[to_row, to_column + i] = array[row, column + i]

    return move


@functools.cache
def _move(width: int) -> Any:
    if SIMULATED:
        return _simulated_move(width)

    @intrinsic
    def move(typingctx: Any, to: Any, to_row: Any, to_column: Any, array: Any, row: Any, column: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            assert sig.args[0].dtype == sig.args[3].dtype
            to_row, to_column, row, column = (
                context.cast(builder, args[i], sig.args[i], types.intp) for i in (1, 2, 4, 5)
            )
            values = _load_bits(context, builder, sig.args[3], args[3], row, column, width)
            _store_bits(context, builder, sig.args[0], args[0], to_row, to_column, values)
            return context.get_dummy_value()

        return types.void(to, to_row, to_column, array, row, column), codegen

    return move


def _simulated_pair(array: Any, row: Any) -> Any:
    return array[row, 0], array[row, 1]


@intrinsic
def _pair_at_once(typingctx: Any, array: Any, row: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        row = context.cast(builder, args[1], sig.args[1], types.intp)
        pointer = _pointer(context, builder, sig.args[0], args[0], row, row.type(0), ir.VectorType(ir.IntType(64), 2))
        wide = builder.load(pointer, align=16)
        return context.make_tuple(builder, sig.return_type, [builder.extract_element(wide, _WORD(i)) for i in range(2)])

    return types.UniTuple(array.dtype, 2)(array, row), codegen


_pair = _simulated_pair if SIMULATED else _pair_at_once
