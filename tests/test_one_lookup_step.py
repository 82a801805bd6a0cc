"""Steps whose rows have the gradient of one lookup, which `step_one_lookup` makes, are those of `step_together`."""

import signal
import threading

import pytest
import torch

import oneemb
from oneemb.storage.locking.step_lock import StepLock, between_steps
from oneemb.training import eager
from tests.support.graph_models import make_embedding, rows_of
from tests.support.interrupts import WAYS, count_lines, interrupted

STEPS = 12


@pytest.fixture
def made(monkeypatch):
    """Results of `step_one_lookup`, in order."""
    found, step = [], eager.step_one_lookup
    monkeypatch.setattr(eager, "step_one_lookup", lambda *args: found.append(step(*args)) or found[-1])
    return found


def train(kind, *, optimizer_of, dense, skip_nonfinite=False):
    """Rows, dense weights and counts after some steps, of which `kind` says what is special; and errors."""
    torch.manual_seed(0)
    embedding, linear = make_embedding(), torch.nn.Linear(4, 1)
    parameters = [embedding.weight, *(linear.parameters() if dense else ())]
    optimizer = oneemb.Optimizer(optimizer_of(parameters), [embedding], skip_nonfinite=skip_nonfinite)
    errors, counts = [], []
    for step in range(STEPS):
        ids = torch.randint(0, 20, (5 if step != 3 else 0, 2))
        special = step % 4 == 2
        embedding.train(not (special and kind == "eval"))
        rows = embedding(ids)
        if special and kind == "two lookups":
            rows = torch.cat([rows, embedding(ids + 3)])
        loss = linear(rows).square().sum()
        if special and kind == "not finite":
            loss = loss * float("nan")
        loss.backward(retain_graph=special and kind == "two passes")
        if special and kind == "two passes":
            loss.backward()
        if special and kind == "clipped":
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        if special and kind == "another rate":
            optimizer.param_groups[0]["lr"] = 1 / (2 + step)
        handle = None
        if special and kind == "a hook":
            handle = optimizer.optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.3))
        try:
            optimizer.step()
        except ArithmeticError as error:
            errors.append(str(error))
            assert embedding.weight.grad is not None
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()
        linear.zero_grad()
        stats = embedding.stats()
        counts.append((stats["step"], stats["device"]["pinned"], stats["rows"], optimizer.taken, optimizer.skipped))
    weights = [one.detach().numpy().tobytes() for one in linear.parameters()]
    return rows_of(embedding), weights, counts, errors


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}
KINDS = "plain", "two lookups", "two passes", "clipped", "another rate", "a hook", "eval", "not finite"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_rows_weights_counts_and_errors_of_any_step(monkeypatch, made, kind, dense, name):
    how = {"optimizer_of": OPTIMIZERS[name], "dense": dense}
    found = train(kind, **how)
    others = {"plain": 0, "another rate": 0, "not finite": 0}  # steps that are left to `step_together`
    assert made.count(False) == others.get(kind, 3)
    monkeypatch.setattr(eager, "step_one_lookup", lambda *_: False)
    assert found == train(kind, **how)


def test_a_step_that_is_skipped_is_counted(monkeypatch, made):
    how = {"optimizer_of": OPTIMIZERS["adam"], "dense": True, "skip_nonfinite": True}
    found = train("not finite", **how)
    assert all(made) and found[2][-1][3:] == (STEPS - 3, 3)
    monkeypatch.setattr(eager, "step_one_lookup", lambda *_: False)
    assert found == train("not finite", **how)


def test_it_waits_until_another_thread_has_released_the_lock(made):
    embedding = make_embedding()
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), [embedding])
    held, free = threading.Event(), threading.Event()

    def hold():
        with embedding.store.step_lock.lock:
            held.set()
            free.wait(60)

    embedding(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert made.pop()
    optimizer.zero_grad()
    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    embedding(torch.tensor([[1, 2]])).sum().backward()
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive() and made == [] and embedding.store.step == 1
    assert embedding.store.step_lock.waiting == {stepping.ident}
    free.set()
    stepping.join(60)
    other.join(60)
    assert made == [True] and embedding.store.step == 2
    assert not (embedding.store.step_lock.stepping or embedding.store.step_lock.waiting)


@pytest.mark.parametrize("way", WAYS)
def test_it_leaves_no_lock_taken_where_it_is_stopped(made, way):
    embedding, lines = make_embedding(), {"functions": ("step_one_lookup", "_in_step_of_one", "_step_now")}
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), [embedding])
    step_lock = embedding.store.step_lock

    def step():
        optimizer.zero_grad()
        embedding(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()

    step()
    for at in range(1, count_lines(step, way, **lines) + 1):
        stopped, place = interrupted(step, at, way, **lines)
        assert stopped and not step_lock.lock._is_owned(), place
        between_steps([step_lock], "this", lambda: None) if at % 2 else step()
    assert at > 20 and made[-1]


@pytest.mark.parametrize("when", ["at its end", "at its beginning"])
def test_a_handler_of_a_signal_that_comes_in_it_may_save(made, monkeypatch, when):
    embedding = make_embedding()
    linear = torch.nn.Linear(4, 1)
    torchs = torch.optim.SGD([embedding.weight, *linear.parameters()], lr=0.1)
    optimizer, saved_at = oneemb.Optimizer(torchs, [embedding]), []

    def save(*_):
        embedding.save_snapshot("one")
        saved_at.append(embedding.store.step)

    store, own = embedding.store, embedding.store.store_lock.check

    def check(**how):
        if store.step_lock.stepping:
            signal.raise_signal(signal.SIGUSR1)
        own(**how)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        if when == "at its end":
            torchs.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGUSR1))
        else:
            monkeypatch.setattr(store.store_lock, "check", check)
        linear(embedding(torch.tensor([[1, 2]]))).sum().backward()
        optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert made == [True] and saved_at == [1]


