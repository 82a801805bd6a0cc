"""Signals, their handlers and errors in a block under the store lock."""

import _signal
import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from oneemb.kernels.jit import compiling, cpu
from oneemb.storage.errors import BrokenStoreError, StorageError
from oneemb.storage.locking.signals import signals
from oneemb.storage.locking.signals_deferred import signals_deferred
from oneemb.storage.locking.store_lock import StoreLock, changing
from tests.support.interrupts import AtLine, count_lines, holds_no_signal, in_no_block, interrupted


def test_handlers_run_once_when_the_block_has_ended_and_are_put_back():
    came = []

    def handler(number, frame):
        came.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM)}
    try:
        with signals_deferred, signals_deferred:
            for number in before:
                signal.raise_signal(number)
                signal.raise_signal(number)
            assert came == []
        assert sorted(came) == sorted(before)
        assert all(signal.getsignal(number) is handler for number in before)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def test_every_handler_runs_though_one_raises():
    came = []

    def handler(number, frame):
        came.append(number)
        raise LookupError

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises((KeyboardInterrupt, LookupError)):
            with signals_deferred:
                signal.raise_signal(signal.SIGUSR2)
                signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGUSR2]
        with signals_deferred:
            pass
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_was_asked_for_in_a_block_and_put_back_later_still_works():
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        with signals_deferred:
            inside = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, inside)
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_deferred:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_ctrl_c_is_let_in_and_handlers_of_the_users_wait():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    store_lock = StoreLock("the object", "make it anew", rank=0)
    try:
        with pytest.raises(KeyboardInterrupt):
            with store_lock:
                signal.raise_signal(signal.SIGTERM)
                signals_deferred.raise_interrupt()
                assert came == []
                signal.raise_signal(signal.SIGINT)
                signals_deferred.raise_interrupt()
                raise AssertionError("it was let in")
        assert came == [signal.SIGTERM] and not store_lock.broken and signals.interrupt is None
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, IndexError, AssertionError, RuntimeError])
def test_an_error_that_nobody_foresaw_breaks_the_object(error):
    store_lock = StoreLock("the object", "make it anew", rank=0)
    with pytest.raises(error):
        with store_lock:
            raise error
    with pytest.raises(BrokenStoreError, match=f"the object cannot be used any more.*{error.__name__}.*; make it anew"):
        store_lock.check(changes=False)
    store_lock.mended()
    store_lock.check(changes=True)


@pytest.mark.parametrize("error", [StorageError, MemoryError, ValueError, TypeError, OSError])
def test_an_error_that_is_raised_on_purpose_breaks_nothing(error):
    store_lock = StoreLock("the object", "make it anew", rank=0)
    with pytest.raises(error):
        with store_lock:
            raise error
    store_lock.check(changes=True)


@pytest.mark.parametrize("error", [StorageError, MemoryError, ValueError, OSError, LookupError])
def test_an_error_in_the_middle_of_a_change_breaks_the_objects_in_whose_turns_it_comes(error):
    store, table = StoreLock("the store", "clear it", rank=0), StoreLock("the table", "load it", rank=1)
    with pytest.raises(error), store, table, changing:
        raise error("in the middle")
    assert store.broken and table.broken


def test_an_interrupt_that_is_let_in_during_a_change_breaks_nothing():
    store_lock = StoreLock("the object", "clear it", rank=0)
    with pytest.raises(KeyboardInterrupt), store_lock, changing:
        signal.raise_signal(signal.SIGINT)
        signals_deferred.raise_interrupt()
    assert not store_lock.broken


def test_torchs_errors_of_memory_that_runs_out_break_nothing():
    store_lock = StoreLock("the object", "clear it", rank=0)
    with pytest.raises(RuntimeError, match="memory") as error, store_lock:
        torch.empty(2**60, dtype=torch.int8)
    assert not store_lock.broken, error.value


