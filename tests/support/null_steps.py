"""A process whose GPU does nothing: prints what the host does in a step and an eval lookup, one JSON object.

Its driver is that of null_gpu.build, first in LD_LIBRARY_PATH; it takes the folder for rows.
"""

import contextlib
import ctypes
import itertools
import json
import sys
import threading
import warnings

import torch
from null_gpu import NullDriver, NullGpu, make_default
from numba.cuda import dispatcher

import oneemb
from oneemb.kernels import cuda_driver, jit_cuda, launch
from oneemb.kernels.cuda_arguments import parameter_bytes, signature_of
from oneemb.kernels.slots_cuda import count_pinned_loop, release_loop

warnings.simplefilter("ignore")
TABLES, BATCH, DIM = 4, 64, 8
UNIQUE = 40


class Numba:
    """Arguments as numba-cuda packs them for a launch of its own."""

    extensions = ()
    prepare = dispatcher._Kernel._prepare_args

    def _prepare_args(self, *args):
        Numba.prepare(self, *args)

    def arguments(self, signature, args):
        values = []
        for kind, arg in zip(jit_cuda.numba_types(signature), args, strict=True):
            self._prepare_args(kind, Array(arg) if isinstance(arg, torch.Tensor) else arg, 0, [], values)
        packed = b""
        for size, value in zip(parameter_bytes(signature), values, strict=True):
            packed += bytes(-len(packed) % size)
            number = int(value).to_bytes(size, "little", signed=value < 0) if isinstance(value, int) else bytes(value)
            assert len(number) == size
            packed += number
        return packed


class Array:
    def __init__(self, tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": tensor.numpy().dtype.str, "data": (tensor.data_ptr(), False),
            "strides": None, "version": 3, "stream": None,
        }  # fmt: skip


def same_words(signature, args, ours, numbas):
    """Whether packed arguments are equal, but for strides of arrays with at most one row: they mean nothing."""
    if len(ours) != len(numbas):
        return False
    at, differ = 0, {at for at, (one, other) in enumerate(zip(ours, numbas, strict=True)) if one != other}
    for kind, arg in zip(signature, args, strict=True):
        if isinstance(kind, tuple):
            break  # the last one
        size = 40 + 16 * arg.dim() if isinstance(arg, torch.Tensor) else parameter_bytes([kind])[0]
        at += -at % min(size, 8)
        if isinstance(arg, torch.Tensor) and any(extent <= 1 for extent in arg.shape):
            differ -= set(range(at + 40 + 8 * arg.dim(), at + size))
        at += size
    return not differ


def is_of_launches(frame):
    """Whether a frame is that of a function in the files of launches."""
    name = frame.f_code.co_filename
    return name.endswith("kernels/launch.py") or "kernels/cuda_" in name or name == "<string>"


