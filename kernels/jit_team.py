"""A team of threads that runs shares of compiled loops, without the interpreter lock.

A launch puts a **job** on the team's list: a compiled entry, its arguments, and a range that is cut into shares. The
calling thread and the helpers that join take shares, one after another, by an atomic add. Several threads may launch
jobs at once; helpers join the newest that has room.

Invariants:
- The calling thread waits for helpers that have joined its job only: if other programs use the cores, a helper that
  does not get to run costs no time.
- A job is memory on its caller's stack, and stands on the list while helpers may join. The caller takes it off the list
  before it waits for the helpers that have joined, so no helper reads a job that is gone.
- A helper never enters Python: it holds no interpreter lock, and a fork, an interrupt or the interpreter's end finds it
  in compiled code.

The team's memory and a job are words of 64 bits at an address. The team's mutex guards all words except those that are
marked as atomic below.
"""

from types import FunctionType
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from oneemb.kernels.jit import CpuLoop, cpu, external, written
from oneemb.kernels.jit_code import call_at, set_word, word_at

# Words of a team.
_JOBS = 0  # address of the newest job that helpers may join, 0 = none
_LAUNCHES = 1  # jobs so far, atomic: an idle helper watches it
_SLEEPING = 2  # helpers that wait for `_WORK`
_ENDED = 3
_MUTEX, _WORK, _DONE = 8, 24, 40  # 128 bytes each, more than any C library's mutex or condition has
TEAM_WORDS = 56

# Words of a job.
_NEXT_SHARE = 0  # atomic
_SHARES = 1
_SIZE = 2
_ENTRY = 3
_ARGUMENTS = 4
_ROOM = 5  # helpers that may still join
_JOINED = 6  # helpers that have joined and not left
_FAILED = 7  # atomic: shares that have failed
_OLDER = 8  # address of the next job of the list
_WAITS = 9  # 1 while the caller sleeps until the last helper leaves
_JOB_WORDS = 10

# How often a helper looks for the next job before it sleeps, and a caller for the end of a helper's last share before
# it sleeps: about 30 microseconds in all, the time that it takes to wake a thread.
_TURNS = 600

_lock = external("pthread_mutex_lock", "int32", ["int64"])
_unlock = external("pthread_mutex_unlock", "int32", ["int64"])
_mutex_init = external("pthread_mutex_init", "int32", ["int64", "int64"])
_condition_init = external("pthread_cond_init", "int32", ["int64", "int64"])
_wait = external("pthread_cond_wait", "int32", ["int64", "int64"])
_signal = external("pthread_cond_signal", "int32", ["int64"])
_broadcast = external("pthread_cond_broadcast", "int32", ["int64"])


def _pointer(builder: Any, address: Any, index: Any) -> Any:
    i64 = ir.IntType(64)
    return builder.inttoptr(builder.add(address, builder.mul(index, i64(8))), i64.as_pointer())


@intrinsic
def add_word(typingctx: Any, address: Any, index: Any, number: Any) -> Any:
    """Add a number to a word, atomically. Returns the word's old value."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, *args[:2]), args[2], "acq_rel")

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def watch_word(typingctx: Any, address: Any, index: Any) -> Any:
    """Read a word that another thread writes, after a pause instruction, in which the core's second hardware thread may
    use the core."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if builder.module.triple.startswith("x86"):
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        return builder.load_atomic(_pointer(builder, *args), "acquire", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _new_job(typingctx: Any) -> Any:
    """Address of a new job on the stack, all zeros. It is valid until the calling function returns."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), _JOB_WORDS), zfill=True)
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(), codegen


@intrinsic
def _address_of(typingctx: Any, value: Any) -> Any:
    """Address of a copy of a value on the stack. It is valid until the calling function returns."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, args[0]), ir.IntType(64))

    return types.int64(value), codegen


@intrinsic
def _entry_of(typingctx: Any, loop: Any, arguments: Any) -> Any:
    """Address of a C function `int32 (begin, end, address of arguments)` that calls the loop and returns 0 on
    success."""
    call = loop.get_call_type(typingctx, (types.int64, types.int64, *arguments.types), {})
    compiled = loop.dispatcher.overloads[call.args]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(i32, [i64, i64, i64])
        function = ir.Function(builder.module, kind, builder.module.get_unique_name("share"))
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block())
        begin, end, address = function.args
        value = inner.load(inner.inttoptr(address, context.get_value_type(arguments).as_pointer()))
        parts = [inner.extract_value(value, i) for i in range(len(arguments))]
        context.add_linking_libs([compiled.library])
        status, _ = context.call_internal_no_propagate(inner, compiled.fndesc, call, [begin, end, *parts])
        inner.ret(inner.zext(status.is_error, i32))
        return builder.ptrtoint(function, i64)

    return types.int64(loop, arguments), codegen


