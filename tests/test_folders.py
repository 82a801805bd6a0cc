"""Folders that an object of this process holds: cells of a notebook run again, and `oneemb.release`.

Here a second embedding on a folder is what a cell makes when it is run again: the first one lives on, in a variable.
"""

import gc
import os
import shutil
import sys
import threading
import types
import warnings

import numpy as np
import pytest
import torch

import oneemb
from oneemb.embeddings import unsaved_rows
from oneemb.rows.reshard import reshard
from oneemb.storage.errors import LockedError
from oneemb.storage.locking import step_lock
from oneemb.storage.remote.file_server import FileServer
from oneemb.storage.table.compact_snapshots import compact_snapshots
from tests.support.forks import ended_well, in_child
from tests.support.models import STORES, make_embedding, rows_of
from tests.support.pairwise import diagonal
from tests.support.thread_ranks import run_ranks


def step(embedding, *ids, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor(ids)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(path, **more):
    """Text of a new embedding's error about the holder of the folder."""
    with pytest.raises(LockedError) as caught:
        make_embedding(path, **more)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_warning(monkeypatch):
    """Where a test expects none there is none."""
    gc.collect()
    monkeypatch.setattr(unsaved_rows, "warns_of_garbage", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*starts empty, though")
        warnings.filterwarnings("ignore", ".*was dropped, and its", oneemb.UnsavedRowsWarning)  # as tests end
        yield
        gc.collect()


# ---- a cell that is run again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_a_cell_that_is_run_again_is_told_who_holds_the_folder_and_release_frees_it(tmp_path, store):
    first = make_embedding(tmp_path, store=store)
    step(first, 1, 2, 3)
    said = refused(tmp_path, store=store, name="new")
    assert f"embedding 'new' cannot be made: {tmp_path} is held by embedding 'items' of this process" in said
    assert "whose 3 rows no snapshot holds as they are now" in said
    assert f"oneemb.release('{tmp_path}', save='a-name')" in said and f"oneemb.release('{tmp_path}')" in said
    step(first, 4)  # Nothing has happened to it.
    with pytest.warns(UserWarning, match=f"'items' in {tmp_path} is closed, and its 4 rows are gone") as warned:
        oneemb.release(tmp_path)
    assert len(warned) == 1 and warned[0].filename == __file__
    with pytest.raises(oneemb.StorageError, match="is closed; make it again"):
        first(torch.tensor([1]))
    second = make_embedding(tmp_path, store=store)
    step(second, 1)
    assert second.stats()["rows"] == 1
    second.clear()
    second.close()


def of_no_rows(embedding):
    embedding.store.form.attach("sgd", np.empty(0, np.float32))


def saved(embedding):
    step(embedding, 1, 2)
    embedding.save_snapshot("s")


def saved_as_delta(embedding):
    saved(embedding)
    step(embedding, 3)
    embedding.save_delta("d", since="s")


def named_by_a_state_dict(embedding):
    step(embedding, 1, 2)
    embedding.state_dict()


def loaded(embedding):
    saved(embedding)
    step(embedding, 3)
    embedding.load_snapshot("s", weights_only=True)


def cleared(embedding):
    step(embedding, 1)
    embedding.clear()


def read_since(embedding):
    saved(embedding)
    embedding(torch.tensor([1, 2]))  # in training mode, and of no step
    embedding.eval()(torch.tensor([7]))


def saved_in_a_checkpoint(embedding):
    class Graph(oneemb.TrainGraph):
        def __init__(self):
            super().__init__()
            self.rows = embedding
            self.add_optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))

        def build(self, ids):
            loss = self.rows(ids).square().sum()
            loss.backward()
            return loss

    graph = Graph()
    for _ in graph.run([torch.tensor([1, 2]), torch.tensor([3, 2])]):
        pass
    graph.save(f"{embedding.store.plan.persistent_path}.pt")


@pytest.mark.parametrize(
    ("before", "store"),
    diagonal(
        [of_no_rows, saved, saved_as_delta, named_by_a_state_dict, loaded, cleared, read_since, saved_in_a_checkpoint],
        STORES,
    ),
)
def test_a_new_embedding_takes_over_from_one_with_nothing_unsaved(tmp_path, before, store):
    folder = tmp_path / "rows"
    first = make_embedding(folder, store=store)
    before(first)
    names = first.snapshots()
    second = make_embedding(folder, store=store)
    if names:
        second.load_snapshot(names[-1])
    step(second, 1, 5)
    second.save_snapshot("of the second")
    with pytest.raises(oneemb.StorageError, match="'items' of this process has taken over its folder: make graphs and"):
        first(torch.tensor([1]))
    second.close()