def test_other_threads_and_loops_of_asyncio_take_turns():
    store_lock = StoreLock("the object", "make it anew", rank=0)
    counted = [0]

    def count():
        for _ in range(500):
            with store_lock:
                counted[0] += 1

    async def main():
        await asyncio.gather(*(asyncio.to_thread(count) for _ in range(3)))
        count()

    asyncio.run(main())
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert counted == [2500]


def turn_of(store_lock):
    with store_lock, store_lock:
        assert callable(signal.getsignal(signal.SIGINT))


@pytest.mark.parametrize("way", ["alone", "within a block"])
def test_a_signal_at_any_line_leaves_handlers_and_blocks_in_order(way):
    store_lock = StoreLock("the object", "make it anew", rank=0)

    def call():
        turn_of(store_lock)

    def handler(number, frame):  # as a timer of the user's that looks rows up
        turn_of(store_lock)
        came.append(number)

    came, reached = [], 0
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        lines = count_lines(call, "signal")
        for at in range(1, lines + 1):
            interrupted(call, at, "signal")  # which looks at SIGINT and at the block
            assert signal.getsignal(signal.SIGUSR1) is handler, at
            if way == "within a block":
                with AtLine(at, number=signal.SIGUSR1) as line:
                    call()
                # A call that finds the handlers of the one before runs some lines less.
                reached += line.place is not None
                assert (line.place is not None or at > line.lines) and len(came) == reached
                assert signal.getsignal(signal.SIGUSR1) is handler and in_no_block(), line.place
            with store_lock:
                pass
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_is_not_lost_where_another_handler_raises_as_a_block_begins(monkeypatch):
    getsignal = _signal.getsignal

    def asked(number):
        if number == signal.SIGUSR2:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)  # held back: its handler has been replaced before
            raise LookupError
        return getsignal(number)

    monkeypatch.setattr(_signal, "getsignal", asked)
    with pytest.raises(KeyboardInterrupt):
        with signals_deferred:
            raise AssertionError("it began")
    assert in_no_block() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_the_wait_for_a_turn_but_not_a_turn():
    store_lock, begun, go_on = StoreLock("the object", "make it anew", rank=0), threading.Event(), threading.Event()

    def stay():
        with store_lock:
            begun.set()
            go_on.wait(600)

    def interrupt(then):
        while store_lock.waiting == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        then()

    def let_go():
        while holds_no_signal():
            time.sleep(0.001)
        go_on.set()

    thread = threading.Thread(target=stay)
    thread.start()
    begun.wait()
    done = []
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt, args=(int,)).start()
        with store_lock:
            done.append(1)
    assert thread.is_alive() and done == []
    # Within a block something has begun: the interrupt waits.
    with pytest.raises(KeyboardInterrupt):
        with signals_deferred:
            threading.Thread(target=interrupt, args=(let_go,)).start()
            with store_lock:
                done.append(2)
            done.append(3)
    assert done == [2, 3] and store_lock.waiting == 0
    thread.join()


def test_ctrl_c_while_a_loop_is_compiled_comes_when_it_is():
    """Numba would keep its lock for ever, where an interrupt comes between taking it and noting that."""

    @cpu
    def loop(begin, end, out_N):
        for n in range(begin, end):
            out_N[n] = n

    compile_one, out_N = loop.compile, np.zeros(3, np.int64)

    def interrupted_compile(signature):
        with compiling:
            os.kill(os.getpid(), signal.SIGINT)
            return compile_one(signature)

    loop.compile = interrupted_compile
    with pytest.raises(KeyboardInterrupt):
        loop(0, 3, out_N)
    assert len(loop.signatures) == 1 and not compiling.is_locked()
    loop(0, 3, out_N)
    assert out_N.tolist() == [0, 1, 2]


def test_signals_come_though_no_thread_can_be_started_to_send_them_again(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        signals.hold()
        signal.raise_signal(signal.SIGTERM)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError):
            patched.setattr(threading.Thread, "start", start)
            signals.come_later()
        assert came == [1]
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    finally:
        signal.signal(signal.SIGTERM, before)
