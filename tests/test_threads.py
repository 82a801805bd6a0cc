"""One thread trains; others save, export, evaluate and look: both get what they would have got alone."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import oneemb
from oneemb.rows import export_rows as row_export
from oneemb.storage.locking import step_lock
from oneemb.storage.locking.step_lock import StepLock, alone, in_step, while_held
from tests.support.forks import run_code
from tests.support.inside import dirty_keys_of, train_state_of
from tests.support.interrupts import WAYS, count_lines, interrupt_soon, interrupted
from tests.support.models import make_embedding
from tests.support.pairwise import covering

STEPS = 25

pytestmark = pytest.mark.filterwarnings("ignore:.*snapshots of earlier checkpoints")


class Model(oneemb.TrainGraph):
    def __init__(self, path, store):
        super().__init__()
        torch.manual_seed(0)
        # A third of the rows fits in the caches, so that they move while others want them.
        self.embedding = make_embedding(path, store=store, tables=2, dim=64, num_threads=2)
        self.top = torch.nn.Linear(128, 1)
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.01))

    def build(self, ids, label):
        logit = self.top(self.embedding(ids).flatten(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        return loss


class Score(oneemb.EvalGraph):
    def __init__(self, model):
        super().__init__()
        self.embedding, self.top = model.embedding, model.top

    def build(self, ids):
        return self.top(self.embedding(ids).flatten(1)).squeeze(1)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 6000, (512, 2), generator=generator), torch.randint(0, 2, (512,), generator=generator) * 1.0


def state_of(model):
    """Everything that a checkpoint holds, as bytes."""
    ids = torch.arange(6000)
    with torch.no_grad():
        model.embedding.eval()
        rows = [model.embedding(ids, torch.full_like(ids, t)).detach().numpy().tobytes() for t in range(2)]
        model.embedding.train()
    adam = model.optimizers[0].optimizer.state_dict()["state"]
    dense = [one[name].numpy().tobytes() for one in adam.values() for name in sorted(one)]
    return model.steps, model.embedding.stats()["step"], rows, dense, model.top.weight.detach().numpy().tobytes()


def beside(call, model):
    """Train, `call(n)` being called again and again by another thread; returns the losses and how often it was."""
    errors, called, stop = [], [0], threading.Event()

    def others():
        try:
            while not stop.is_set():
                call(called[0])
                called[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=others)
    losses = [model(*batch(0)).item()]  # compiled
    thread.start()
    try:
        losses += [model(*batch(step)).item() for step in range(1, STEPS)]
    finally:
        stop.set()
        thread.join()
    assert errors == []
    return losses, called[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The states after each step, and the losses."""
    model = Model(tmp_path_factory.mktemp("alone") / "rows", "device")
    losses, states = [], []
    for step in range(STEPS):
        losses.append(model(*batch(step)).item())
        states.append(state_of(model))
    model.embedding.close()
    return losses, states


@pytest.mark.parametrize(
    ("what", "store"),
    covering(["snapshot", "export", "checkpoint", "evaluate", "look"], ["ssd", "device", "host"], strength=1),
)
def test_what_another_thread_does_meanwhile_changes_no_number_and_is_of_one_moment(tmp_path, expected, store, what):
    model = Model(tmp_path / "rows", store)
    score, ids = Score(model), batch(0)[0]
    calls = {
        "snapshot": lambda n: model.embedding.save_snapshot("s", overwrite=True),
        "export": lambda n: oneemb.export_rows(model.embedding, tmp_path / "x.safetensors", overwrite=True),
        "checkpoint": lambda n: model.save(tmp_path / f"c{n % 8}", keep=1),
        "evaluate": lambda n: score(ids),
        "look": lambda n: model.embedding.stats(),
    }
    losses, called = beside(calls[what], model)
    assert called > 0 and losses == expected[0] and state_of(model) == expected[1][-1]
    if what == "snapshot":
        model.embedding.save_snapshot("s", overwrite=True)
        model.embedding.load_snapshot("s")
        assert state_of(model)[1:3] == expected[1][-1][1:3]
    if what == "checkpoint":
        for n in range(min(called, 8)):
            model.load(tmp_path / f"c{n}")
            assert state_of(model) == expected[1][model.steps - 1]
    model.embedding.close()