def python_calls(call):
    """Calls of functions in the files of launches."""
    found = []

    def note(frame, event, _):
        if event == "call" and is_of_launches(frame):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def main(folder):
    driver, gpu = NullDriver(), NullGpu(unique=UNIQUE)
    make_default(gpu)
    embedding = oneemb.MultiTableEmbedding(
        "null", DIM, torch.float32, torch.int64, [oneemb.make_table()] * TABLES,
        oneemb.make_device_mem_store_options(folder),
    )  # fmt: skip
    embedding.store.form.move_to(torch.device("cuda"))
    optimizer = oneemb.Optimizer(torch.optim.Adam([embedding.weight]), [embedding], check_in_step=False)
    ids, grad = torch.arange(BATCH * TABLES).reshape(BATCH, TABLES) % 10, torch.ones(BATCH, TABLES, DIM)
    many_ids, many_grads = ids.repeat(32, 1), grad.repeat(32, 1, 1)

    def step(ids=ids, grad=grad):
        embedding(ids).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        with torch.no_grad():
            embedding(ids)

    counted, compiled = {}, []
    compile_ptx = jit_cuda.compile_ptx
    jit_cuda.compile_ptx = lambda loop, *args: compiled.append(loop.__name__) or compile_ptx(loop, *args)
    driver.cuda.cuCtxSetCurrent(ctypes.c_void_p(gpu.context))  # as torch does

    def count(name, call):
        for _ in range(2):
            call()
        loops, wrong = [], []

        gpu.launched = comparing(driver, loops, wrong)
        call()
        gpu.launched = None
        before = gpu.launches, gpu.waits, driver.count("cuLaunchKernel"), driver.count()
        call()
        after = gpu.launches, gpu.waits, driver.count("cuLaunchKernel"), driver.count()
        keys = "launches", "waits", "launches of the driver", "calls of the driver"
        counted[name] = {key: now - then for key, now, then in zip(keys, after, before, strict=True)}
        names = "run", "run_rows", "run_shares", "run_in_turn", "_launch", "pack", "refill", "launch"
        words = words_of_repeated()
        launched = [name for name in python_calls(call) if name in names]
        counted[name] |= {"loops": loops, "packed otherwise": wrong, "Python calls of launches": len(launched)}
        counted[name]["words are others"] = [k for k, one in enumerate(words_of_repeated()) if one is not words[k]]

    gpu.missing = UNIQUE
    step()
    gpu.missing = 0
    count("step", step)
    count("step of many ids", lambda: step(many_ids, many_grads))
    embedding.eval()
    count("eval", evaluate)
    release(gpu)
    embedding.train()
    counted["repeated"] = repeated(gpu, driver, embedding, optimizer, evaluate)
    counted["compiled"] = list(compiled)
    counted["errors"] = errors(driver, gpu)
    counted["threads"] = threads(driver, gpu)
    counted["nested"] = nested(driver, gpu), nested_in_repeat(driver, gpu)
    counted["nested anywhere"] = nested_anywhere(driver, gpu)
    counted["kept in turn"] = kept_in_turn(driver, gpu)
    counted["an error among three"] = [error_among_three(driver, gpu) for _ in range(3)]
    counted["launches without memory"] = launches_without_memory(driver, gpu)
    print(json.dumps(counted))


def words_of_repeated():
    """The words that the buffers of this thread's repeated launches have."""
    return [again.words for again in cuda_driver.arguments.repeated.values() if again is not None]


def comparing(driver, loops, wrong):
    """A callback of launches that lists the loops, and those whose arguments are not packed as numba packs them."""

    def compare(loop, args, before):
        signature = signature_of(args)
        loops.append(loop.function.__name__)
        if not same_words(signature, args, driver.arguments(before), Numba().arguments(signature, args)):
            wrong.append(loop.function.__name__)

    return compare


def repeated(gpu, driver, embedding, optimizer, evaluate):
    """Steps of several shapes in turn, whose launches repeat those before: with other ids, other scalars, a slab that
    grows, two lookups before one backward pass, an eval in between, and an error in the middle of a launch."""
    loops, wrong, before = [], [], gpu.repeats
    gpu.launched = comparing(driver, loops, wrong)
    for step in range(24):
        size = (1, 64, 16, 500)[step % 4]
        ids = [torch.randint(1 << 40, (size, TABLES)) for _ in range(1 + step % 2)]
        gpu.unique = gpu.missing = min(TABLES * size, 40 + 100 * step)
        optimizer.optimizer.param_groups[0]["lr"] = 1 / (1 + step)
        rows = [embedding(one) for one in ids]
        if step % 3 == 0:
            embedding.eval()
            evaluate()
            embedding.train()
        if step == 12:
            driver.fail("cuLaunchKernel", 700)
            try:
                embedding(ids[0])
                raise AssertionError("the launch has not failed")
            except cuda_driver.DriverError:
                pass
        torch.autograd.backward([one.sum() for one in rows])
        optimizer.step()
        optimizer.zero_grad()
    gpu.launched = None
    return {"loops": len(loops), "packed otherwise": wrong, "repeats": gpu.repeats - before}


def release(gpu):
    gpu.run(release_loop, 3, torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))


