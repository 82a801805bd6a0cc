"""Versions of a served snapshot: taken over, brought back and given up, by threads and processes beside the job."""

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref

import pytest
import torch

import oneemb
from oneemb.serving import build
from oneemb.serving.inference import InferenceEmbedding
from oneemb.storage.errors import StorageError
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from tests.support.inside import follower_of
from tests.support.interrupts import count_lines, interrupted
from tests.support.waits import ended

IDS = torch.arange(400)
PATIENCE_S = 600


class Job:
    """A training job whose every weight of every row is the number of the step, and whose snapshots bear it too."""

    def __init__(self, folder, dim=3):
        self.step, self.folder = 0, str(folder)
        self.embedding = oneemb.MultiTableEmbedding(
            "followed", dim, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.0))],
            oneemb.make_device_mem_store_options(self.folder),
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.embedding.parameters(), lr=1.0)

    def train(self):
        self.step += 1
        self.embedding(IDS).sum().mul(-1).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, delta=False):
        self.train()
        if delta:
            self.embedding.save_delta(f"step {self.step}", since=f"step {self.step - 1}")
        else:
            self.embedding.save_snapshot(f"step {self.step}")

    def remove(self, step):
        self.embedding.delete_snapshot(f"step {step}")


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "job")
    job.save()
    yield job
    job.embedding.close()


