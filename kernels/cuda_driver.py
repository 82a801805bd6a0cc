"""Calls of NVIDIA's driver: loads compiled loops and launches them. Only the driver itself must be installed.

A launch takes its arguments in one buffer, in which they lie as in a C structure; the driver has copied the buffer when
`launch` returns. Loops run in torch's context of their device (the "primary" one), whatever the context of the calling
thread: threads of autograd and of users may have none, or that of another GPU, and keep theirs. Loops that are launched
together are one call of compiled code, without the interpreter lock: a signal handler runs before or after it.
"""

import ctypes
import functools
import struct
import threading
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from oneemb.kernels.cuda_arguments import Packer, Signature, first_places, have_words, refiller_of
from oneemb.kernels.jit import cpu
from oneemb.kernels.jit_code import call_at, word_at

ARGUMENTS_BYTES_MAX = 4096
"""Bytes of arguments that the driver takes."""

# Of `extra` of cuLaunchKernel: CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END.
_POINTER, _SIZE, _END = 1, 2, 0
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR

UNSUPPORTED = {200: "an invalid image", 209: "no code for this GPU", 218: "invalid PTX", 222: "PTX of a later version"}
"""Errors for code that another form of the same loop may not have."""


class DriverError(RuntimeError):
    """An error of the driver; `code` is its number."""

    def __init__(self, doing: str, code: int):
        super().__init__(f"{doing}: {_text_of(code)}")
        self.code = code


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver. OSError if there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return driver


def driver_version() -> int:
    """The latest CUDA that the driver knows, 13000 for 13.0; 0 where there is no driver."""
    version = ctypes.c_int()
    try:
        return version.value if _driver().cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
    except OSError:
        return 0


def _text_of(code: int) -> str:
    texts = []
    for call in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        getattr(_driver(), call)(code, ctypes.byref(text))
        texts.append((text.value or b"unknown").decode())
    return f"{texts[0]} ({code}): {texts[1]}"


def _checked(doing: str, code: int) -> None:
    if code != 0:
        raise DriverError(doing, code)


def capabilities() -> set[tuple[int, int]]:
    """Compute capabilities of the GPUs that this process may use; empty if there is none, or no driver."""
    if driver_version() == 0 or _driver().cuInit(0) != 0:
        return set()
    count = ctypes.c_int()
    _checked("cannot count GPUs", _driver().cuDeviceGetCount(ctypes.byref(count)))
    found = set()
    for index in range(count.value):
        device = ctypes.c_int()
        _checked(f"cannot find GPU {index}", _driver().cuDeviceGet(ctypes.byref(device), index))
        found.add(_capability_of(device))
    return found


def _capability_of(device: ctypes.c_int) -> tuple[int, int]:
    numbers = []
    for attribute in _COMPUTE_CAPABILITY:
        number = ctypes.c_int()
        code = _driver().cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        _checked("cannot read the compute capability", code)
        numbers.append(number.value)
    return numbers[0], numbers[1]


# Words of a launch: handle of its function, blocks, threads of a block in x and y, bytes of arguments, address of the
# next launch, 0 = none; a place for the context of the calling thread; and the five words of `extra`.
_LAUNCH = struct.Struct("@6q")
_FUNCTION, _BLOCKS, _THREADS_X, _THREADS_Y, _BYTES, _NEXT, _BEFORE, _EXTRA = range(8)
_WORDS = _EXTRA + 5

# Words of a device: its context, and addresses of functions of the driver.
_CONTEXT, _GET_CURRENT, _SET_CURRENT, _LAUNCH_KERNEL = range(4)


@cpu
def launch_loops(launch: Any, stream: Any, device: Any) -> int:
    """Launch a loop and those that come next, in the context of the device, and set back the context of the thread.

    Args:
        launch, device: addresses of words, as above; 0 = no launch.
        stream: the stream's handle.

    Returns:
        0, or the code of an error in the lowest 32 bits, and above them the number of loops that were launched before;
        if these are all, the context could not be set back.
    """
    if launch == 0:
        return 0
    code = call_at(word_at(device, _GET_CURRENT), (launch + 8 * _BEFORE,))
    if code != 0:
        return code
    before, context, done = word_at(launch, _BEFORE), word_at(device, _CONTEXT), 0
    if before != context:
        code = call_at(word_at(device, _SET_CURRENT), (context,))
    while code == 0 and launch != 0:
        function, blocks = word_at(launch, _FUNCTION), word_at(launch, _BLOCKS)
        threads_x, threads_y = word_at(launch, _THREADS_X), word_at(launch, _THREADS_Y)
        # Arguments of cuLaunchKernel: function, grid, block, bytes of shared memory, stream, parameters, extra.
        code = call_at(
            word_at(device, _LAUNCH_KERNEL),
            (function, blocks, 1, 1, threads_x, threads_y, 1, 0, stream, 0, launch + 8 * _EXTRA),
        )
        launch = word_at(launch, _NEXT)
        done += code == 0
    if before != context:
        set_back = call_at(word_at(device, _SET_CURRENT), (before,))
        code = set_back if code == 0 else code
    return code | done << 32 if code != 0 else 0