def errors(driver, gpu):
    """Texts of errors: of a launch, of code that the driver does not take, of arguments."""
    found = {}

    def note(name, call):
        try:
            call()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    driver.fail("cuLaunchKernel", 700)
    note("launch", lambda: release(gpu))
    note("launch after it", lambda: release(gpu))
    driver.cuda.cuCtxSetCurrent(None)
    driver.fail("cuCtxSetCurrent", 201, after=1)
    note("context", lambda: release(gpu))
    driver.cuda.cuCtxSetCurrent(ctypes.c_void_p(gpu.context))
    other = NullGpu(index=1)
    loads = driver.count("cuModuleLoadData")
    driver.fail("cuModuleLoadData", 222)
    note("code of another driver", lambda: release(other))
    found["loads"] = driver.count("cuModuleLoadData") - loads
    driver.fail("cuModuleLoadData", 2)
    note("no memory", lambda: release(NullGpu()))
    gaps = torch.zeros(6, dtype=torch.int64)[::2]
    note("gaps", lambda: gpu.run(release_loop, 3, gaps, torch.zeros(2, dtype=torch.int32)))
    note("dtype", lambda: gpu.run(release_loop, 3, gaps.half().contiguous(), torch.zeros(2, dtype=torch.int32)))
    return found


def error_among_three(driver, gpu):
    """Three loops that are launched together, and the second fails: text of the error, number of launches, whether the
    thread has its context again. Then they are launched without an error."""
    pins, count = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    loops = [(release_loop, gpu.grid(3)), (count_pinned_loop, gpu.grid(2)), (release_loop, gpu.grid(3))]
    args = (torch.arange(3), pins), (pins, 2, count), (torch.arange(3), pins)
    driver.fail("cuLaunchKernel", 700, after=1)
    driver.cuda.cuCtxSetCurrent(None)
    before = driver.count("cuLaunchKernel")
    try:
        gpu.run_in_turn(lambda: loops, *args, shapes="three")
        text = ""
    except cuda_driver.DriverError as error:
        text = str(error)
    found = text, driver.count("cuLaunchKernel") - before, driver.context()
    driver.cuda.cuCtxSetCurrent(ctypes.c_void_p(gpu.context))
    gpu.run_in_turn(lambda: loops, *args, shapes="three")
    return found


def launches_without_memory(driver, gpu):
    """Number of launches of each of four calls with one key, the second without memory for what is kept of it."""
    found, kept = [], launch.Repeated

    def fails(*_):
        raise MemoryError

    for call in range(4):
        before = driver.count("cuLaunchKernel")
        launch.Repeated = fails if call == 1 else kept
        with contextlib.suppress(MemoryError):
            gpu.run(release_loop, 2, torch.arange(2), torch.zeros(2, dtype=torch.int32), shapes="no memory")
        found.append(driver.count("cuLaunchKernel") - before)
    return found


def threads(driver, gpu):
    """Whether a launch leaves a thread's context, and whether threads have buffers of their own."""
    found, buffers = {}, {ctypes.addressof(cuda_driver.arguments.free[-1].buffer)}
    repeated = set()
    other = NullGpu(index=1)

    def look():
        found["none"] = [driver.context(), release(gpu), driver.context()]
        driver.cuda.cuCtxSetCurrent(ctypes.c_void_p(gpu.context))
        found["own"] = [driver.context() == gpu.context, release(gpu), driver.context() == gpu.context]
        found["other"] = [release(other), driver.context() == gpu.context]
        buffers.add(ctypes.addressof(cuda_driver.arguments.free[-1].buffer))
        repeat()

    def repeat():
        for _ in range(3):
            gpu.run(release_loop, 2, torch.arange(2), torch.zeros(2, dtype=torch.int32), shapes="threads")
        key = gpu, (release_loop, 2, "threads")
        (launched,) = cuda_driver.arguments.repeated[key].launched
        repeated.add(ctypes.addressof(launched.own.buffer))

    repeat()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found | {"buffers": len(buffers), "buffers of repeated launches": len(repeated)}


