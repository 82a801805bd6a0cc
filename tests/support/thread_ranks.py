"""Ranks that are threads of one process, and that can be killed at any file call.

def saves(ranks, root): ...                     runs on each rank; `ranks` is what an embedding takes as process_group

run_ranks(3, saves, root)                       what it gave on ranks 0, 1 and 2

A killed rank (`Killed` is raised in its thread, and from then on by every file call in it) leaves what it wrote; the
others see what a broken connection gives. What they hold open is given up as the system does it for a dead process.
"""

import gc
import os
import shutil
import threading
from contextlib import contextmanager
from typing import NamedTuple

import torch

from oneemb.graph.ranks import RankError, Ranks, ranks_of
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.locking.signals_deferred import signals_deferred

SECONDS = 60
CHANGES = ("make_directories", "create", "write", "sync", "truncate", "rename", "remove", "sync_directory")


class Killed(BaseException):
    """Not an Exception: no handler of errors may swallow it."""


class Torn(NamedTuple):
    """An exchange in which a rank dies when it has sent to some of the others and not to all."""

    at: int
    """Which of the exchanges of the counted block, from 0."""
    dead: int
    unheard: frozenset
    """The ranks to which it has not sent: they see a broken connection, the others go on until the next exchange."""
    calls: "FaultyCalls"


class _Meeting:
    def __init__(self, size, torn=None):
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.slots = [None] * size
        self.torn, self.met, self.over = torn, [0] * size, False


class ThreadRanks:
    """As `oneemb.graph.ranks.Ranks`."""

    alone, forked, whole = False, False, signals_deferred
    gradients, comm_dtype = "mean", torch.float32

    def __init__(self, meeting, rank, size):
        self._meeting, self.rank, self.size = meeting, rank, size
        self.group, self.first = self, rank == 0

    def _meet(self, value):
        meeting = self._meeting
        try:
            if meeting.over:
                raise threading.BrokenBarrierError
            meeting.slots[self.rank] = value
            meeting.barrier.wait()
            of_all = list(meeting.slots)
            if self._is_torn():
                meeting.over = True
                if self.rank == meeting.torn.dead:
                    meeting.torn.calls.kill()
                if self.rank in meeting.torn.unheard:
                    raise threading.BrokenBarrierError
                return of_all
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("Connection closed by peer") from None
        return of_all

    def _is_torn(self):
        meeting = self._meeting
        if meeting.torn is None or not meeting.torn.calls.counts:
            return False
        meeting.met[self.rank] += 1
        return meeting.met[self.rank] == meeting.torn.at + 1

    def agree(self, what, check=lambda: None):
        failure = found = None
        try:
            found = check()
        except Killed:
            self._meeting.barrier.abort()
            raise
        except BaseException as error:
            failure = error
        of_all = self._meet((what, failure, found))
        if failure is not None:
            raise failure
        for rank, (_, its, _) in enumerate(of_all):
            if its is not None:
                raise RankError(f"rank {rank} has failed ({its}); nothing was done here")
        if len({doing for doing, _, _ in of_all}) > 1:
            raise RankError(f"the ranks do different things: {of_all}")
        return next((its for _, _, its in of_all if its is not None), None)

    def all_gather(self, what, make):
        mine = []
        self.agree(what, lambda: mine.append(make()))
        return self._meet(mine[0])

    by_first, of_first = Ranks.by_first, Ranks.of_first

    def exchange(self, what, make):
        """One tensor, or none, to each."""
        return [_Received(blocks[self.rank]) for blocks in self.all_gather(what, make)]


class _Received:
    def __init__(self, tensors):
        self._tensors = list(tensors)

    def take(self, count, dtype):
        tensor = self._tensors.pop(0)
        assert (len(tensor), tensor.dtype) == (count, dtype)
        return tensor


