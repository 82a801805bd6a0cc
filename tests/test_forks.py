"""A child of fork reads the rows that its parent had and changes nothing; the parent goes on as before."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import Future

import numpy as np
import pytest
import torch

import oneemb
from oneemb.kernels.jit import compiling
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import ForkedProcessError
from oneemb.storage.locking import signals_deferred
from oneemb.storage.locking.store_lock import StoreLock, whole
from oneemb.storage.table.persistent_table import PersistentTable
from tests.support.interrupts import holds_no_signal
from tests.support.keys import read_rows
from tests.support.models import make_embedding
from tests.support.table_model import put_random

FORK = multiprocessing.get_context("fork")
IDS = torch.arange(12000)[:, None]
STORES = {
    "device": lambda path: oneemb.make_device_mem_store_options(path),
    "host": lambda path: oneemb.make_cached_host_mem_store_options(1, path),
    "ssd": lambda path: oneemb.make_cached_ssd_store_options(1, path),
    "remote": lambda path: oneemb.make_cached_remote_store_options(f"memory://{path}", 1, path),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:embedding 'forked' starts empty"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(
    params=[store if store in ("device", "ssd") else pytest.param(store, marks=pytest.mark.slow) for store in STORES]
)
def model(request, tmp_path):
    """An embedding of 64 weights, of which a cache of 1 MiB holds a third, and its optimizer; all rows trained."""
    embedding = oneemb.MultiTableEmbedding(
        "forked", 64, torch.float32, torch.int64, [oneemb.make_table()], STORES[request.param](str(tmp_path / "rows")),
        num_threads=2,
    )  # fmt: skip
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
    for begin in range(0, len(IDS), 500):
        train(embedding, optimizer, IDS[begin : begin + 500])
    yield embedding, optimizer
    embedding.close()


def train(embedding, optimizer, ids):
    embedding(ids).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def rows(embedding, ids=IDS):
    embedding.eval()
    try:
        return embedding(ids).detach().numpy().tobytes()
    finally:
        embedding.train()


def in_child(function, timeout=600):
    """Result of a function that a forked child runs; the child must end, however slow the machine is."""
    ours, childs = FORK.Pipe(duplex=False)

    def run():
        try:
            childs.send((True, function()))
        except BaseException:
            childs.send((False, traceback.format_exc()))

    while True:
        child = FORK.Process(target=run)
        try:
            child.start()
            break
        except RuntimeError as error:  # filelock, which torch imports, lets one thread at a time fork.
            if "filelock" not in str(error):
                raise
    childs.close()
    try:
        assert ours.poll(timeout), "the child hangs"
        done, found = ours.recv()
        assert done, found
        return found
    finally:
        child.kill()
        child.join()


def test_a_child_reads_what_the_parent_had_and_the_parent_goes_on(model):
    embedding, optimizer = model
    before = rows(embedding)
    assert in_child(lambda: rows(embedding)) == before
    # A child of the child too.
    assert in_child(lambda: in_child(lambda: rows(embedding))) == before
    train(embedding, optimizer, IDS[::9])
    assert rows(embedding) != before
    assert in_child(lambda: rows(embedding)) == rows(embedding)
    embedding.save_snapshot("after")
    expected = rows(embedding)
    embedding.load_snapshot("after")
    assert rows(embedding) == expected


def test_a_child_that_would_change_rows_is_refused_and_told_what_to_do(model):
    embedding, optimizer = model
    embedding.save_snapshot("child")
    before = rows(embedding)
    calls = {
        "a lookup that trains": lambda: embedding(IDS),
        "a lookup of an id in training mode": lambda: embedding(torch.tensor([[-5]])),
        "save": lambda: embedding.save_snapshot("child", overwrite=True),
        "load": lambda: embedding.load_snapshot("child"),
        "clear": lambda: embedding.clear(),
        "delete": lambda: embedding.delete_snapshot("child"),
    }

    def try_all():
        said = {}
        for name, call in calls.items():
            try:
                call()
                said[name] = "nothing"
            except ForkedProcessError as error:
                said[name] = str(error)
        return said, rows(embedding)

    said, read = in_child(try_all)
    assert read == before
    for name, message in said.items():
        assert f"belongs to process {os.getpid()}" in message and "spawn" in message, (name, message)
    train(embedding, optimizer, IDS[::9])


def test_a_child_that_closes_or_drops_the_embedding_takes_nothing_from_the_parent(model):
    embedding, optimizer = model
    before = rows(embedding)

    def close():
        embedding.close()
        embedding.store = None
        return True

    assert in_child(close) is True
    assert rows(embedding) == before
    train(embedding, optimizer, IDS[::9])
    path = embedding.store.plan.persistent_path
    with pytest.raises(oneemb.LockedError, match="is held by embedding 'forked' of this process"):
        oneemb.MultiTableEmbedding(
            "other", 64, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options(path)
        )


def test_workers_of_a_data_loader_read_rows(model):
    embedding, _ = model

    class Scored(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, i):
            return embedding(IDS[i * 500 : (i + 1) * 500]).sum(-1)

    embedding.eval()
    expected = [Scored()[i] for i in range(24)]
    loader = torch.utils.data.DataLoader(Scored(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for got, wanted in zip(loader, expected, strict=True):
        assert torch.equal(got, wanted)


def test_forks_while_other_threads_train_are_whole(model):
    embedding, optimizer = model
    stop = threading.Event()
    failed = []

    def go_on():
        rng = np.random.default_rng(0)
        try:
            while not stop.is_set():
                train(embedding, optimizer, torch.from_numpy(rng.integers(0, 12000, (200, 1))))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go_on)
    embedding.train()
    thread.start()
    try:
        # Not with eval(), which is the other thread's mode as well.
        table_U, id_U = np.zeros(12000, np.int32), np.arange(12000)
        for _ in range(5):
            assert in_child(lambda: bool(np.isfinite(read_rows(embedding.store, table_U, id_U)).all()))
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_a_fork_in_the_middle_of_a_call_waits_for_its_end(model):
    embedding, _ = model
    store = embedding.store
    begun, end = threading.Event(), threading.Event()

    def hold():
        with store.store_lock:
            begun.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    timer = threading.Timer(0.2, end.set)
    timer.start()
    assert in_child(lambda: len(rows(embedding)) > 0) is True
    thread.join()
    timer.join()


def test_a_step_of_a_lookup_from_before_the_fork_is_refused_in_the_child(model):
    embedding, optimizer = model
    embedding(IDS[:100]).square().sum().backward()

    def step():
        try:
            optimizer.step()
            optimizer.zero_grad()
        except ForkedProcessError as error:
            return str(error)

    assert "belongs to process" in in_child(step)
    optimizer.step()
    optimizer.zero_grad()


def test_a_scan_that_a_child_closes_leaves_the_parents_files(tmp_path):
    options = dict(row_width=40, physical_block_size=512, chunk_bytes=1)
    with PersistentTable.open(tmp_path / "t", threads=Threads(1), **options) as table:
        rows = {}
        put_random(table, rows, np.random.default_rng(0), 3000)
        table.flush()
        scan = table.scan(100)
        found = dict.fromkeys(zip(*(array.tolist() for array in next(scan)[:2]), strict=True))
        table.clear()
        assert in_child(lambda: scan.close()) is None
        for table_N, id_N, _ in scan:
            found.update(dict.fromkeys(zip(table_N.tolist(), id_N.tolist(), strict=True)))
        assert found.keys() == rows.keys()


def held_elsewhere(block, go_on=None):
    """A thread that stays in a block for a while, or until `go_on` is set, and has entered it."""
    begun = threading.Event()

    def stay():
        with block:
            begun.set()
            time.sleep(0.3) if go_on is None else go_on.wait(600)

    thread = threading.Thread(target=stay)
    thread.start()
    begun.wait()
    return thread


@pytest.mark.parametrize("what", ["an update", "a compiled loop", "a trace"])
def test_a_fork_waits_for_what_a_child_could_not_do_without(model, what):
    embedding, _ = model
    expected = rows(embedding)
    if what == "an update":
        counts = [0, 0]

        class Update:
            """As that of rows: half of it is done before the other."""

            def __enter__(self):
                self.block = whole((embedding.store.store_lock,))
                self.block.__enter__()
                counts[0] += 1

            def __exit__(self, *error):
                counts[1] += 1
                self.block.__exit__(*error)

        thread = held_elsewhere(Update())
        assert in_child(lambda: counts) == [1, 1]
    elif what == "a compiled loop":
        thread = held_elsewhere(compiling)
        assert in_child(lambda: compiling.acquire()) is None
    else:
        begun = threading.Event()

        def build(self, ids):
            begun.set()
            time.sleep(0.3)
            return self.embedding(ids).sum(1)

        graph = type("Slow", (oneemb.EvalGraph,), {"build": build})()
        graph.embedding = embedding
        thread = threading.Thread(target=lambda: graph(IDS[:2]))
        thread.start()
        begun.wait()
        assert in_child(lambda: (rows(embedding) == expected, bool(graph(IDS[:2]).isfinite().all()))) == (True, True)
    thread.join()
    assert rows(embedding) == expected


def test_a_child_that_got_no_whole_copy_says_so(model, monkeypatch):
    embedding, _ = model
    monkeypatch.setattr(signals_deferred, "_FORK_PATIENCE", 0.1)
    go_on = threading.Event()
    thread = held_elsewhere(embedding.store.store_lock, go_on)

    def read():
        with pytest.raises(ForkedProcessError, match="got no complete copy"):
            rows(embedding)
        return True

    assert in_child(read) is True
    go_on.set()
    thread.join()
    assert len(rows(embedding)) > 0
    assert in_child(lambda: len(rows(embedding)) > 0) is True


def test_a_fork_beside_the_first_lookup_is_whole(tmp_path, monkeypatch):
    embedding = oneemb.MultiTableEmbedding(
        "forked", 4, torch.float32, torch.int64, [oneemb.make_table()],
        oneemb.make_device_mem_store_options(str(tmp_path / "rows")),
    )  # fmt: skip
    begun, open_table = threading.Event(), PersistentTable.open

    def slow(*args, **kwargs):
        begun.set()
        time.sleep(0.3)
        return open_table(*args, **kwargs)

    monkeypatch.setattr(PersistentTable, "open", slow)
    thread = threading.Thread(target=lambda: embedding(IDS[:3]))
    thread.start()
    begun.wait()
    assert in_child(lambda: len(rows(embedding, IDS[:3]))) == 3 * 4 * 4
    thread.join()
    embedding.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_fork_does_not_wait_for_what_lets_others_have_turns(tmp_path, waits):
    """A block may let others have the lock meanwhile, as compaction does. A fork does not wait for such a block, except
    if another thread waits for it inside a block of its own."""
    object_ = StoreLock("the object", "make it anew", rank=0)
    begun, waits_now, go_on, ended = threading.Event(), threading.Event(), threading.Event(), []

    def long():
        with object_:
            with object_.others_allowed():
                begun.set()
                go_on.wait(600)
            ended.append("long")
            object_.lock.notify_all()

    def waiting():
        with object_:
            waits_now.set()
            while not ended:
                object_.lock.wait()
            ended.append("waiting")

    threads = [threading.Thread(target=long)]
    threads[0].start()
    begun.wait()
    if waits:
        threads.append(threading.Thread(target=waiting))
        threads[1].start()
        waits_now.wait()
        threading.Timer(0.3, go_on.set).start()
    # A fork that waits for its whole patience has no complete copy, which `check` says.
    assert in_child(lambda: (list(ended), object_.check(changes=False))) == (["long", "waiting"] if waits else [], None)
    go_on.set()
    for thread in threads:
        thread.join()
    assert ended == ["long", "waiting"][: 1 + waits]


def test_threads_that_fork_at_once_take_turns(model):
    embedding, _ = model
    found, table_U, id_U = [], np.zeros(100, np.int32), np.arange(100)

    def fork():
        for _ in range(4):
            found.append(in_child(lambda: read_rows(embedding.store, table_U, id_U).tobytes()))

    threads = [threading.Thread(target=fork) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and len(set(found)) == 1


def test_a_child_keeps_what_was_on_its_way_to_the_disk_while_the_parent_goes_on(tmp_path):
    """Rows that wait in memory for the disk are a copy, though the parent fills that memory anew."""
    embedding = make_embedding(tmp_path / "rows", store="ssd", dim=64)
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), [embedding])
    for begin in range(0, len(IDS), 500):
        train(embedding, optimizer, IDS[begin : begin + 500])
    expected, go_on = rows(embedding), FORK.Event()
    found, childs = FORK.Pipe(duplex=False)

    def read():
        go_on.wait(600)
        childs.send(rows(embedding) == expected)

    child = FORK.Process(target=read)
    child.start()
    for _ in range(3):  # more than all the memory that waits for the disk
        for begin in range(0, len(IDS), 500):
            train(embedding, optimizer, IDS[begin : begin + 500])
    go_on.set()
    assert found.poll(600) and found.recv() is True
    child.join()
    embedding.close()


def test_a_child_waits_for_no_thread_that_was_writing_at_the_fork(tmp_path, monkeypatch):
    """A future's lock, held while its result is set, would stay held in the child."""
    inside, go_on, set_result = threading.Event(), threading.Event(), Future.set_result

    def slowly(future, result):
        if threading.current_thread().name.startswith("oneemb-write") and not go_on.is_set():
            with future._condition:
                inside.set()
                go_on.wait(0.5)
        set_result(future, result)

    monkeypatch.setattr(Future, "set_result", slowly)
    table = PersistentTable.open(tmp_path / "t", row_width=64, threads=Threads(1))
    table.put(np.zeros(20000, np.int32), np.arange(20000), np.ones((20000, 64), np.float32))
    assert inside.wait(600)

    def read():
        row_UW = np.zeros((5, 64), np.float32)
        table.get(np.zeros(5, np.int32), np.arange(5), row_UW)
        return float(row_UW.min())

    assert in_child(read) == 1
    go_on.set()
    table.close()