def wait_for(what, seconds=PATIENCE_S):
    """Whether it becomes true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def answer(served):
    """The step that answers; a lookup that mixes versions is an error."""
    rows = served(IDS)
    assert rows.min() == rows.max()
    return int(rows.min())


def child(work):
    """The process id of a child of fork in which `work()` runs; it ends with 0 if that gives True."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = 0 if work() is True else 2
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def ended_well(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Building:
    """`with Building(monkeypatch) as building:` files are made only once `building.go` is set."""

    def __init__(self, monkeypatch):
        self.begun, self.go, self._make = threading.Event(), threading.Event(), build.make_file
        monkeypatch.setattr(build, "make_file", self._wait)

    def _wait(self, *arguments, progress, **options):
        self.begun.set()
        while not self.go.wait(0.001):
            progress(0, None)
        return self._make(*arguments, progress=progress, **options)


def test_a_rollback_waits_for_no_build_and_what_that_brings_is_not_taken(job, monkeypatch):
    served = InferenceEmbedding.open(job.folder)
    job.save()
    building, refreshed = Building(monkeypatch), []
    thread = threading.Thread(target=lambda: refreshed.append(served.refresh()))
    thread.start()
    assert building.begun.wait(PATIENCE_S)
    served.rollback("step 1")
    assert answer(served) == 1
    building.go.set()
    ended(thread)
    assert refreshed == [False] and answer(served) == 1
    assert served.refresh() and answer(served) == 2


@pytest.mark.parametrize("call", ["close", "unfollow", "rollback"])
def test_who_stops_following_waits_for_no_build(job, monkeypatch, call):
    served = InferenceEmbedding.open(job.folder)
    job.save()
    building = Building(monkeypatch)
    served.follow(0.001)
    assert building.begun.wait(PATIENCE_S)
    getattr(served, call)(*["step 1"] if call == "rollback" else [])
    if call != "close":
        assert answer(served) == 1
    building.go.set()
    assert InferenceEmbedding.open(job.folder).version.name == "step 2"  # the lock is free


def test_a_close_is_not_undone_by_who_refreshes_meanwhile(job, monkeypatch):
    served = InferenceEmbedding.open(job.folder)
    job.save()
    building, errors = Building(monkeypatch), []

    def refresh():
        with pytest.raises(StorageError, match="closed") as error:
            served.refresh()
        errors.append(error)

    thread = threading.Thread(target=refresh)
    thread.start()
    assert building.begun.wait(PATIENCE_S)
    served.close()
    building.go.set()
    ended(thread)
    assert len(errors) == 1
    with pytest.raises(StorageError, match="closed"):
        served(IDS)


def test_a_snapshot_that_the_job_replaces_while_it_is_opened_gives_way_to_the_next(job, monkeypatch):
    make = build.make_file

    def once(path, snapshot, *arguments, **options):
        if snapshot.name == "step 1":
            job.save()
            job.remove(1)
            raise StorageError("its files are gone")
        return make(path, snapshot, *arguments, **options)

    monkeypatch.setattr(build, "make_file", once)
    assert answer(InferenceEmbedding.open(job.folder)) == 2


def again(job, load):
    """A job that goes on in the folder of `job` from a snapshot, as a new process would."""
    job.embedding.close()
    other = Job(job.folder)
    other.embedding.load_snapshot(load)
    return other


def without_sequences(folder):
    """Make LOCK like that of an earlier release, without records."""
    (folder / "LOCK").write_bytes(b"")


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
def test_a_step_that_is_undone_and_trained_again_takes_the_place_of_the_served_one(job, tmp_path, delta, early):
    job.save(delta)
    served = InferenceEmbedding.open(job.folder)
    number = served.version.sequence
    job.remove(2)
    job = again(job, "step 1")
    if early:
        job.embedding.close()
        without_sequences(tmp_path / "job")
        job = again(job, "step 1")
    job.train()
    job.step = 4
    job.save()
    assert served.refresh() and served.version.name == "step 5" and answer(served) == 3
    assert early or served.version.sequence > number
    job.embedding.close()


def test_no_two_snapshots_get_the_same_number_whatever_is_deleted_between_them(job):
    rng, numbers, step = random.Random(5), {}, 1
    for _ in range(30):
        action = rng.choice(["save", "save", "replace", "delete", "delete", "open"])
        names = job.embedding.snapshots()
        if action == "save":
            step += 1
            job.embedding.save_snapshot(f"step {step}")
        elif action == "replace" and names:
            job.embedding.save_snapshot(rng.choice(names), overwrite=True)
        elif action == "delete" and names:
            job.embedding.delete_snapshot(rng.choice(names))
        elif action == "open":
            job.embedding.close()
            job = Job(job.folder)
        for info in read_snapshot_info(job.folder):
            assert numbers.setdefault(info.sequence, info.identity) == info.identity
    assert len(numbers) > 9 and list(numbers) == sorted(numbers)
    job.embedding.close()


def test_the_newest_snapshot_there_is_takes_the_place_of_a_deleted_one_alone(job, tmp_path):
    job.save()
    served = InferenceEmbedding.open(job.folder)
    file = tmp_path / "job" / "snapshots" / "step 2.snapshot".replace(" ", "%20")
    content = file.read_bytes()
    file.write_bytes(content[:200])
    with pytest.raises(oneemb.CorruptTableError, match="step%202.snapshot"):
        served.refresh()
    assert answer(served) == 2, "a snapshot that cannot be read is not deleted"
    file.write_bytes(content)
    assert not served.refresh()
    job.remove(2)
    assert served.refresh() and served.version.name == "step 1" and answer(served) == 1
    assert not served.refresh()


@pytest.mark.parametrize("call", ["refresh", "rollback"])
def test_a_snapshot_whose_rows_are_of_another_width_is_not_taken_over(job, call):
    served = InferenceEmbedding.open(job.folder)
    job.embedding.close()
    other = Job(job.folder, dim=2)
    other.embedding.save_snapshot("narrow")
    with pytest.raises(StorageError, match="'narrow' has rows of 2 weights.*'step 1', which is served, has 3"):
        getattr(served, call)(*["narrow"] if call == "rollback" else [])
    assert answer(served) == 1
    other.embedding.close()


def test_an_embedding_that_nobody_refers_to_follows_no_more(job):
    served = InferenceEmbedding.open(job.folder)
    served.follow(0.001)
    thread, gone = follower_of(served).thread, weakref.ref(served)
    del served
    assert wait_for(lambda: gc.collect() is not None and gone() is None)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_an_interrupt_of_follow_or_unfollow_leaves_no_thread_that_nobody_stops(job):
    served = InferenceEmbedding.open(job.folder)

    def call():
        served.follow(60.0)
        served.unfollow()

    for line in range(1, 1 + count_lines(call, "signal")):
        interrupted(call, line, "signal", functions=("follow", "unfollow", "__init__", "start", "stop", "close"))
        served.unfollow()
        assert wait_for(lambda: not any(thread.name == "oneemb-follow" for thread in threading.enumerate())), line


def followers():
    return [thread for thread in threading.enumerate() if thread.name == "oneemb-follow"]


def test_of_threads_that_all_follow_one_does_and_none_when_it_stops(job):
    served = InferenceEmbedding.open(job.folder)
    interval, at_once = sys.getswitchinterval(), threading.Barrier(4, timeout=60)

    def follow():
        at_once.wait()
        for _ in range(50):
            served.follow(60.0)

    threads = [threading.Thread(target=follow) for _ in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        ended(*threads)
    finally:
        sys.setswitchinterval(interval)
    assert wait_for(lambda: len(followers()) == 1)
    served.rollback("step 1")
    assert wait_for(lambda: not followers())


def test_a_closed_embedding_does_not_follow(job):
    served = InferenceEmbedding.open(job.folder)
    served.close()
    with pytest.raises(StorageError, match="closed"):
        served.follow(60.0)
    assert not followers()


def test_a_signal_that_refreshes_in_the_midst_of_a_refresh_waits_for_no_lock_of_its_own_thread(job, monkeypatch):
    served, make, calls = InferenceEmbedding.open(job.folder), build.make_file, []
    job.save()

    def interrupted_once(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGHUP)
        return make(*arguments, **options)

    def refresh_twice():
        monkeypatch.setattr(build, "make_file", interrupted_once)
        signal.signal(signal.SIGHUP, lambda *_: served.refresh())
        with pytest.raises(StorageError, match="a signal handler has interrupted it"):
            served.refresh()
        return answer(served) == 1 and served.refresh() and answer(served) == 2

    assert ends_soon(child(refresh_twice))


def ends_soon(pid):
    """Whether a child ends well, and is not stuck."""
    if not wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, 10):
        os.kill(pid, signal.SIGKILL)
    return ended_well(pid)


def test_a_rollback_to_a_name_that_there_is_not_stops_nobody(job):
    served = InferenceEmbedding.open(job.folder)
    served.follow(60.0)
    with pytest.raises(StorageError, match="no snapshot named"):
        served.rollback("none")
    assert len(followers()) == 1
    served.close()


@pytest.mark.parametrize("call", ["close", "unfollow", "follow", "rollback"])
def test_a_forked_child_stops_following_whatever_the_thread_of_its_parent_was_doing(job, call):
    served = InferenceEmbedding.open(job.folder)
    served.follow(60.0)
    arguments = {"follow": [60.0], "rollback": ["step 1"]}.get(call, [])
    with follower_of(served).ends._cond:  # as the thread has it for a moment when it wakes
        pid = child(lambda: getattr(served, call)(*arguments) is None)
    assert ends_soon(pid)
    served.close()


def test_a_forked_child_reads_and_follows_from_its_first_lookup_on(job):
    served = InferenceEmbedding.open(job.folder, num_threads=2)
    served.follow(0.01)
    served.unfollow()
    served.follow(30.0)  # the parent's thread does nothing
    follower_of(served).seconds = 0.01
    pid = child(lambda: answer(served) == 1 and wait_for(lambda: answer(served) == 2))
    job.save()
    assert ended_well(pid)
    served.close()


def test_a_child_forked_while_a_file_is_made_keeps_no_lock(job, monkeypatch):
    served = InferenceEmbedding.open(job.folder)
    job.save()
    building, (read, wrote) = Building(monkeypatch), os.pipe()
    thread = threading.Thread(target=served.refresh)
    thread.start()
    assert building.begun.wait(PATIENCE_S)
    pid = child(lambda: os.read(read, 1) == b"x" and answer(served) == 1)
    building.go.set()
    ended(thread)
    assert answer(served) == 2
    assert answer(InferenceEmbedding.open(job.folder, dtype="float16")) == 2  # needs the lock
    os.write(wrote, b"x")
    assert ended_well(pid)


def test_many_tables_have_a_file_of_a_name_that_disks_take(tmp_path):
    embedding = oneemb.MultiTableEmbedding(
        "wide", 1, torch.float32, torch.int64, [oneemb.make_table(None)] * 300,
        oneemb.make_device_mem_store_options(str(tmp_path)),
    )  # fmt: skip
    embedding.save_snapshot("one")
    for tables in (list(range(299)), list(range(1, 300))):
        served = InferenceEmbedding.open(str(tmp_path), tables=tables)
        assert served(torch.zeros(2, 299, dtype=torch.int64)).shape == (2, 299, 1)
    assert len([name for name in os.listdir(tmp_path / "serving") if name.endswith(".serving")]) == 2


def serve(folder, seed, dtype, ends):
    """What a serving process does until it is told to end: versions are whole, and move forward but for a rollback."""
    rng, last = random.Random(seed), 0
    served = InferenceEmbedding.open(folder, dtype=dtype, num_threads=1)
    served.follow(0.002)
    while not os.path.exists(ends):
        if rng.random() < 0.02:
            try:
                served.rollback(f"step {max(1, last - rng.randrange(3))}")
            except StorageError as error:
                assert "step" in str(error)
            served.follow(0.002)
            last = 0
        if rng.random() < 0.02:
            served.close()
            served, last = InferenceEmbedding.open(folder, dtype=dtype, num_threads=1), 0
            served.follow(0.002)
        now = answer(served)
        assert now >= last, (now, last)
        last = now
    served.close()
    return True


@pytest.mark.slow
def test_processes_open_follow_roll_back_and_are_killed_beside_a_job_that_removes_snapshots(tmp_path, seed):
    rng, job, ends = random.Random(seed), Job(tmp_path / "job"), str(tmp_path / "ends")
    job.save()
    begin = [child(lambda n=n: serve(job.folder, n, "float32" if n % 2 else "int8", ends)) for n in range(3)]
    try:
        for step in range(2, 40):
            job.save(delta=step % 3 == 1)
            if step % 3 == 0 and step > 6:
                job.remove(step - 4)
            victim = child(lambda step=step: serve(job.folder, step, rng.choice(["float32", "float16"]), ends))
            time.sleep(rng.random() * 0.2)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    finally:
        open(ends, "w").close()
    assert [ended_well(pid) for pid in begin] == [True] * 3
    served = InferenceEmbedding.open(job.folder, verify=True)
    assert answer(served) == 39
    InferenceEmbedding.open(job.folder, dtype="float16", verify=True).close()
    left = os.listdir(os.path.join(job.folder, "serving"))
    assert len([name for name in left if name.endswith(".serving")]) <= 9
    assert not [name for name in left if name.endswith("float16.tmp")]
