"""Threads cover a loop's range exactly once, and pass on what goes wrong."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from oneemb.kernels.threads import Threads, available_cores, submit
from tests.support.forks import ended_well, in_child


@pytest.fixture(params=[1, 2, 3, 7])
def threads(request):
    threads = Threads(request.param)
    yield threads
    threads.close()


def run_shares(threads, size, **options):
    shares = []
    threads.run(lambda begin, end: shares.append((begin, end, threading.get_ident())), size, **options)
    return sorted(shares)


@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 8, 100, 1001])
def test_shares_cover_the_range_once(threads, size):
    shares = run_shares(threads, size, share_min=1)
    covered = [n for begin, end, _ in shares for n in range(begin, end)]
    assert covered == list(range(size))
    assert len(shares) == (1 if threads.count == 1 else max(1, min(8 * threads.count, size)))


def test_shares_of_a_large_range_are_even(threads):
    sizes = [end - begin for begin, end, _ in run_shares(threads, 10_000)]
    assert len(sizes) >= threads.count and max(sizes) - min(sizes) <= 1


def test_a_small_range_wakes_no_thread(threads):
    assert run_shares(threads, 100) == [(0, 100, threading.get_ident())]


def test_the_calling_thread_waits_for_no_thread_that_has_not_begun():
    threads = Threads(2)
    begun, end = threading.Barrier(3, timeout=20), threading.Event()

    def stay_away(first, last):
        begun.wait()
        end.wait(20)

    other = threading.Thread(target=lambda: threads.run(stay_away, 2, share_min=1))
    other.start()
    begun.wait()  # The one helper is away in that loop.
    try:
        assert {ident for _, _, ident in run_shares(threads, 100, share_min=1)} == {threading.get_ident()}
    finally:
        end.set()
        other.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_fork_runs_loops_on_threads_of_its_own_whatever_its_parent_was_doing():
    threads = Threads(3)
    run_shares(threads, 100, share_min=1)

    def all_shares_on_several_threads():
        meet = threading.Barrier(3, timeout=20)
        threads.run(lambda begin, end: meet.wait() if begin in (0, 1, 2) else None, 24, share_min=1)
        return len(run_shares(threads, 1000, share_min=1)) == 24

    with threads._pool._shutdown_lock:  # as where another thread handed out shares
        child = in_child(all_shares_on_several_threads)
    assert ended_well(child) is True
    assert len(run_shares(threads, 1000, share_min=1)) == 24
    threads.close()


def test_shares_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=20)
    Threads(3).run(lambda begin, end: barrier.wait(), 3, share_min=1)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_in_a_share_is_raised_when_all_have_ended(bad):
    ended = []

    def loop(begin, end):
        if begin == bad:
            raise KeyError(begin)
        ended.append(begin)

    with pytest.raises(KeyError, match=str(bad)):
        Threads(3).run(loop, 3, share_min=1)
    assert sorted(ended) == [n for n in range(3) if n != bad]


def test_two_python_threads_may_run_loops_at_once():
    threads, sums = Threads(2), {}

    def work(name):
        total_S = np.zeros(100_000, np.int64)

        def loop(begin, end):
            total_S[begin:end] += 1

        for _ in range(20):
            threads.run(loop, len(total_S))
        sums[name] = total_S

    workers = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all((sums[name] == 20).all() for name in range(4))


def test_a_closed_object_still_runs_on_the_calling_thread():
    threads = Threads(2)
    threads.close()
    threads.close()
    assert run_shares(threads, 10_000) == [(0, 10_000, threading.get_ident())]


def test_the_default_is_the_cores_this_process_may_use():
    assert Threads().count == available_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_thread_is_refused(count):
    with pytest.raises(ValueError, match=f"at least 1, got {count}"):
        Threads(count)


@pytest.mark.skipif(available_cores() < 2, reason="one core")
def test_threads_are_kept_off_the_core_that_calls():
    threads, barrier = Threads(2), threading.Barrier(2, timeout=20)
    seen = {}

    def loop(begin, end):
        barrier.wait()
        seen[threading.get_ident()] = os.sched_getaffinity(0)

    for _ in range(2):  # a thread that is only just begun is told from the next run on
        threads.run(loop, 2, share_min=1)
    seen.pop(threading.get_ident())
    (cores,) = seen.values()
    assert cores == os.sched_getaffinity(0) - {threads._kept_off[0]}
    assert len(os.sched_getaffinity(0)) == available_cores()
    threads.close()


def test_loops_wait_for_shares_that_a_thread_has_begun_though_another_one_cannot_be_started(monkeypatch):
    threads, begun, ended = Threads(2), threading.Event(), []
    hand_out = threads._pool.submit

    def hand_out_and_raise(work):
        hand_out(work)  # to a thread that is there, which has begun when the pool tries to start another one
        begun.wait(20)
        raise RuntimeError("can't start new thread")

    def slow(first, last):
        begun.set()
        time.sleep(0.01)
        ended.append(first)

    monkeypatch.setattr(threads._pool, "submit", hand_out_and_raise)
    threads.run(slow, 100, share_min=1)
    assert len(ended) == 16
    threads.close()


@pytest.mark.parametrize("earlier", [0, 1], ids=["no thread", "a thread"])
def test_work_is_done_once_though_no_thread_can_be_started(earlier, monkeypatch):
    with ThreadPoolExecutor(2) as pool:
        if earlier:  # It is busy, so that the pool wants another one; later it finds the work in the queue.
            begun, end = threading.Event(), threading.Event()
            busy = submit(pool, lambda: begun.set() or end.wait())
            begun.wait()

        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        runs = []
        assert submit(pool, lambda: runs.append(1) or "done").result() == "done"
        if earlier:
            end.set()
            busy.result()
    assert runs == [1]