def never_saved(embedding):
    step(embedding, 1)


def changed_since(embedding):
    saved(embedding)
    step(embedding, 1)


def grown_since(embedding):
    saved(embedding)
    embedding(torch.tensor([9]))


def deleted(embedding):
    saved(embedding)
    embedding.delete_snapshot("s")


def erased_since(embedding):
    saved(embedding)
    embedding.erase(torch.tensor([1, 2]))


def imported(embedding):
    saved(embedding)
    ids, values = np.arange(3), np.ones((3, 4), np.float32)
    path = f"{embedding.store.plan.persistent_path}.npz"
    np.savez(path, keys=ids, values=values)
    oneemb.import_rows(embedding, path)


@pytest.mark.parametrize("before", [never_saved, changed_since, grown_since, deleted, erased_since, imported])
def test_no_embedding_takes_over_from_one_with_rows_that_no_snapshot_has(tmp_path, before):
    first = make_embedding(tmp_path / "rows")
    before(first)
    rows = rows_of(first, [1, 2])
    assert "rows no snapshot holds as they are now" in refused(tmp_path / "rows")
    assert torch.equal(rows_of(first, [1, 2]), rows)
    first.save_snapshot("all")
    make_embedding(tmp_path / "rows").load_snapshot("all")


def test_a_copy_is_of_rows_that_no_snapshot_has(tmp_path):
    first = make_embedding(tmp_path / "rows")
    saved(first)
    copy = first.copy_to(tmp_path / "copy")
    assert "whose 2 rows" in refused(tmp_path / "copy")
    copy.save_snapshot("all")
    copy.close()


def test_a_broken_embedding_has_nothing_to_save(tmp_path):
    first = make_embedding(tmp_path)
    step(first, 1)
    first.store.store_lock.cut_short(ZeroDivisionError())
    step(make_embedding(tmp_path), 1)


def test_the_same_folder_by_another_name_is_the_same(tmp_path):
    first = make_embedding(tmp_path / "rows")
    step(first, 1)
    os.symlink(tmp_path / "rows", tmp_path / "link")
    assert "embedding 'items'" in refused(tmp_path / "link")
    with pytest.warns(UserWarning, match="its 1 rows are gone"):
        oneemb.release(tmp_path / "link")
    step(make_embedding(tmp_path / "link"), 1)


def test_two_embeddings_that_were_given_one_folder_are_told_so(tmp_path):
    user, item = make_embedding(tmp_path, name="user"), make_embedding(tmp_path, name="item")
    optimizers = [torch.optim.Adagrad(one.parameters()) for one in (user, item)]
    joined = [oneemb.Optimizer(one, [its]) for one, its in zip(optimizers, (user, item), strict=True)]
    with pytest.raises(
        oneemb.StorageError, match=r"'item' .*has taken over its folder: .*give each embedding a folder"
    ):
        user(torch.tensor([1]))
    item(torch.tensor([1]))
    assert len(joined) == 2


@pytest.mark.parametrize("store", STORES)
def test_release_saves_first_what_it_is_told_to(tmp_path, store):
    first = make_embedding(tmp_path, store=store)
    step(first, 1, 2, 3)
    rows = rows_of(first, [1, 2, 3])
    oneemb.release(tmp_path, save="rescued")
    with pytest.raises(oneemb.StorageError, match="is closed; make it again"):
        first(torch.tensor([1]))
    second = make_embedding(tmp_path, store=store)
    second.load_snapshot("rescued")
    assert torch.equal(rows_of(second, [1, 2, 3]), rows)


def test_release_that_cannot_save_one_closes_none(tmp_path):
    embeddings = [make_embedding(tmp_path / name, name=name) for name in ("users", "items")]
    for embedding in embeddings:
        step(embedding, 1)
    embeddings[1].save_snapshot("s")
    with pytest.raises(oneemb.SnapshotExistsError):
        oneemb.release(tmp_path, save="s")
    for embedding in embeddings:
        step(embedding, 1)