def test_saving_in_the_middle_of_it_is_refused_and_leaves_the_step_complete(made):
    embedding = make_embedding()
    linear = torch.nn.Linear(4, 1)
    torchs = torch.optim.SGD([embedding.weight, *linear.parameters()], lr=0.1)
    optimizer, errors = oneemb.Optimizer(torchs, [embedding]), []

    def save(*_):
        try:
            embedding.save_snapshot("one")
        except RuntimeError as error:
            errors.append(str(error))

    torchs.register_step_post_hook(save)
    linear(embedding(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    assert made == [True] and "in the middle of a step" in errors[0]
    assert embedding.stats()["step"] == 1 and not embedding.store.step_lock.stepping
    embedding.save_snapshot("one")


@pytest.mark.parametrize("also", ["a backward pass", "zero_grad"])
def test_what_another_thread_does_to_the_gradient_meanwhile_counts(made, monkeypatch, also):
    """The other thread runs when this one asks for the lock, and has seen the gradient of its own pass."""
    embedding, other_embedding = make_embedding(), make_embedding()
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), [embedding])
    both = oneemb.Optimizer(torch.optim.SGD([other_embedding.weight], lr=0.1), [other_embedding])
    ids = torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
    embedding(ids[0]).sum().backward()
    lock, own = embedding.store.step_lock.lock, StepLock.lock

    class Late:
        def __enter__(self):
            monkeypatch.setattr(StepLock, "lock", own)
            backward = lambda: embedding(ids[1]).sum().backward()  # noqa: E731
            other = threading.Thread(target=backward if also == "a backward pass" else embedding.zero_grad)
            other.start()
            other.join(60)
            return lock.acquire()

        def __exit__(self, *error):
            lock.release()

        def _is_owned(self):
            return lock._is_owned()

    monkeypatch.setattr(StepLock, "lock", Late())
    optimizer.step()
    assert made == [False] and embedding.store.step == (also == "a backward pass")
    for one in ids:
        other_embedding(one).sum().backward()
        if also == "zero_grad":
            other_embedding.zero_grad()
            break
    both.step()
    assert rows_of(embedding) == rows_of(other_embedding)


def test_a_gradient_of_a_weight_that_was_replaced_is_refused_as_in_any_step(made):
    embedding = make_embedding()
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), [embedding])
    embedding(torch.tensor([[1, 2]])).sum().backward()
    embedding.weight = torch.nn.Parameter(torch.empty(0, embedding.embedding_dim))
    with pytest.raises(ValueError, match="one optimizer must train all tables"):
        optimizer.step()
    assert made == [False]


def test_an_error_where_gradients_are_put_back_leaves_the_lock_free(made, monkeypatch):
    embedding = make_embedding()
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), [embedding])
    embedding(torch.tensor([[1, 2]])).sum().backward()

    def fail():
        raise MemoryError("put_back")

    monkeypatch.setattr(optimizer.row_step, "put_back", fail)
    with pytest.raises(MemoryError, match="put_back"):
        optimizer.step()
    assert not embedding.store.step_lock.stepping and not embedding.store.step_lock.lock._is_owned()


def nested():
    """Rows after a step in a hook of another step of the same optimizer."""
    torch.manual_seed(0)
    embedding, linear = make_embedding(), torch.nn.Linear(4, 1)
    torchs = torch.optim.SGD([embedding.weight, *linear.parameters()], lr=0.1)
    optimizer = oneemb.Optimizer(torchs, [embedding])

    def again(*_):
        handle.remove()
        linear(embedding(torch.tensor([[2, 3]]))).sum().backward()
        optimizer.step()

    handle = torchs.register_step_post_hook(again)
    linear(embedding(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    return rows_of(embedding), optimizer.taken, embedding.store.step


def with_gradients_of_a_stopped_step():
    """Rows after a step that follows a step which has left taken gradients."""
    embedding = make_embedding()
    optimizer = oneemb.Optimizer(torch.optim.SGD([embedding.weight], lr=0.1), [embedding])
    for ids in ([[1, 2]], [[2, 3]]):
        embedding(torch.tensor(ids)).sum().backward()
        if not optimizer.row_step.has_grads():
            optimizer.row_step.take_grads()
    optimizer.step()
    return rows_of(embedding), optimizer.taken, embedding.store.step


@pytest.mark.parametrize("case", [nested, with_gradients_of_a_stopped_step])
def test_a_step_of_another_kind_is_left_to_step_together_with_nothing_done(made, monkeypatch, case):
    found = case()
    assert False in made
    monkeypatch.setattr(eager, "step_one_lookup", lambda *_: False)
    assert found == case()
