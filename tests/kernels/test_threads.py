"""Threads cover a loop's range exactly once, and pass on what goes wrong."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from oneemb.kernels import threads as module
from oneemb.kernels.jit import cpu, external
from oneemb.kernels.jit_team import add_word, watch_word
from oneemb.kernels.threads import Threads, available_cores, submit
from tests.support.forks import ended_well, in_child
from tests.support.inside import team_of
from tests.support.interrupts import WAYS, count_lines, interrupted

_self = external("pthread_self", "int64", [])
_PATIENCE = 2_000_000_000


@cpu
def note_share(begin, end, counter, share_S3):
    """Append (begin, end, thread) of a share."""
    i = add_word(counter, 0, 1)
    share_S3[i, 0], share_S3[i, 1], share_S3[i, 2] = begin, end, _self()


@cpu
def meet(begin, end, counter, count, late_1):
    """Wait in each share until this many shares have begun."""
    add_word(counter, 0, 1)
    for _ in range(_PATIENCE):
        if watch_word(counter, 0) >= count:
            return
    late_1[0] = 1


@cpu
def stay_away(begin, end, counter):
    """Wait in each share until word 1 is set."""
    add_word(counter, 0, 1)
    while watch_word(counter, 1) == 0:
        pass


@cpu
def add_one(begin, end, total_S):
    for i in range(begin, end):
        total_S[i] += 1


@cpu
def fail_in(begin, end, bad, ended_S):
    if begin == bad:
        raise MemoryError
    ended_S[begin] = 1


@pytest.fixture(params=[1, 2, 3, 7])
def threads(request):
    threads = Threads(request.param)
    yield threads
    threads.close()


def run_shares(threads, size, **options):
    counter_1, share_S3 = np.zeros(1, np.int64), np.zeros((size + 1, 3), np.int64)
    threads.run(note_share, size, counter_1.ctypes.data, share_S3, **options)
    return sorted(map(tuple, share_S3[: counter_1[0]].tolist()))


def run_together(threads, count):
    """Whether `count` shares run at the same time."""
    counter_1, late_1 = np.zeros(1, np.int64), np.zeros(1, np.int64)
    threads.run(meet, count, counter_1.ctypes.data, count, late_1, share_min=1)
    return late_1[0] == 0


@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 8, 100, 1001])
def test_shares_cover_the_range_once(threads, size):
    shares = run_shares(threads, size, share_min=1)
    covered = [n for begin, end, _ in shares for n in range(begin, end)]
    assert covered == list(range(size))
    assert len(shares) == (1 if threads.count == 1 else max(1, min(8 * threads.count, size)))


def test_shares_of_a_large_range_are_even(threads):
    sizes = [end - begin for begin, end, _ in run_shares(threads, 100_000)]
    assert len(sizes) >= threads.count and max(sizes) - min(sizes) <= 1


def test_a_small_range_wakes_no_thread(threads):
    assert run_shares(threads, 100) == [(0, 100, threading.get_ident())]
    assert team_of(threads) is None


def test_the_calling_thread_waits_for_no_thread_that_has_not_begun():
    threads, word_2 = Threads(2), np.zeros(2, np.int64)
    other = threading.Thread(target=threads.run, args=(stay_away, 2, word_2.ctypes.data), kwargs={"share_min": 1})
    other.start()
    while word_2[0] < 2:  # The one helper is away in that loop.
        time.sleep(0.001)
    try:
        assert {ident for _, _, ident in run_shares(threads, 100, share_min=1)} == {threading.get_ident()}
    finally:
        word_2[1] = 1
        other.join()
        threads.close()


def test_helpers_join_a_job_that_is_not_the_newest():
    threads, word_2 = Threads(3), np.zeros(2, np.int64)
    away = [
        threading.Thread(target=threads.run, args=(stay_away, 2, word_2.ctypes.data), kwargs={"share_min": 1})
        for _ in range(2)
    ]
    for one in away:
        one.start()
    while word_2[0] < 4:
        time.sleep(0.001)
    word_2[1] = 1
    for one in away:
        one.join()
    assert run_together(threads, 3)
    threads.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_fork_runs_loops_on_threads_of_its_own_whatever_its_parent_was_doing():
    threads, word_2 = Threads(3), np.zeros(2, np.int64)
    assert run_together(threads, 3)
    other = threading.Thread(target=threads.run, args=(stay_away, 2, word_2.ctypes.data), kwargs={"share_min": 1})
    other.start()
    while word_2[0] < 2:
        time.sleep(0.001)
    child = in_child(lambda: run_together(threads, 3) and len(run_shares(threads, 1000, share_min=1)) == 24)
    assert ended_well(child) is True
    word_2[1] = 1
    other.join()
    assert len(run_shares(threads, 1000, share_min=1)) == 24
    threads.close()


def test_shares_run_at_the_same_time():
    threads = Threads(3)
    assert run_together(threads, 3)
    time.sleep(0.05)  # until the helpers sleep
    assert run_together(threads, 3)
    threads.close()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_share_without_memory_is_an_error_when_all_have_ended(bad):
    threads, ended_S = Threads(3), np.zeros(3, np.int64)
    with pytest.raises(MemoryError):
        threads.run(fail_in, 3, bad, ended_S, share_min=1)
    assert np.flatnonzero(ended_S).tolist() == [n for n in range(3) if n != bad]
    with pytest.raises(MemoryError):
        Threads(1).run(fail_in, 3, 0, ended_S)
    threads.close()


def test_several_python_threads_may_run_loops_at_once():
    threads, sums = Threads(2), {}

    def work(name):
        total_S = np.zeros(100_000, np.int64)
        for _ in range(50):
            threads.run(add_one, len(total_S), total_S)
        sums[name] = total_S

    workers = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all((sums[name] == 50).all() for name in range(4))
    threads.close()


def test_many_launches_in_a_row_lose_no_share():
    threads, total_S = Threads(3), np.zeros(64, np.int64)
    for _ in range(20_000):
        threads.run(add_one, 64, total_S, share_min=1)
    assert (total_S == 20_000).all()
    threads.close()


def test_a_closed_object_still_runs_on_the_calling_thread():
    threads = Threads(2)
    run_together(threads, 2)
    threads.close()
    threads.close()
    assert run_shares(threads, 10_000, share_min=1) == [(0, 10_000, threading.get_ident())]
    assert not any(thread.is_alive() for thread in team_of(threads).threads)


def test_threads_end_with_the_object():
    threads = Threads(3)
    run_together(threads, 3)
    helpers = team_of(threads).threads
    del threads
    gc.collect()
    for helper in helpers:
        helper.join(600)
        assert not helper.is_alive()


def test_the_default_is_the_cores_this_process_may_use():
    assert Threads().count == available_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_thread_is_refused(count):
    with pytest.raises(ValueError, match=f"at least 1, got {count}"):
        Threads(count)


@pytest.mark.skipif(available_cores() < 2, reason="one core")
def test_threads_are_kept_off_the_core_that_calls():
    threads = Threads(2)
    for _ in range(2):  # a thread that is only just begun is told from the next run on
        assert run_together(threads, 2)
    (helper,) = team_of(threads).thread_ids
    assert os.sched_getaffinity(helper) == os.sched_getaffinity(0) - {team_of(threads).kept_off[0]}
    assert len(os.sched_getaffinity(0)) == available_cores()
    threads.close()


def test_a_loop_runs_on_the_calling_thread_where_no_thread_can_be_started(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    threads = Threads(3)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert {ident for _, _, ident in run_shares(threads, 100, share_min=1)} == {threading.get_ident()}
    threads.close()


def test_a_program_ends_while_its_threads_sleep_and_after_its_exit_functions_have_run_loops():
    code = """