def test_release_saves_nothing_if_one_has_the_snapshot_already(tmp_path):
    embeddings = [make_embedding(tmp_path / name, name=name) for name in ("users", "longer_items")]
    for embedding in embeddings:
        step(embedding, 1)
    embeddings[1].save_snapshot("s")
    with pytest.raises(oneemb.SnapshotExistsError, match="longer_items"):
        oneemb.release(tmp_path, save="s")
    assert embeddings[0].snapshots() == []
    embeddings[1].delete_snapshot("s")
    oneemb.release([tmp_path, tmp_path / "users"], save="s")  # An embedding below two of the paths is saved once.
    assert [make_embedding(tmp_path / name).snapshots() for name in ("users", "longer_items")] == [["s"], ["s"]]


def test_release_saves_averages_too(tmp_path):
    embedding = make_embedding(tmp_path / "rows")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    averaged = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    for _ in range(3):
        averaged.update_rows()
        step(embedding, 1, 2, optimizer=optimizer)
    oneemb.release(tmp_path, save="s")
    for folder in ("rows", "averages"):
        assert oneemb.make_persistent_table_reader(str(tmp_path / folder), "s", torch.int64, torch.float32) is not None


def test_the_error_says_where_the_old_embedding_is(tmp_path, monkeypatch):
    first = make_embedding(tmp_path)
    step(first, 1, 2)
    model = torch.nn.ModuleDict({"films": first})
    found = types.ModuleType("__main__")
    vars(found).update(model=model, Out={3: first, 4: 17}, _3=first, other=torch.nn.Linear(1, 1))
    monkeypatch.setitem(sys.modules, "__main__", found)
    assert "embedding 'items' (model.films, Out[3]) of this process, whose 2 rows" in refused(tmp_path)


# ---- warnings of rows that are lost ----------------------------------------------------------------------------------


def closed(embedding):
    embedding.close()


def left(embedding):
    with embedding:
        pass


@pytest.mark.parametrize("end", [closed, left])
def test_the_end_of_an_embedding_with_unsaved_rows_warns_in_the_users_line(tmp_path, end):
    embedding = make_embedding(tmp_path)
    step(embedding, 1, 2)
    with pytest.warns(
        oneemb.UnsavedRowsWarning, match=f"'items' in {tmp_path} is closed, and its 2 rows are"
    ) as warned:
        end(embedding)
    assert len(warned) == 1 and warned[0].filename == __file__
    embedding.close()  # Once is enough.


@pytest.mark.parametrize("cycle", [False, True])
def test_an_embedding_that_is_dropped_with_unsaved_rows_warns(tmp_path, cycle):
    embedding = make_embedding(tmp_path)
    step(embedding, 1, 2)
    if cycle:
        embedding.cycle = [embedding]
    with pytest.warns(oneemb.UnsavedRowsWarning, match=f"'items' in {tmp_path} was dropped, and its 2 rows are gone"):
        del embedding
        gc.collect()


def without_a_path(tmp_path):
    embedding = make_embedding(None)
    step(embedding, 1)
    return embedding


def with_saved_rows(tmp_path):
    embedding = make_embedding(tmp_path)
    saved(embedding)
    return embedding


def cleared_first(tmp_path):
    embedding = make_embedding(tmp_path)
    cleared(embedding)
    return embedding


def with_rows_that_no_step_changed(tmp_path):
    embedding = make_embedding(tmp_path)
    saved(embedding)
    embedding(torch.tensor([9]))
    return embedding


@pytest.mark.parametrize(
    "make", [without_a_path, with_saved_rows, cleared_first, with_rows_that_no_step_changed, make_embedding]
)
def test_no_warning_where_nothing_is_lost(tmp_path, make):
    warnings.simplefilter("error", oneemb.UnsavedRowsWarning)  # An error in `__del__` fails the test as well.
    make(tmp_path / "closed").close()
    make(tmp_path / "dropped")
    gc.collect()


# ---- averages, references, threads, forks, ranks ---------------------------------------------------------------------