def compile_launches() -> None:
    """Compile `launch_loops`, or load its compiled code."""
    launch_loops(0, 0, 0)


class Arguments:
    """The buffer of one launch, and the launch's words."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(ARGUMENTS_BYTES_MAX)
        self.words = (ctypes.c_int64 * _WORDS)()
        self.address = ctypes.addressof(self.words)
        size_at = self.address + 8 * _BYTES
        self.words[_EXTRA:] = [_POINTER, ctypes.addressof(self.buffer), _SIZE, size_at, _END]


class _FreeArguments(threading.local):
    """Buffers of a thread that no launch of it uses. A launch may come in the middle of another on the same thread,
    from a finalizer or a signal handler, and takes a buffer of its own."""

    def __init__(self) -> None:
        self.free: list[Arguments] = []
        self.repeated: dict[Any, Repeated | None] = {}
        """{key: launch that the thread may repeat; None = it was made once}."""


arguments = _FreeArguments()


class Repeated:
    """Launches that may be made again, one after the other, with other addresses and numbers: each keeps its buffer."""

    def __init__(self, launched: "Sequence[Launched]", args: Sequence[tuple]):
        self.launched, self.count = launched, len(launched)
        self.is_busy = False
        """Whether a launch is filling the buffers. Another launch of the thread may come in its middle."""
        self.words: tuple[Any, ...] | None = None
        """Words of tensors whose addresses the buffers have, as `refill` notes them."""
        self.address = launched[0].own.address
        signatures = tuple(one.kernel.signature for one in launched)
        refiller, forms = refiller_of(signatures, tuple(map(have_words, args)), first_places(args))
        views = tuple(
            memoryview(one.own.buffer).cast("B").cast(form)  # type: ignore[call-overload]  # of any format
            for one, forms_of_loop in zip(launched, forms, strict=True)
            for form in forms_of_loop
        )
        # The views are default values of its arguments, so that a call need not pass them.
        self.refill = types.FunctionType(refiller.__code__, refiller.__globals__, argdefs=views)


class Kernel(NamedTuple):
    """A loaded loop."""

    name: str
    function: int
    """The driver's handle."""
    pack: Packer
    bytes: int
    """Size of its arguments."""
    signature: Signature


class Launched:
    """A launch of a loop, after others, with the buffer of its arguments. `grid`: number of blocks, threads of a block
    in x and y."""

    def __init__(self, kernel: Kernel, own: Arguments, grid: tuple[int, int, int], after: "Sequence[Launched]"):
        self.kernel, self.own, self.grid = kernel, own, grid
        _LAUNCH.pack_into(own.words, 0, kernel.function, *grid, kernel.bytes, 0)
        if after:
            after[-1].own.words[_NEXT] = own.address


class Device:
    """A GPU of this process by its number, and torch's context of it."""

    def __init__(self, index: int):
        driver, context, device = _driver(), ctypes.c_void_p(), ctypes.c_int()
        doing = f"cannot use GPU {index}"
        _checked(doing, driver.cuInit(0))
        _checked(doing, driver.cuDeviceGet(ctypes.byref(device), index))
        # Held for the life of the process, as torch does.
        _checked(doing, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        assert context.value
        self.context = context.value
        self.capability = _capability_of(device)
        functions = driver.cuCtxGetCurrent, driver.cuCtxSetCurrent, driver.cuLaunchKernel
        addresses = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        self._words = (ctypes.c_int64 * 4)(self.context, *addresses)
        self.address = ctypes.addressof(self._words)

    def load(self, name: str, image: bytes, entry: str) -> int:
        """Handle of the function `entry` of compiled code: a cubin, or PTX, which the driver compiles.

        Raises:
            DriverError: the driver does not take the code; `code` may be one of `UNSUPPORTED`.
        """
        driver, doing = _driver(), f"cannot load {name} on the GPU"
        before, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        _checked(doing, driver.cuCtxGetCurrent(ctypes.byref(before)))
        _checked(doing, driver.cuCtxSetCurrent(self.context))
        # Of a thread that captures a CUDA graph the driver would refuse what may allocate memory.
        _checked(doing, driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        try:
            _checked(doing, driver.cuModuleLoadData(ctypes.byref(module), image))  # PTX ends with a zero byte.
            _checked(doing, driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            driver.cuCtxSetCurrent(before)
        assert function.value
        return function.value

    def launch(self, launches: Sequence[Launched], stream: int) -> None:
        """Launch loops on a stream, given by its handle: the first one, and those that were made after it.

        Raises:
            DriverError: a launch failed, or one before it on this device. Loops after it are not launched.
        """
        if failed := launch_loops(launches[0].own.address, stream, self.address):
            raise self.error_of(launches, failed)

    def error_of(self, launches: Sequence[Launched], failed: int) -> DriverError:
        """The error of launches for which `launch_loops` has returned `failed`."""
        launched, code = failed >> 32, failed & 0xFFFFFFFF
        if launched == len(launches):
            return DriverError("cannot set back the CUDA context of the thread after a launch", code)
        one = launches[launched]
        blocks, *threads = one.grid
        return DriverError(
            f"cannot launch {one.kernel.name} on {blocks} x {tuple(threads)} threads, or a launch before it has failed",
            code,
        )