import atexit, threading, numpy as np
from oneemb.kernels.threads import Threads
from tests.kernels.test_threads import add_one
threads, total_S = Threads(2), np.zeros(1000, np.int64)
def run():
    threads.run(add_one, 1000, total_S, share_min=1)
    print(total_S.min(), total_S.max(), flush=True)
atexit.register(run)
threading._register_atexit(run)
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 1\n2 2\n3 3\n", "")


def test_an_interrupt_comes_after_the_loop_that_it_finds():
    def interrupt():
        while word_2[0] < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        word_2[1] = 1

    threads, word_2 = Threads(2), np.zeros(2, np.int64)
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        threads.run(stay_away, 2, word_2.ctypes.data, share_min=1)
        other.join()
    assert word_2[1] == 1
    other.join()
    assert run_together(threads, 2)
    threads.close()


def test_loops_run_in_a_process_that_is_spawned():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(run_in_another_process) == 24


def run_in_another_process():
    return len(run_shares(Threads(3), 1000, share_min=1))


@pytest.mark.parametrize("reason", ["start new thread", "create new thread at interpreter shutdown"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["no thread", "a thread"])
def test_work_is_done_once_though_no_thread_can_be_started(earlier, reason, monkeypatch):
    with ThreadPoolExecutor(2) as pool:
        if earlier:  # It is busy, so that the pool wants another one; later it finds the work in the queue.
            begun, end = threading.Event(), threading.Event()
            busy = submit(pool, lambda: begun.set() or end.wait())
            begun.wait()

        def start(thread):
            raise RuntimeError(f"can't {reason}")

        monkeypatch.setattr(threading.Thread, "start", start)
        runs = []
        assert submit(pool, lambda: runs.append(1) or "done").result() == "done"
        if earlier:
            end.set()
            busy.result()
    assert runs == [1]


SMALL = """
import resource, sys, threading
from concurrent.futures import ThreadPoolExecutor
from oneemb.kernels.threads import _Team, start, submit
_Team(0)  # compiled
def above_use(mib):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    return used + int(mib * 2**20), resource.RLIM_INFINITY
hoard = []
def fill():  # No free memory is left in Python's own arenas.
    try:
        while True:
            hoard.append(bytearray(400))
    except MemoryError:
        hoard[-50:] = []
threading.stack_size(256 << 10)
calls = [1]
for mib in (*(kib / 1024 for kib in range(248, 480, 4)), 1, 2, 40, 600):
    nothing, more = above_use(0), above_use(mib)  # made while there is memory
    if mib < 1:
        resource.setrlimit(resource.RLIMIT_AS, nothing)
        fill()
    resource.setrlimit(resource.RLIMIT_AS, more)
    team, pool = _Team(1), ThreadPoolExecutor(1)
    assert len(team.threads) == (mib == 600)
    assert submit(pool, sum, [1, 2]).result() == 3
    try:
        thread = threading.Thread(target=calls.clear)
        start(thread)
        thread.join()
        assert mib == 600 and not calls
    except RuntimeError as error:
        assert mib < 600 and "can't start new thread" in str(error) and calls
    hoard.clear()
print("done")
"""


def test_threads_that_do_not_fit_the_memory_limit_are_not_waited_for():
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_after_an_interrupt_at_any_line_a_pool_does_the_work(way):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def call():
            submit(pool, int).result()

        for line in range(1, count_lines(call, way) + 1):
            interrupted(call, line, way)
            assert submit(pool, threading.get_ident).result() != threading.get_ident()


def test_a_signal_handler_that_interrupts_a_pool_does_its_work_itself(monkeypatch):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        found = []

        def interrupt():  # `ThreadPoolExecutor.submit` holds its locks when it calls this method.
            if not found:
                found.append(submit(pool, threading.get_ident).result())

        monkeypatch.setattr(pool, "_adjust_thread_count", interrupt)
        assert submit(pool, threading.get_ident).result() != threading.get_ident()
    assert found == [threading.get_ident()]


def test_work_for_a_thread_that_does_not_fit_is_done_by_the_caller(monkeypatch):
    monkeypatch.setattr(module, "_has_room_for_thread", lambda: False)
    with ThreadPoolExecutor(1) as pool:
        assert submit(pool, threading.get_ident).result() == threading.get_ident()
        pool.submit(int).result()  # now it has its thread
        assert submit(pool, threading.get_ident).result() != threading.get_ident()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        module.start(threading.Thread())