def test_averages_that_are_made_again_take_over_from_those_before(tmp_path):
    embedding = make_embedding(tmp_path / "rows")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    first = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    second = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    for _ in range(3):
        second.update_rows()
        step(embedding, 1, 2, optimizer=optimizer)  # The first ones hear of it no more.
    with pytest.raises(oneemb.StorageError, match="'items, averaged' of this process has taken over"):
        first(torch.tensor([1]))
    with pytest.raises(LockedError, match="'items, averaged' of this process, whose 2 rows no"):
        oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    with pytest.warns(UserWarning, match="'items, averaged' in .* its 2 rows are gone"):
        oneemb.release(tmp_path / "averages")
    step(embedding, 1, optimizer=optimizer)
    third = oneemb.AveragedEmbedding(embedding, tmp_path / "averages", 0.5)
    third.update_rows()
    assert torch.equal(third(torch.tensor([1])), rows_of(embedding, [1]))


def test_an_embedding_that_only_a_cycle_of_references_holds_is_no_hindrance(tmp_path):
    gc.disable()
    try:
        first = make_embedding(tmp_path)
        step(first, 1)
        first.cycle = [first]
        del first
        step(make_embedding(tmp_path), 1)
    finally:
        gc.enable()


def test_a_loss_that_is_kept_of_an_embedding_that_is_gone_is_no_hindrance(tmp_path):
    first = make_embedding(tmp_path)
    loss = first(torch.arange(3)).sum()
    del first
    step(make_embedding(tmp_path), 1)
    assert loss.requires_grad


def in_step(embedding, call):
    """Have the optimizer's step call this in its middle."""
    optimizer = oneemb.Optimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))
    optimizer.optimizer.register_step_pre_hook(lambda *_: call())
    step(embedding, 1, 2, optimizer=optimizer)


def test_release_is_refused_in_the_middle_of_a_step(tmp_path):
    embedding, said = make_embedding(tmp_path), []
    step(embedding, 1, 2)
    before = rows_of(embedding, [1])

    def release():
        with pytest.raises(RuntimeError, match=r"oneemb\.release was called in the middle of a step"):
            oneemb.release(tmp_path)
        said.append(refused(tmp_path))

    embedding.save_snapshot("s")
    in_step(embedding, release)
    assert "embedding 'items' of this process, which is in the middle of a step" in said[0]
    assert not torch.equal(rows_of(embedding, [1]), before)


def test_the_step_of_another_thread_ends_before_its_folder_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(step_lock, "_PATIENCE", 0.01)
    embedding, begun, goes_on = make_embedding(tmp_path), threading.Event(), threading.Event()
    saved(embedding)

    def wait():
        begun.set()
        assert goes_on.wait(600)

    job = threading.Thread(target=in_step, args=(embedding, wait))
    job.start()
    assert begun.wait(600)
    assert "which is in the middle of a step" in refused(tmp_path)
    releases = threading.Thread(target=oneemb.release, args=(tmp_path,))
    with pytest.warns(UserWarning, match="its 2 rows are gone"):
        releases.start()
        assert embedding.store.built
        goes_on.set()
        job.join(600)
        releases.join(600)
    assert not embedding.store.built and not job.is_alive()
    second = make_embedding(tmp_path)
    second.load_snapshot("s")
    second.close()


