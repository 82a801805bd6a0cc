"""Processes that take turns: while one has its turn, the other uses no processor."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from _turns import Side, SideError, rest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SIDE = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from _turns import serve

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

def answer(request):
    print("a library talks")
    if "end" in request:
        sys.exit(request["end"])
    threading.Thread(target=spin, args=(request["spin"],), daemon=True).start()
    return {"heard": request["spin"]}

serve(answer)
"""


def side():
    return Side("a revision", [sys.executable, "-c", SIDE, str(BENCHMARKS)])


def processor_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_an_answer_comes_when_other_threads_rest_and_the_side_is_parked_from_then_on():
    with side() as its:
        its.ask(spin=0.0)
        begin = time.monotonic()
        answer = its.ask(spin=0.3)
        assert answer == {"heard": 0.3, "rested": True}
        assert time.monotonic() - begin >= 0.3
        parked = processor_ticks(its._process.pid)
        time.sleep(0.2)
        assert processor_ticks(its._process.pid) == parked


def test_a_side_whose_threads_never_rest_says_so():
    with side() as its:
        assert its.ask(spin=30.0)["rested"] is False


def test_rest_sees_the_work_of_another_thread():
    going = threading.Event()

    def spin():
        while not going.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert not rest(0.2)
    finally:
        going.set()
        thread.join()
    assert rest(60.0)


def test_a_side_that_ends_is_an_error_with_its_exit_code():
    with side() as its, pytest.raises(SideError, match="a revision ended with exit code 3"):
        its.ask(end=3)


def test_a_side_outlives_no_parent_even_one_that_is_killed():
    parent = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from _turns import Side
its = Side("a revision", [sys.executable, "-c", {SIDE!r}, {str(BENCHMARKS)!r}])
its.ask(spin=0.0)
print(its._process.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(12_000):
        if not alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("the side waits for a parent that has gone")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