def test_what_the_collector_closes_while_a_loop_is_compiled_waits_for_no_fork(tmp_path):
    """Whoever compiles holds a lock that a fork waits for, and may take a store lock: of a table that is dropped."""
    table = PersistentTable.open(tmp_path / "t", row_width=4, threads=Threads(1))
    holds, forking, forked = threading.Event(), threading.Event(), []

    def compile_something():
        with compiling:
            holds.set()
            forking.wait()
            time.sleep(0.2)
            table.close()

    def fork():
        holds.wait()
        forking.set()
        forked.append(in_child(lambda: 7))

    threads = [threading.Thread(target=one, daemon=True) for one in (compile_something, fork)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert forked == [7]


COLLECTS_EARLY = """
import gc, os, sys
os.register_at_fork(after_in_child=gc.collect)  # runs before oneemb's hook, as hooks of threading and logging do
import numpy as np
from oneemb.kernels.threads import Threads, close_when_dropped
from oneemb.storage.table.persistent_table import PersistentTable
gc.disable()
table, keys = PersistentTable.open(sys.argv[1], row_width=4, threads=Threads(1)), (np.zeros(9, np.int32), np.arange(9))
table.put(*keys, np.ones((9, 4), np.float32))
owner = type("Owner", (), {})()
owner.itself = owner
close_when_dropped(owner, table)
del owner
child = os.fork()
missing = int(table.get(*keys, np.empty((9, 4), np.float32)).sum())  # an error if the table is closed
if child == 0:
    os._exit(missing)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + missing)
"""


def test_what_the_collector_drops_in_a_child_before_our_hook_closes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COLLECTS_EARLY, str(tmp_path / "t")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_a_fork_waits_comes_after_it(monkeypatch):
    begun, forks, ours, childs = threading.Event(), threading.Event(), *FORK.Pipe(duplex=False)
    wait_for_others = signals_deferred.signals_deferred.wait_for_others

    def stay():
        with whole(()):
            begun.set()
            assert forks.wait(600)
            os.kill(os.getpid(), signal.SIGINT)
            while holds_no_signal():
                time.sleep(0.001)

    def wait(end):
        forks.set()
        wait_for_others(end)

    assert in_child(lambda: 1) == 1  # a fork before, that found everything free
    monkeypatch.setattr(signals_deferred.signals_deferred, "wait_for_others", wait)
    thread = threading.Thread(target=stay)
    thread.start()
    begun.wait()
    with pytest.raises(KeyboardInterrupt):
        if os.fork() == 0:
            childs.send(os.getpid())
            os._exit(0)
        for _ in range(60_000):  # The interrupt does not end a longer sleep.
            time.sleep(0.01)
    assert ours.poll(600) and os.waitpid(ours.recv(), 0)[1] == 0
    thread.join()