def test_a_child_takes_nothing_from_its_parent(tmp_path):
    embedding = make_embedding(tmp_path)
    saved(embedding)

    def work():
        for call in (lambda: make_embedding(tmp_path)(torch.arange(2)), lambda: oneemb.release(tmp_path)):
            with pytest.raises(LockedError, match=f"held by process {os.getppid()} on") as caught:
                call()
            assert "this one" not in str(caught.value)
        return True

    assert ended_well(in_child(work)) is True
    step(embedding, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_give_way_only_together(tmp_path, monkeypatch, size):
    def work(ranks):
        first = make_embedding(tmp_path, process_group=ranks)
        first.store.build()
        first.save_snapshot("s")
        second = make_embedding(tmp_path, process_group=ranks)
        if size == 1:
            second.load_snapshot("s")
            return
        with pytest.raises(LockedError, match=r"whose ranks close together: make this call on all .*release\('"):
            second.store.build()
        first.save_snapshot("t")
        ranks.agree("saved")
        if ranks.rank == 0:
            oneemb.release(tmp_path)  # Those of both: they are of one process here.
        ranks.agree("released")
        second.load_snapshot("t")
        second.close()

    run_ranks(size, work, patch=monkeypatch)


# ---- other holders, other callers ------------------------------------------------------------------------------------


def test_tools_close_no_embedding(tmp_path):
    embedding = make_embedding(tmp_path / "rows")
    saved(embedding)
    for tool in (
        lambda: compact_snapshots(tmp_path / "rows"),
        lambda: reshard(tmp_path / "rows", "s", 2),
        lambda: oneemb.make_persistent_table_writer(tmp_path / "rows", "t", "int64", "float32", 4),
    ):
        with pytest.raises(LockedError, match="which is this one, by embedding 'items', which somebody uses"):
            tool()
    step(embedding, 1)


@pytest.mark.parametrize("format", ["oneemb", "oneflow"])
def test_a_writer_that_a_cell_has_left_open_is_named_and_closed(tmp_path, format):
    def write():
        return oneemb.make_persistent_table_writer(tmp_path / "rows", "s", "int64", "float32", 2, format=format)

    writer = write()
    writer.write(np.arange(5), np.ones((5, 2), np.float32))
    with pytest.raises(LockedError, match="by .*table .*, which somebody uses"):
        write()
    with pytest.warns(UserWarning, match="its 5 rows are gone"):
        oneemb.release(tmp_path)  # a folder above
    write().close()
    with pytest.raises(oneemb.StorageError):
        writer.close()


def test_the_folder_of_a_file_server_goes_with_the_embeddings_that_it_serves(tmp_path):
    def make(folder):
        return make_embedding(tmp_path / folder, store="remote", options={"url": f"file://{tmp_path}/server"})

    first = make("first")
    step(first, 1)
    with pytest.raises(LockedError, match="held by embedding"):
        make("first")
    with pytest.raises(LockedError, match=f"file://{tmp_path}/server serves embeddings of this process; close them"):
        oneemb.release(tmp_path / "server")
    with pytest.raises(oneemb.ServerError, match=f"by file://{tmp_path}/server, which somebody uses"):
        FileServer(tmp_path / "server")
    step(first, 1)
    with pytest.warns(UserWarning, match="its 1 rows are gone"):
        oneemb.release(tmp_path / "first")
    FileServer(tmp_path / "server").close()
    step(make("first"), 1)


def test_release_of_a_folder_closes_all_below_it_and_tells_of_each(tmp_path):
    embeddings = [make_embedding(tmp_path / "model" / name, name=name) for name in ("users", "items", "saved")]
    for embedding in embeddings:
        step(embedding, 1, 2)
    embeddings[2].save_snapshot("s")
    beside = make_embedding(tmp_path / "model-2")
    step(beside, 1)
    with pytest.warns(UserWarning) as warned:
        oneemb.release(tmp_path / "model")
    assert sorted(str(one.message).split()[1] for one in warned) == ["'items'", "'users'"]
    for embedding in embeddings:
        with pytest.raises(oneemb.StorageError, match="is closed"):
            embedding(torch.tensor([1]))
    step(beside, 1)


def test_release_of_what_nobody_holds_does_nothing(tmp_path):
    oneemb.release(tmp_path / "nothing")
    embedding = make_embedding(tmp_path / "rows")
    step(embedding, 1)
    oneemb.release([tmp_path / "row", f"{tmp_path}/rows/below"])  # others' folders
    step(embedding, 1)
    embedding.save_snapshot("s")
    embedding.close()
    oneemb.release(tmp_path / "rows")
    shutil.rmtree(tmp_path / "rows")
    oneemb.release(tmp_path / "rows")


def test_release_knows_a_folder_that_has_another_name_now(tmp_path):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "link")
    linked, renamed = make_embedding(tmp_path / "link" / "rows"), make_embedding(tmp_path / "rows")
    for embedding in (linked, renamed):
        step(embedding, 1)
    os.unlink(tmp_path / "link")
    os.rename(tmp_path / "rows", tmp_path / "other")
    for folder in (tmp_path / "disk" / "rows", tmp_path / "other"):
        assert f"oneemb.release('{folder}')" in refused(folder)
        with pytest.warns(UserWarning, match="its 1 rows are gone"):
            oneemb.release(folder)
        step(make_embedding(folder), 1)


def test_an_embedding_whose_folder_was_removed_is_no_hindrance_to_one_in_a_new_folder(tmp_path):
    first = make_embedding(tmp_path / "rows")
    step(first, 1)
    shutil.rmtree(tmp_path / "rows")
    step(make_embedding(tmp_path / "rows"), 1)
    with pytest.warns(oneemb.UnsavedRowsWarning):
        first.close()
