"""Launches CUDA loops on torch's tensors: on the current stream of their device, without copies.

In numba's simulator (NUMBA_ENABLE_CUDASIM=1) "the device" is the host's memory, and a launch runs the loop as Python,
so that every loop can be tested on a machine without a GPU.

Most launches of a step repeat those of the step before with other arrays of the same shapes. A caller that can say
what decides the shapes passes it as `shapes`: then the thread's next launch with the same loop, sizes and `shapes`
takes the buffer of the one before and writes only addresses and numbers. A launch made once keeps nothing; a buffer
holds no array. Loops that follow each other are repeated together (`Gpu.run_in_turn`).

Invariants: a loop covers its range for any shape of the launch, since each of its threads advances by the size of the
whole grid; no result depends on that shape; and launches with the same loop, sizes and `shapes` have arrays of the same
shapes and dtypes, which tests/support/launched_types.py checks in every test of tests/cuda.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from oneemb.kernels import cuda_code, cuda_driver
from oneemb.kernels.arrays import BLOCK_MAX
from oneemb.kernels.cuda_arguments import have_words, layout_of, packer_of, signature_of, with_words
from oneemb.kernels.cuda_driver import Kernel, Launched, Repeated, launch_loops
from oneemb.kernels.extras import missing
from oneemb.kernels.jit import SIMULATED, CudaLoop

# Threads of a block. In the simulator each is a thread of the machine that lives for one block.
_BLOCK = 8 if SIMULATED else BLOCK_MAX
BLOCK_BITS = _BLOCK.bit_length() - 1
_BLOCKS_MAX = 3 if SIMULATED else 1 << 16

SHARES_MAX = 4 if SIMULATED else 1 << 10
"""Blocks of a loop of `run_shares`, at most."""

SHARES_OF_THREAD = -(-SHARES_MAX // _BLOCK)
"""Shares for each thread of a block that looks at all shares."""

# Bytes of an array up to which it goes to the device by way of page-locked memory, without a wait.
_PAGE_LOCKED_MAX = 1 << 22

# Number of small arrays that are made at a time.
_SMALL = 256

# Launches that a thread may repeat, at most.
_REPEATED_MAX = 1024

_DRIVER_MIN = 13000  # CUDA 13.0 in cuDriverGetVersion's form, which compiled loops need


Grid = tuple[int, int, int]
"""Number of blocks, and number of threads of a block in x and y."""

Told = tuple[torch.Tensor, "memoryview[int]"]
"""Memory of `Gpu.told`: for the device, and for the host."""

Loops = Sequence[tuple[CudaLoop, Grid]]
"""Loops, with the grid of each."""

outside_inference_mode = torch.inference_mode(False)
"""Decorator of functions that make tensors for later calls too: torch refuses to write into a tensor of its inference
mode outside of that mode."""


class _OfThread(threading.local):
    """Arrays of one thread."""

    def __init__(self) -> None:
        self.scratch: dict[int, dict[Any, Any]] = {}
        """{stream: `Gpu.scratch`}"""
        self.filled: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        """{(stream, size, value): results to come of `Gpu.filled`}"""


class Gpu:
    """One device, as loops see it; torch's name of it is ignored in the simulator.

    Attributes:
        device: where the tensors of loops live: the GPU, or in the simulator the CPU.
        launches, waits: loops launched so far, and how often a host thread has waited for the device: for numbers from
            it, or for a copy from or to memory of the host that is not page-locked.

    Raises:
        RuntimeError: PyTorch has no CUDA, there is no GPU or its driver is too old; the message says what to install.
        ImportError: numba-cuda is not installed, and no loops came with oneemb.
    """

    device: torch.device

    def __init__(self, device: torch.device | str = "cuda"):
        if not SIMULATED:
            _check_cuda()
        self._begin(torch.device("cpu") if SIMULATED else torch.device(device))
        if SIMULATED:
            return
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.init()
        self._open(self.device.index, torch._C._cuda_getCurrentRawStream)

    def _begin(self, device: torch.device) -> None:
        """Set what needs no driver."""
        self.device = device
        self.launches = self.waits = 0
        self._buffers = _OfThread()
        self._none: dict[tuple[torch.dtype, int | None], torch.Tensor] = {}
        self._nothing: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._told: dict[int, list[Told]] = {}
        """{number of numbers: free memory}"""
        self._told_of_all: list[torch.Tensor] = []
        """All memory of `told`, free or not."""
        self.stream_now: Callable[[], int] = int  # which returns 0
        """Returns the handle of the current stream."""

    def _open(self, index: int, stream_of: Callable[[int], int]) -> None:
        """Let loops be launched on GPU `index`, each on the stream whose handle `stream_of` returns."""
        self._driver = cuda_driver.Device(index)
        self.stream_now = functools.partial(stream_of, index)
        self._kernels: dict[CudaLoop, list[Kernel]] = {}
        self._loading = threading.RLock()

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, not initialized."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def full(self, *shape: int, value: int | float, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, filled with a value."""
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, prepared for launches that take it each time, which are then quicker. It must keep its
        memory."""
        return tensor if SIMULATED else with_words(tensor)

    def none(self, dtype: torch.dtype, columns: int | None = None) -> torch.Tensor:
        """The tensor of this dtype without elements: of shape [0], or [0, columns]."""
        found: torch.Tensor | None = self._none.get((dtype, columns))
        if found is None:
            with torch.inference_mode(False):
                shape = (0,) if columns is None else (0, columns)
                found = self.kept(torch.empty(shape, dtype=dtype, device=self.device))
            self._none[dtype, columns] = found
        return found

    def nothing(self, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tensors without elements: int64 [0], float32 [0], float32 [0, columns] and bool [0]."""
        found = self._nothing.get(columns)
        if found is None:
            of_rows, dtypes = self.none(torch.float32, columns), (torch.int64, torch.float32, torch.bool)
            numbers, factors, bits = map(self.none, dtypes)
            found = self._nothing[columns] = numbers, factors, of_rows, bits
        return found

    def filled(self, size: int, value: int = 0) -> torch.Tensor:
        """A few int64 numbers on the device, for this caller alone. Memory is filled for many calls at a time."""
        key = self.stream_now(), size, value
        filled = self._buffers.filled
        try:
            return filled[key].pop()
        except (KeyError, IndexError):
            with torch.inference_mode(False):
                many = torch.full((_SMALL, size), value, dtype=torch.int64, device=self.device)
            first, *others = many.unbind()
            filled[key] = others
            return first

    @property
    def scratch(self) -> dict[Any, Any]:
        """Arrays that calls of the current thread use again on the current stream, by name: another stream would not
        wait until they are free, and another thread might launch loops between those of a call."""
        stream, kept = self.stream_now(), self._buffers.scratch
        found = kept.get(stream)
        if found is None:
            found = kept[stream] = {}
        return found

    def told(self, size: int) -> Told:
        """Memory for numbers that a loop tells the host; see oneemb.kernels.later. Allocated for many at a time."""
        free = self._told.setdefault(size, [])
        while True:
            try:
                memory = free.pop()
                memory[1][size] = 0
                return memory
            except IndexError:
                with torch.inference_mode(False):
                    on_gpu = self.device.type == "cuda"
                    many = torch.zeros(_SMALL, size + 1, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
                    self._told_of_all.append(many)
                    free += [(one, one.numpy().data) for one in many.unbind()]

    def give_back(self, memory: Told) -> None:
        """Let memory of `told` be used again: no loop writes it any more."""
        self._told[len(memory[1]) - 1].append(memory)

    def free_bytes(self) -> int:
        """Bytes of device memory that can still be allocated."""
        if SIMULATED:
            return 1 << 24
        held_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + held_bytes

    def put(self, array: np.ndarray) -> torch.Tensor:
        """A copy of an array on the device. The host waits for a large one."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda" and 0 < source.nbytes <= _PAGE_LOCKED_MAX:
            # torch keeps the page-locked memory from others until the copy has ended.
            return source.pin_memory().to(self.device, non_blocking=True, copy=True)
        self.waits += source.nbytes > _PAGE_LOCKED_MAX
        return source.to(self.device, copy=True)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy of a tensor on the host, which waits until the current stream has computed it."""
        self.waits += 1
        return tensor.cpu().numpy()

    def read(self, tensor: torch.Tensor) -> list[Any]:
        """The values of a small tensor, int64 or float64. The host waits until the current stream has computed them."""
        self.waits += 1
        if self.device.type != "cuda":
            return tensor.reshape(-1).tolist()
        name = str(tensor.dtype)
        buffer = getattr(self._buffers, name, None)
        if buffer is None or len(buffer) < tensor.numel():
            with torch.inference_mode(False):
                buffer = torch.empty(max(64, tensor.numel()), dtype=tensor.dtype, pin_memory=True, device="cpu")
            setattr(self._buffers, name, buffer)  # one for each thread, so that no other writes it meanwhile
        found = buffer[: tensor.numel()].copy_(tensor.reshape(-1), non_blocking=True)
        torch.cuda.current_stream(self.device).record_event().synchronize()
        return found.tolist()

    def wait(self) -> None:
        """Wait for all work that was launched on the device, on any stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait_for(self, stream: int) -> None:
        """Wait for all work that was launched on a stream, given by its handle."""
        if self.device.type == "cuda":
            default = torch.cuda.default_stream(self.device)  # whose handle torch takes for none
            (torch.cuda.ExternalStream(stream, self.device) if stream else default).synchronize()

    # `shapes` of the calls below: a value that decides the shapes and dtypes of all arrays, and whether they are in C
    # order. None = nothing decides them, and the launch is never repeated.

    def run(self, loop: CudaLoop, size: int, *args: Any, shapes: Hashable = None) -> None:
        """Launch a loop in which each thread takes one of `size` items at a time."""
        if size > 0:
            shapes = None if shapes is None else (loop, size, shapes)
            self.run_in_turn(lambda: ((loop, self.grid(size)),), args, shapes=shapes)

    def grid(self, size: int) -> Grid:
        """Grid of a loop of `run`."""
        return min(-(-size // _BLOCK), _BLOCKS_MAX), _BLOCK, 1

    def run_rows(self, loop: CudaLoop, rows: int, columns: int, *args: Any, shapes: Hashable = None) -> None:
        """Launch a loop in which `threadIdx.x` of a group of threads shares one of `rows` rows at a time. A group has
        no more threads than a row has pieces, `columns`: a power of two up to 32."""
        if rows > 0:
            shapes = None if shapes is None else (loop, rows, columns, shapes)
            self.run_in_turn(lambda: ((loop, self.grid_of_rows(rows, columns)),), args, shapes=shapes)

    def grid_of_rows(self, rows: int, columns: int) -> Grid:
        """Grid of a loop of `run_rows`."""
        lanes = 1 << self.lane_bits(columns)
        groups = _BLOCK // lanes
        return min(-(-rows // groups), _BLOCKS_MAX), lanes, groups

    def lane_bits(self, columns: int) -> int:
        """Bits of the number of threads that share a row of so many pieces."""
        return min(5, _BLOCK.bit_length() - 2, max(0, columns - 1).bit_length())

    def shares(self, size: int) -> tuple[int, int]:
        """How a loop of `run_shares` divides items: number of blocks, and bits of the number of items of each thread.
        A block has 2 ** (bits + BLOCK_BITS) items, the last one perhaps fewer."""
        bits = max(0, (-(-size // SHARES_MAX) - 1).bit_length() - BLOCK_BITS)
        return -(-size >> bits + BLOCK_BITS), bits

    def run_shares(self, loop: CudaLoop, blocks: int, *args: Any, shapes: Hashable = None) -> None:
        """Launch a loop in which each of so many blocks takes consecutive items."""
        if blocks > 0:
            shapes = None if shapes is None else (loop, blocks, shapes)
            self.run_in_turn(lambda: ((loop, self.grid_of_shares(blocks)),), args, shapes=shapes)

    def grid_of_shares(self, blocks: int) -> Grid:
        """Grid of a loop of `run_shares`."""
        return blocks, _BLOCK, 1

    def run_in_turn(self, loops: Callable[[], Loops], *args: tuple, shapes: Hashable) -> None:
        """Launch several loops, one after the other, which costs the host less than a launch of each.

        Args:
            loops: makes the loops, with their grids; called unless the launch is repeated.
            args: arguments of each loop.
            shapes: a value that decides the loops and grids too.
        """
        key = None if shapes is None else (self, shapes)
        again = cuda_driver.arguments.repeated.get(key)
        if again is not None and not again.is_busy:
            try:
                again.is_busy = True
                if again.refill(args, again):
                    self.launches += again.count
                    # As in `Device.launch`, but with a call less.
                    if failed := launch_loops(again.address, self.stream_now(), self._driver.address):
                        raise self._driver.error_of(again.launched, failed)
                    return
            finally:
                again.is_busy = False
        self._launch(loops(), args, key)

    def _launch(self, loops: Loops, args: Sequence[tuple], key: Hashable = None) -> None:
        self.launches += len(loops)
        if SIMULATED:
            for (loop, (blocks, threads_x, threads_y)), args_of_loop in zip(loops, args, strict=True):
                _simulate(loop, blocks, (threads_x, threads_y), args_of_loop)
            return
        launched: list[Launched] = []
        try:
            for (loop, grid), args_of_loop in zip(loops, args, strict=True):
                launched.append(self._packed(loop, grid, args_of_loop, launched))
            # Made before the launch: an error, of memory for example, has launched nothing.
            again = Repeated(launched, args) if key is not None and self._is_second(key) else None
            self._driver.launch(launched, self.stream_now())
            if again is not None:
                cuda_driver.arguments.repeated[key], launched = again, []
        finally:
            cuda_driver.arguments.free += [one.own for one in launched]

    def _packed(self, loop: CudaLoop, grid: Grid, args: tuple, after: Sequence[Launched]) -> Launched:
        """A launch of a loop with these arguments, after others, still to be made."""
        free = cuda_driver.arguments.free
        try:
            own = free.pop()
        except IndexError:
            own = cuda_driver.Arguments()
        try:
            kernels = self._kernels.get(loop) or []
            for kernel in kernels:
                if kernel.pack(own.buffer, args):
                    if kernel is not kernels[0]:
                        self._try_first(loop, kernel)
                    break
            else:
                kernel = self._loaded(loop, args, own)
        except BaseException:
            free.append(own)
            raise
        return Launched(kernel, own, grid, after)

    def _is_second(self, key: Hashable) -> bool:
        """Whether this thread makes a launch with this key for the second time. Nothing is kept of the first one."""
        repeated = cuda_driver.arguments.repeated
        if key in repeated:
            return repeated[key] is None
        if len(repeated) >= _REPEATED_MAX:
            repeated.clear()
        repeated[key] = None
        return False

    def _try_first(self, loop: CudaLoop, kernel: Kernel) -> None:
        """Let the next launch of a loop try this form first."""
        with self._loading:
            self._kernels[loop] = [kernel, *(other for other in self._kernels[loop] if other is not kernel)]

    def _loaded(self, loop: CudaLoop, args: tuple, own: cuda_driver.Arguments) -> Kernel:
        """A loop for these arguments, which it has packed: compiled, or read from a file, at its first use."""
        with self._loading:
            known = self._kernels.get(loop, [])
            kernel = next((kernel for kernel in known if kernel.pack(own.buffer, args)), None)
            if kernel is None:
                kernel = self._load(loop, args, own, known)
                self._kernels[loop] = [*known, kernel]
        return kernel

    def _load(self, loop: CudaLoop, args: tuple, own: cuda_driver.Arguments, known: Sequence[Kernel]) -> Kernel:
        name = cuda_code.name_of(loop)
        try:
            signature = signature_of(args)
        except TypeError as error:
            raise TypeError(f"cannot launch {name}: {error}") from None
        packer, failure = packer_of(signature, have_words(args)), None
        for other in known:
            if other.signature == signature:  # It asks for other tensors with words.
                packed = packer(own.buffer, args)
                assert packed
                return other._replace(pack=packer)
        for image in cuda_code.images_of(loop, signature, self._driver.capability):
            try:
                function = self._driver.load(name, image.code, image.entry)
            except cuda_driver.DriverError as error:
                if error.code not in cuda_driver.UNSUPPORTED:
                    raise
                failure = error
                continue
            packed = packer(own.buffer, args)
            assert packed
            return Kernel(name, function, packer, layout_of(signature).size, signature)
        assert failure is not None
        raise failure


def _simulate(loop: CudaLoop, blocks: int, threads: tuple[int, int], args: tuple) -> None:
    from oneemb.kernels import jit_cuda

    def as_simulated(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(as_simulated, arg))
        if not isinstance(arg, torch.Tensor):
            return np.float32(arg) if type(arg) is float else arg
        assert arg.is_contiguous()
        return jit_cuda.simulated_array(arg.numpy())

    with _simulator:
        jit_cuda.kernel_of(loop)[blocks, threads](*map(as_simulated, args))


_simulator = threading.Lock()  # it runs one launch at a time
simulated_gpu: Gpu | None = None
"""In the simulator, the device to which CPU tensors belong; None = they belong to the CPU. Tests set it."""


def gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """The device on which loops can work on a tensor where it lies; None for the CPU."""
    if SIMULATED:
        return simulated_gpu
    return _gpu_at(tensor.device) if tensor.is_cuda else None


def gpu_at(device: torch.device) -> Gpu:
    """A GPU by torch's name of it: the same object for the same one. Raises as `Gpu`."""
    if SIMULATED:
        return simulated_gpu or Gpu(device)
    if device.index is None:
        return _gpu_at(Gpu(device).device)
    return _gpu_at(device)


@functools.cache
def _gpu_at(device: torch.device) -> Gpu:
    return Gpu(device)


def _check_cuda() -> None:
    if torch.version.cuda is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} is built without CUDA; install a build with CUDA 13, as pytorch.org says for"
            " your system, or keep the embedding on the CPU"
        )
    if not (cuda_code.PACKAGE_FOLDER.is_dir() or cuda_code.compiles()):
        raise missing("an embedding on a GPU", "numba-cuda", "cuda")
    version = cuda_driver.driver_version()
    if version < _DRIVER_MIN:
        has = f"the NVIDIA driver knows CUDA {version // 1000}.{version % 1000 // 10}" if version else "there is none"
        raise RuntimeError(
            "embeddings on a GPU need an NVIDIA driver that knows CUDA 13 (version 580 or later), and"
            f" {has}; install a newer one, or keep the embedding on the CPU"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "PyTorch finds no GPU that it can use (torch.cuda.is_available() is False); check nvidia-smi and"
            " CUDA_VISIBLE_DEVICES, or keep the embedding on the CPU"
        )