def restored_job(tmp_path):
    """The folder `job` as it was when this was first called, at the same path: checkpoints know theirs."""
    root, aside = tmp_path / "job", tmp_path / "aside"
    if aside.exists():
        shutil.rmtree(root)
        shutil.copytree(aside, root)
    else:
        shutil.copytree(root, aside)
    return root


def run_ranks(size, function, *args, patch=None, dies=(), torn=None):
    """What the function gives on each rank; raises what it raised on the first that did not end as it should.

    Args:
        patch: a pytest monkeypatch, so that embeddings take such ranks.
        dies: ranks of which `Killed` is expected, or what follows of it; what they raised is given.
        torn: an exchange in which one of them dies.
    """
    if patch is not None:
        patch.setattr(
            "oneemb.embeddings.embedding.ranks_of", lambda group, *options: group or ranks_of(group, *options)
        )
    meeting = _Meeting(size, torn)
    results, raised = [None] * size, []

    def run(rank):
        try:
            results[rank] = function(ThreadRanks(meeting, rank, size), *args)
        except BaseException as error:
            results[rank] = error
            raised.append(error)
            if isinstance(error, Killed) or not dies:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised and not dies:
        raise next((error for error in raised if "Connection closed" not in str(error)), raised[0])
    return results


class FaultyCalls:
    """Counts the file calls that change something, of each rank in `counted()`, and does something at one of them.

    Args:
        patch: a pytest monkeypatch.
        rank: at a call of which one.
        at: at which of them, from 0; None = at none.
        error: what is raised: an OSError once or on each call from then on, or `Killed`.
        once: whether only that call fails.
    """

    def __init__(self, patch, rank=0, at=None, error=Killed, once=False):
        self.calls = {}
        self._counted = set()
        self._dead = set()
        self._locks = {}
        for name in CHANGES:
            real = getattr(LocalFileSystem, name)

            def call(*args, name=name, real=real, **kwargs):
                me = threading.current_thread().name
                if self._fails(me, name, rank, at, error, once):
                    raise error() if isinstance(error, type) else error
                return real(*args, **kwargs)

            patch.setattr(LocalFileSystem, name, call)
        real_lock = LocalFileSystem.lock

        def note(fs, path, **kwargs):
            file = real_lock(fs, path, **kwargs)
            self._locks.setdefault(threading.current_thread().name, []).append((fs, file))
            return file

        patch.setattr(LocalFileSystem, "lock", note)

    def _fails(self, me, name, rank, at, error, once):
        if me not in self._counted:
            return me in self._dead and error is Killed
        if me in self._dead and error is Killed:
            return True
        count = self.calls.setdefault(me, [])
        count.append(name)
        now = len(count) - 1
        fails = me == f"rank-{rank}" and at is not None and (now == at or now > at and not once)
        if fails:
            self._dead.add(me)
        return fails

    @contextmanager
    def counted(self):
        """A block of a rank whose calls count."""
        me = threading.current_thread().name
        self._counted.add(me)
        try:
            yield
        finally:
            self._counted.discard(me)

    @property
    def counts(self):
        """Whether calls of this rank count."""
        return threading.current_thread().name in self._counted

    def kill(self):
        """Let this rank die now: no file call of it does anything any more."""
        self._dead.add(threading.current_thread().name)
        raise Killed

    @property
    def reached(self):
        """Whether the call was made."""
        return bool(self._dead)

    def of(self, rank):
        """The names of a rank's calls."""
        return self.calls.get(f"rank-{rank}", [])

    def free_locks(self):
        """Give up what ranks hold, as the system does for processes that have ended."""
        gc.collect()
        for locks in self._locks.values():
            for fs, file in locks:
                fs.unlock(file)
        self._locks.clear()


def files_in(folder):
    """Paths and sizes of all files below, without those of locks."""
    return {
        os.path.relpath(os.path.join(above, name), folder): os.path.getsize(os.path.join(above, name))
        for above, _, names in os.walk(folder) for name in names if name != "LOCK"
    }  # fmt: skip