def nested(driver, gpu):
    """Whether a launch in the middle of another, as by a finalizer, leaves the arguments of that one."""
    pins, slots = torch.zeros(7, dtype=torch.int32), torch.arange(5)
    release(gpu)
    kernels, launched = gpu._kernels[release_loop], []
    kernel = next(one for one in kernels if one.pack(bytearray(4096), (slots, pins)))

    def pack(buffer, args):
        packed = kernel.pack(buffer, args)
        if not launched:
            launched.append(True)
            release(gpu)
        return packed

    gpu._kernels[release_loop] = [kernel._replace(pack=pack)]
    gpu.run(release_loop, 5, slots, pins)
    gpu._kernels[release_loop] = kernels
    signature = signature_of((slots, pins))
    return same_words(signature, (slots, pins), driver.arguments(), Numba().arguments(signature, (slots, pins)))


def nested_anywhere(driver, gpu):
    """Whether launches, and requests for small arrays, that come in the middle of others, at any call, leave the
    arguments of these; and the number of launches in the middle."""
    pins, turn, same, inside, packed = torch.zeros(7, dtype=torch.int32), itertools.count(), [], [], []
    launch_loops = cuda_driver.launch_loops

    def launching(*args):
        inside.append(True)
        failed = launch_loops(*args)
        packed.append(driver.arguments())
        inside.pop()
        return failed

    def note(frame, event, _):
        if is_of_launches(frame) and not inside:
            inside.append(True)
            gpu.filled(3)
            gpu.run(release_loop, 2, torch.arange(2), pins, shapes=("in the middle", next(turn) // 3))
            inside.pop()

    cuda_driver.launch_loops = launch.launch_loops = launching
    for size in range(60):
        slots = torch.arange(1 + size % 6)
        packed.clear()
        sys.setprofile(note)
        try:
            gpu.filled(3)
            gpu.run(release_loop, len(slots), slots, pins, shapes="around")
        finally:
            sys.setprofile(None)
        signature = signature_of((slots, pins))
        numbas = Numba().arguments(signature, (slots, pins))
        same.append(any(same_words(signature, (slots, pins), ours, numbas) for ours in packed))
    cuda_driver.launch_loops = launch.launch_loops = launch_loops
    return all(same), next(turn)


def kept_in_turn(driver, gpu):
    """Whether each launch of one key gets its own arguments, where tensors that are kept take turns with others."""
    pins, same = torch.zeros(7, dtype=torch.int32), []
    kept, others = [gpu.kept(torch.arange(5)) for _ in range(2)], [torch.arange(5) for _ in range(2)]
    before = gpu.repeats
    for slots in [kept[0], *kept, *kept, others[0], kept[1], *others, kept[0]]:
        gpu.run(release_loop, 5, slots, pins, shapes="kept")
        signature = signature_of((slots, pins))
        numbas = Numba().arguments(signature, (slots, pins))
        same.append(same_words(signature, (slots, pins), driver.arguments(), numbas))
    return {"same": all(same), "repeats": gpu.repeats - before}


def nested_in_repeat(driver, gpu):
    """Whether a launch that comes in the middle of a repeated one, and would repeat the same, leaves the arguments of
    that one."""
    pins, slots, others = torch.zeros(7, dtype=torch.int32), torch.arange(5), torch.zeros(5, dtype=torch.int64)

    def launch(slots):
        gpu.run(release_loop, 5, slots, pins, shapes=7)

    for _ in range(3):
        launch(others)
    (again,) = (one for key, one in cuda_driver.arguments.repeated.items() if key[1] == (release_loop, 5, 7))
    refill, launched = again.refill, []

    def launching(args, *more):
        filled = refill(args, *more)
        launched.append(launch(others))
        return filled

    again.refill = launching
    launch(slots)
    again.refill = refill
    signature = signature_of((slots, pins))
    ours, numbas = driver.arguments(), Numba().arguments(signature, (slots, pins))
    return len(launched) == 1 and same_words(signature, (slots, pins), ours, numbas)


if __name__ == "__main__":
    main(sys.argv[1])