@pytest.mark.parametrize("taken", [alone, in_step])
def test_who_waits_for_the_end_of_a_step_has_the_lock_before_the_next_one(taken):
    lock, stop, steps, waited = StepLock(), threading.Event(), [0], []

    def step():
        steps[0] += 1
        sum(range(20000))

    def train():
        while not stop.is_set():
            taken([lock], step)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(50):
        before = steps[0]
        alone([lock], lambda before=before: waited.append(steps[0] - before))
        time.sleep(0.002)
    stop.set()
    thread.join()
    # Without giving way it takes tens of steps, each as long as the interpreter leaves a thread its lock.
    assert sorted(waited)[25] <= 3 and lock.waiting == set()


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_lets_threads_that_wait_go_first_unless_it_has_the_locks_already(monkeypatch, count):
    locks, gone_first = [StepLock() for _ in range(count)], []
    for lock in locks:
        lock.waiting.add(-1)
    monkeypatch.setattr(step_lock, "waiting_first", gone_first.append)
    in_step(locks, lambda: in_step(locks, lambda: None))
    assert sorted(map(id, gone_first)) == sorted(map(id, locks))


def test_locks_of_several_stores_are_taken_in_one_order_and_given_back():
    locks = [StepLock() for _ in range(4)]
    done = []

    def use(order):
        for _ in range(300):
            alone(order, lambda: done.append(1))

    threads = [threading.Thread(target=use, args=(order,)) for order in (locks, locks[::-1], locks[1:3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(done) == 900
    with pytest.raises(KeyError):
        alone(locks, lambda: {}["none"])
    thread = threading.Thread(target=use, args=(locks,))
    thread.start()
    thread.join(600)
    assert not thread.is_alive(), "an error in the block gives the locks back"


def test_more_locks_than_python_calls_nest_are_taken_and_given_back():
    locks = [StepLock() for _ in range(4 * sys.getrecursionlimit())]

    def held():
        return all(lock.lock._is_owned() for lock in locks)

    assert alone(locks, lambda: alone(locks[::-1], held)) and not any(lock.lock._is_owned() for lock in locks)
    plain = [threading.Lock() for _ in range(4 * sys.getrecursionlimit())]
    assert while_held(plain, lambda: all(lock.locked() for lock in plain))
    assert not any(lock.locked() for lock in plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("taken", "count"), [(alone, 3), (in_step, 3), (in_step, 1)])
def test_an_interrupt_at_any_line_of_taking_locks_leaves_none_taken(way, taken, count):
    locks = [StepLock() for _ in range(count)]

    def use():
        taken(locks, lambda: while_held([threading.Lock()], lambda: 1))

    for at in range(1, count_lines(use, way) + 1):
        stopped, place = interrupted(use, at, way)
        free = not any(lock.lock._is_owned() or lock.waiting for lock in locks)
        assert stopped and free, place


def test_locks_that_are_waited_for_are_given_up_where_the_wait_is_interrupted():
    locks = sorted((StepLock() for _ in range(3)), key=id)
    thread, go_on = held(locks[1])
    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
        alone(locks, lambda: None)
    assert not any(lock.lock._is_owned() or threading.get_ident() in lock.waiting for lock in locks)
    go_on.set()
    thread.join()
    assert alone(locks, lambda: 1) == 1


def test_training_in_a_thread_goes_on_when_the_main_thread_has_ended(tmp_path):
    code = f"""
import sys, threading
sys.path.insert(0, {os.getcwd()!r})
import pathlib
from tests.test_threads import Model, batch
model = Model(pathlib.Path({str(tmp_path)!r}) / "rows", "ssd")
def train():
    threading.main_thread().join()
    for step in range(30):
        model(*batch(step))
    model.save({str(tmp_path / "c")!r})
    model.embedding.load_snapshot(model.embedding.snapshots()[0])
    print(model.steps, model.embedding.stats()["step"], flush=True)
threading.Thread(target=train).start()
"""
    ended = python(code)
    assert ended.stdout == "30 30\n", ended.stderr


def python(code):
    """Result of the code in a process of its own, which ends as Python does."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def test_the_first_graph_that_a_process_traces_is_freed_like_the_others(tmp_path):
    code = f"""
import gc, pathlib, sys, weakref
sys.path.insert(0, {os.getcwd()!r})
from tests.test_threads import Model, batch
for turn in range(2):
    model = Model(pathlib.Path({str(tmp_path)!r}) / "rows", "host")  # LockedError if the one before still lives
    model(*batch(0))
    store = weakref.ref(model.embedding.store)
    del model
    gc.collect()
    print(store() is None)
"""
    ended = run_code(code)
    assert ended.stdout == "True\nTrue\n", ended.stderr


def test_a_graph_that_is_dropped_is_freed_here(tmp_path):
    model = Model(tmp_path / "rows", "device")
    model(*batch(0))
    store = weakref.ref(model.embedding.store)
    del model
    gc.collect()
    assert store() is None


def test_marks_that_come_while_rows_are_listed_have_room(tmp_path):
    """The list has room for the rows that were marked when they were counted."""
    embedding = make_embedding(tmp_path / "rows", store="ssd", dim=4)
    embedding(torch.arange(200))
    tier = embedding.store.hot
    tier.dirty_S[:] = False
    tier.dirty_S[:10] = True
    items = tier.index.items

    def mark_meanwhile():
        tier.dirty_S[:200] = True
        return items()

    tier.index.items = mark_meanwhile
    table_N, id_N, slot_N = dirty_keys_of(tier)
    del tier.index.items
    assert sorted(slot_N.tolist()) == list(range(10)) and len(table_N) == len(id_N) == 10
    assert np.array_equal(tier.index.find(table_N, id_N), slot_N)
    embedding.close()


def held(lock):
    """A thread that holds a lock of steps until the event is set."""
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: alone([lock], lambda: (begun.set(), go_on.wait(600))))
    thread.start()
    begun.wait()
    return thread, go_on


CALLS = {
    "import": lambda embedding: oneemb.import_rows(embedding, (np.arange(3), np.ones((3, 4), np.float32))),
    "save": lambda embedding: embedding.save_snapshot("t"),
    "load": lambda embedding: embedding.load_snapshot("s"),
    "clear": lambda embedding: embedding.clear(),
    "optimizer": lambda embedding: oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding]),
    "close": lambda embedding: embedding.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_takes_or_replaces_rows_waits_for_the_step_of_another_thread(tmp_path, call):
    embedding = make_embedding(tmp_path / "rows")
    embedding(torch.arange(3))
    embedding.save_snapshot("s")

    step, go_on = held(embedding.store.step_lock)
    thread = threading.Thread(target=CALLS[call], args=(embedding,))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    go_on.set()
    thread.join(600)
    step.join()
    assert not thread.is_alive()
    embedding.close()


def test_making_the_tiers_anew_leaves_the_snapshot_of_an_export_that_goes_on(tmp_path, monkeypatch):
    embedding = make_embedding(tmp_path / "rows")
    oneemb.import_rows(embedding, (np.arange(30), np.ones((30, 4), np.float32)))
    honest = row_export.make_persistent_table_reader

    def attach_first(*args, **options):
        oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=1.0), [embedding])
        return honest(*args, **options)

    monkeypatch.setattr(row_export, "make_persistent_table_reader", attach_first)
    assert oneemb.export_rows(embedding, tmp_path / "x.npz") == 30
    assert embedding.snapshots() == []
    embedding.close()


def test_an_import_with_state_is_whole_beside_a_step_of_another_thread(tmp_path):
    source = make_embedding(tmp_path / "source")
    optimizer = oneemb.Optimizer(torch.optim.Adam(source.parameters(), lr=0.1), [source])
    for _ in range(5):
        source(torch.arange(10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    oneemb.export_rows(source, tmp_path / "x.npz", with_state=True)
    target = make_embedding(tmp_path / "target")
    optimizer = oneemb.Optimizer(torch.optim.Adam(target.parameters(), lr=0.1), [target])

    def step():
        target(torch.tensor([99])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = []

    def step_meanwhile(done, rows):
        if done == 5:
            steps.append(threading.Thread(target=step))
            steps[0].start()
            steps[0].join(0.3)
            assert steps[0].is_alive(), "the step came into the middle of the import"

    oneemb.import_rows(target, tmp_path / "x.npz", with_state=True, batch_size=5, progress=step_meanwhile)
    steps[0].join(600)
    assert target.stats()["step"] == 6
    source.close(), target.close()


BAGS = {"offsets": torch.tensor([0, 2, 4])}


@pytest.mark.parametrize(
    ("how", "store"), covering(["gradient", "bags", "no gradient", "eval"], ["device", "ssd"], strength=1)
)
def test_a_lookup_waits_for_the_rows_that_another_thread_is_writing(tmp_path, store, how):
    embedding = make_embedding(tmp_path / "rows", store=store)
    oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    embedding(torch.arange(4))
    embedding.train(how != "eval")

    def look():
        with torch.set_grad_enabled(how in ("gradient", "bags")):
            embedding(torch.arange(4), **(BAGS if how == "bags" else {}))

    thread = threading.Thread(target=look)
    with embedding.store.writing:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(600)
    assert not thread.is_alive()
    embedding.close()


def test_an_update_does_not_wait_for_rows_that_another_thread_reads_from_disk(tmp_path, monkeypatch):
    embedding = make_embedding(tmp_path / "rows", store="ssd")
    embedding(torch.arange(4))
    table, read = embedding.store.rows.bottom_store, []
    honest = table.get

    def get(*args):
        read.append(embedding.store.writing.locked())
        return honest(*args)

    monkeypatch.setattr(table, "get", get)
    embedding.eval()
    embedding(torch.arange(100))
    assert read == [False]
    embedding.close()


def test_ctrl_c_ends_the_wait_of_a_lookup_for_the_turn_of_another_thread(tmp_path):
    embedding = make_embedding(tmp_path / "rows")
    oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), [embedding])
    begun, go_on = threading.Event(), threading.Event()

    def take_a_turn():
        with embedding.store.store_lock:
            begun.set()
            go_on.wait(600)

    thread = threading.Thread(target=take_a_turn)
    thread.start()
    begun.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_soon()
            embedding(torch.arange(4))
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()
    embedding(torch.arange(4)).sum().backward()
    assert embedding.store.stats()["device"]["pinned"] == 4
    embedding.close()


@pytest.mark.parametrize("who", ["hook", "scheduler", "signal", "eager hook"])
def test_a_save_in_the_middle_of_a_step_of_its_own_thread_is_refused(tmp_path, who):
    model = Model(tmp_path / "rows", "device")
    optimizer = model.optimizers[0].optimizer
    if who != "scheduler":
        model(*batch(0))

    def save(*_):
        model.save(tmp_path / "c")

    with pytest.raises(RuntimeError, match="save was called in the middle of a step.*handler can set a flag"):
        if who == "scheduler":
            scheduler = torch.optim.lr_scheduler.LambdaLR(model.optimizers[0].optimizer, lambda step: 1.0)
            scheduler.step = save
            train_state_of(model).lr_schedulers[0] = scheduler
            try:
                model(*batch(1))
            finally:
                del scheduler.step
        elif who == "signal":
            before = signal.signal(signal.SIGALRM, save)
            model.top.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGALRM))
            try:
                model(*batch(1))
            finally:
                signal.signal(signal.SIGALRM, before)
        else:
            optimizer.register_step_pre_hook(save)
            if who == "eager hook":
                model.embedding(batch(1)[0]).sum().backward()
            (model.optimizers[0].step if who == "eager hook" else lambda: model(*batch(1)))()
    assert not (tmp_path / "c").exists() and model.embedding.snapshots() == []
    save()
    model.embedding.close()


ENDING = """
import atexit, signal, sys, threading
sys.path.insert(0, {here!r})
import torch
from tests.test_threads import Model, batch
model = Model({path!r} + "/rows", {store!r})
def save(*_):
    model.save({path!r} + "/c")
    print("saved", model.steps)
model(*batch(0))
"""
WAYS = {
    "at exit": "atexit.register(save)",
    "after the main thread": "threading.Thread(target=lambda: (threading.main_thread().join(), save())).start()",
    # A signal that comes while a loop of a lookup is about to wake its threads.
    "within a lookup": """
from oneemb.kernels import threads
signal.signal(signal.SIGALRM, save)
honest = threads.Threads.shares_of
def shares_of(self, *range_and_least):
    threads.Threads.shares_of = honest
    signal.raise_signal(signal.SIGALRM)
    return honest(self, *range_and_least)
threads.Threads.shares_of = shares_of
model.embedding(batch(0)[0].repeat(2000, 1))
assert threads.Threads.shares_of is honest
""",
}


# That a thread saves when the main thread has ended, the test of training there sees as well.
FAST = [("at exit", "ssd"), ("within a lookup", "device")]


@pytest.mark.parametrize(
    ("way", "store"),
    [its if its in FAST else pytest.param(*its, marks=pytest.mark.slow)
     for its in itertools.product(WAYS, ["device", "ssd"])],
)  # fmt: skip
def test_a_save_as_the_program_ends_or_in_the_middle_of_a_lookup_is_made(tmp_path, store, way):
    code = ENDING.format(here=os.getcwd(), path=str(tmp_path), store=store) + WAYS[way]
    ended = run_code(code) if way == "within a lookup" else python(code)
    assert (ended.returncode, ended.stdout) == (0, "saved 1\n"), ended.stderr
    again = Model(tmp_path / "rows", store)
    again.load(tmp_path / "c")
    assert again.steps == 1 and again.embedding.stats()["rows"] > 0
    again.embedding.close()


def test_ctrl_c_while_numba_looks_at_functions_of_python_comes_when_it_has(tmp_path):
    """Numba's registries are generators, which an interrupt would end for ever: in a process of its own."""
    code = f"""
import sys, signal
sys.path.insert(0, {os.getcwd()!r})
from numba.core.registry import cpu_target
from tests.test_threads import Model, batch
model = Model({str(tmp_path / "rows")!r}, "device")
honest, asked = cpu_target.typing_context.refresh, []
def refresh():
    if not asked:
        asked.append(1)
        signal.raise_signal(signal.SIGINT)
        asked.append(2)
    honest()
cpu_target.typing_context.refresh = refresh
try:
    model(*batch(0))
except KeyboardInterrupt:
    print(asked)
model(*batch(0))
"""
    ended = run_code(code)
    assert (ended.returncode, ended.stdout) == (0, "[1, 2]\n"), ended.stderr


DROPPED_AS_A_THREAD_BEGINS = """
import gc, sys, tempfile, threading, torch, oneemb

path = tempfile.mkdtemp()

def make():
    options = oneemb.make_cached_ssd_store_options(1, path)
    return oneemb.MultiTableEmbedding("a", 4, torch.float32, torch.int64, [oneemb.make_table()], options)

class Collects:
    collected = False

    def locked(self):  # asked while a thread begins, which holds a lock of `threading` that ending a thread needs
        if not self.collected:
            self.collected = True
            gc.collect()
        return True

    def acquire(self):
        pass

    release = acquire

def loop():
    embedding = make()
    for first in range(0, 100_000, 5_000):  # more than the cache holds, so that a thread writes rows
        embedding(torch.arange(first, first + 5_000)[:, None])
    yield
    graph = [embedding]
    graph.append(graph)

gc.disable()
for _ in loop():
    pass
threading._shutdown_locks.add(Collects())
threading.Thread(target=int).start()
deadline = 100
while True:
    try:
        make().close()
        break
    except oneemb.StorageError:
        deadline -= 1
        assert deadline, "the path is still taken"
        threading.Event().wait(0.1)
threading._shutdown_locks.clear()
print("freed")
"""


@pytest.mark.skipif(not hasattr(threading, "_shutdown_locks"), reason="this Python has other locks of threads")
def test_an_embedding_that_is_collected_while_a_thread_begins_is_closed():
    done = run_code(DROPPED_AS_A_THREAD_BEGINS)
    assert done.stdout == "freed\n", done.stderr