@cpu
def _take_shares(job: Any) -> None:
    entry, arguments = word_at(job, _ENTRY), word_at(job, _ARGUMENTS)
    size, shares = word_at(job, _SIZE), word_at(job, _SHARES)
    while True:
        i = add_word(job, _NEXT_SHARE, 1)
        if i >= shares:
            return
        if call_at(entry, (size * i // shares, size * (i + 1) // shares, arguments)) != 0:
            add_word(job, _FAILED, 1)


@cpu
def begin_team(team: Any) -> None:
    """Initialize a team in TEAM_WORDS words of zeros at the address `team`, a multiple of 64."""
    _mutex_init(team + 8 * _MUTEX, 0)
    _condition_init(team + 8 * _WORK, 0)
    _condition_init(team + 8 * _DONE, 0)


@cpu
def end_team(team: Any) -> None:
    """End the team: each helper leaves after the job that it has joined."""
    _lock(team + 8 * _MUTEX)
    set_word(team, _ENDED, 1)
    _unlock(team + 8 * _MUTEX)
    add_word(team, _LAUNCHES, 1)
    _broadcast(team + 8 * _WORK)


@cpu
def serve(team: Any) -> None:
    """Work as a helper until the team ends."""
    mutex = team + 8 * _MUTEX
    _lock(mutex)
    while word_at(team, _ENDED) == 0:
        seen, job = word_at(team, _LAUNCHES), word_at(team, _JOBS)
        while job != 0 and word_at(job, _ROOM) == 0:
            job = word_at(job, _OLDER)
        if job == 0:
            _unlock(mutex)
            for _ in range(_TURNS):
                if watch_word(team, _LAUNCHES) != seen:
                    break
            _lock(mutex)
            if word_at(team, _LAUNCHES) == seen:
                set_word(team, _SLEEPING, word_at(team, _SLEEPING) + 1)
                _wait(team + 8 * _WORK, mutex)
                set_word(team, _SLEEPING, word_at(team, _SLEEPING) - 1)
            continue
        set_word(job, _ROOM, word_at(job, _ROOM) - 1)
        set_word(job, _JOINED, word_at(job, _JOINED) + 1)
        _unlock(mutex)
        _take_shares(job)
        _lock(mutex)
        set_word(job, _ROOM, 0)  # No share is left.
        set_word(job, _JOINED, word_at(job, _JOINED) - 1)
        if word_at(job, _JOINED) == 0 and word_at(job, _WAITS) != 0:
            _broadcast(team + 8 * _DONE)
    _unlock(mutex)


@cpu
def _launch_job(team: Any, helpers: Any, shares: Any, size: Any, entry: Any, arguments: Any) -> int:
    """Run all shares of the range 0 to `size`, with at most `helpers` helpers, and return the number of shares that
    have failed. `team`, `entry` and `arguments` are addresses: of the team, the C function, and the function's
    arguments."""
    mutex, job = team + 8 * _MUTEX, _new_job()
    set_word(job, _SHARES, shares)
    set_word(job, _SIZE, size)
    set_word(job, _ENTRY, entry)
    set_word(job, _ARGUMENTS, arguments)
    set_word(job, _ROOM, helpers)
    _lock(mutex)
    set_word(job, _OLDER, word_at(team, _JOBS))
    set_word(team, _JOBS, job)
    add_word(team, _LAUNCHES, 1)
    sleeping = word_at(team, _SLEEPING)
    _unlock(mutex)
    for _ in range(min(helpers, sleeping)):
        _signal(team + 8 * _WORK)
    _take_shares(job)
    _lock(mutex)
    if word_at(team, _JOBS) == job:
        set_word(team, _JOBS, word_at(job, _OLDER))
    else:
        newer = word_at(team, _JOBS)
        while word_at(newer, _OLDER) != job:
            newer = word_at(newer, _OLDER)
        set_word(newer, _OLDER, word_at(job, _OLDER))
    turns = 0
    while word_at(job, _JOINED) != 0:
        if turns < _TURNS:
            _unlock(mutex)
            while turns < _TURNS and watch_word(job, _JOINED) != 0:
                turns += 1
            _lock(mutex)
            continue
        set_word(job, _WAITS, 1)
        _wait(team + 8 * _DONE, mutex)
    _unlock(mutex)
    return word_at(job, _FAILED)


def launcher(loop: Any) -> CpuLoop:
    """Compiled function `(team, helpers, shares, size, *arguments of the loop)` that runs the loop over 0 to `size`, in
    `shares` shares. It raises MemoryError if a share fails, since a loop fails only for lack of memory."""
    made: CpuLoop | None = getattr(loop, "launcher", None)
    if made is None:
        code = loop.py_func.__code__
        made = loop.launcher = cpu(_launch_function(loop, code.co_argcount - 2))
    return made


def _launch_function(loop: Any, count: int) -> FunctionType:
    """Python source of `launcher`, as a function. Its arguments are written out, since numba calls a function with
    `*arguments` slowly."""
    names = "".join(f"a{i}, " for i in range(count))
    source = f"""
def launch(team, helpers, shares, size, {names}):
    arguments = ({names})
    if launch_job(team, helpers, shares, size, entry_of(loop, arguments), address_of(arguments)) != 0:
        raise MemoryError("no memory for a loop's own arrays")
"""
    scope = {"launch_job": _launch_job, "entry_of": _entry_of, "address_of": _address_of, "loop": loop}
    return written("launch", source, scope, beside=loop)
