"""Snapshots of several ranks: what one number of ranks has saved, any other loads; whole or not there, whatever fails.

The oracle is a dict of rows. Rows are put straight into the stores, each where `owner_of` says, so that nothing here
depends on lookups between ranks.
"""

import errno
import functools
import os
import shutil
import threading
import warnings

import numpy as np
import pytest
import torch

import oneemb
from oneemb.embeddings import internals
from oneemb.graph.ranks import RankError
from oneemb.kernels.owner import owner_of, owners_share_keys
from oneemb.storage.errors import (
    BrokenStoreError,
    CorruptTableError,
    OtherSnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
)
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.snapshots.snapshot_parts import find_parts, folders_at, look_at
from oneemb.storage.snapshots.unfinished import mark, marks_at, unmark
from oneemb.storage.store_rows import set_rows
from tests.support.thread_ranks import FaultyCalls, Torn, files_in, run_ranks

DIM, TABLES, STEP = 3, 2, 41
BIG = 2**62


def ids(count):
    """Small, negative and very large ones."""
    spread = np.arange(count, dtype=np.int64)
    return np.concatenate([spread, -1 - spread, BIG + spread * 7919, -(2**63) + spread])


def rows_of(version, count=40, state=DIM):
    """{(table, id): row}, each a function of the key and the version."""
    id_N = np.tile(ids(count), TABLES)
    table_N = np.repeat(np.arange(TABLES, dtype=np.int32), len(id_N) // TABLES)
    row_NW = (id_N[:, None] * 31 + table_N[:, None] * 17 + np.arange(DIM + state) + version * 1009) % 100003
    return table_N, id_N, row_NW.astype(np.float32)


def as_dict(table_N, id_N, row_NW):
    keys = zip(np.asarray(table_N).tolist(), np.asarray(id_N).tolist(), strict=True)
    found = {key: tuple(row) for key, row in zip(keys, np.asarray(row_NW).tolist(), strict=True)}
    assert len(found) == len(id_N), "a key came twice"
    return found


def expected(version, count=40, state=DIM):
    return as_dict(*rows_of(version, count, state))


OPTIONS = {
    "device": lambda path: oneemb.make_device_mem_store_options(path),
    "host": lambda path: oneemb.make_cached_host_mem_store_options(cache_budget_mb=1, persistent_path=path),
    "ssd": lambda path: oneemb.make_cached_ssd_store_options(cache_budget_mb=1, persistent_path=path),
}


def make(ranks, path, *, options="device", state=True, tables=TABLES, dim=DIM, seed=0):
    """An embedding; `ranks` as it takes them, None = without."""
    paths = [str(one) for one in path] if isinstance(path, list) else str(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "embedding .* starts empty")
        embedding = oneemb.MultiTableEmbedding(
            "items", dim, torch.float32, torch.int64, [oneemb.make_table()] * tables, OPTIONS[options](paths),
            seed=seed, num_threads=1, process_group=ranks,
        )  # fmt: skip
    if state:
        embedding.store.form.attach("adagrad", np.zeros(dim, np.float32))
    return embedding


def rank_of(embedding):
    return embedding.ranks.rank, embedding.ranks.size


def fill(embedding, version, count=40):
    """Let it have the rows of a version that it owns, and no others."""
    rank, size = rank_of(embedding)
    state = embedding.store.format.state_width
    table_N, id_N, row_NW = rows_of(version, count, state)
    own = owner_of(table_N, id_N, size) == rank
    embedding.store.build()
    set_rows(embedding.store, table_N[own], id_N[own], row_NW[own])
    embedding.store.step = STEP + version


def content(embedding):
    """What it has, and its step. Every key has to be this rank's own."""
    rank, size = rank_of(embedding)
    found = {}
    store = embedding.store
    for table_N, id_N, row_NW in store.rows.hot.scan():
        assert (owner_of(table_N, id_N, size) == rank).all()
        part = as_dict(table_N, id_N, row_NW[:, : store.format.row_width])
        assert found.keys().isdisjoint(part)
        found |= part
    return found, store.step


def together(parts):
    """The rows of all ranks, each of one rank."""
    rows, steps = {}, {step for _, step in parts}
    for part, _ in parts:
        assert rows.keys().isdisjoint(part)
        rows |= part
    assert len(steps) == 1
    return rows, steps.pop()


def read(path, name):
    """The rows of a snapshot by the reader."""
    with oneemb.make_persistent_table_reader(path, name, "int64", "float32", with_tables=True) as reader:
        batches = list(reader)
    found = {}
    for table_N, id_N, value_NX in batches:
        part = as_dict(table_N, id_N, value_NX)
        assert found.keys().isdisjoint(part)
        found |= part
    return found


def save(ranks, path, version=0, name="s", *, options="device", overwrite=False, state=True, count=40):
    embedding = make(ranks, path, options=options, state=state)
    try:
        fill(embedding, version, count)
        embedding.save_snapshot(name, overwrite=overwrite)
        return embedding.saved[0]
    finally:
        embedding.close()


def load(ranks, path, name="s", *, options="device", state=True, **how):
    embedding = make(ranks, path, options=options, state=state)
    try:
        embedding.load_snapshot(name, **how)
        return content(embedding)
    finally:
        embedding.close()


# ---- any number of ranks loads what any other has saved --------------------------------------------------------------


def save_and_load(group, root):
    """On each of four processes: saved by 1 to 4 of them, loaded by 1 to 4."""
    from torch import distributed

    rank = distributed.get_rank(group)
    groups = {size: distributed.new_group(list(range(size))) for size in range(1, 5)}
    found = {}
    for saved in range(1, 5):
        if rank < saved:
            save(groups[saved], root, saved, f"by {saved}")
        distributed.barrier(group)
        for loaded in range(1, 5):
            if rank < loaded:
                found[saved, loaded] = load(groups[loaded], root, f"by {saved}")
            distributed.barrier(group)
    return found


def test_what_processes_have_saved_any_number_of_them_loads(rank_pool, tmp_path):
    of_all = rank_pool(4, save_and_load, str(tmp_path))
    for saved in range(1, 5):
        assert read(tmp_path, f"by {saved}") == expected(saved)
        for loaded in range(1, 5):
            parts = [found[saved, loaded] for found in of_all[:loaded]]
            assert together(parts) == (expected(saved), STEP + saved)


NUMBERS = [0, *range(1, 10)]  # 0 = without process_group


def run(size, function, *args, patch, **how):
    """On so many simulated ranks; 0 = on none."""
    if size == 0:
        return [function(None, *args, **how)]
    return run_ranks(size, lambda ranks: function(ranks, *args, **how), patch=patch)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("saved", NUMBERS)
def test_what_any_number_has_saved_any_other_loads(tmp_path, monkeypatch, saved, every):
    """Every third number loads, beginning elsewhere for each that has saved; or every one."""
    run(saved, save, tmp_path, 3, patch=monkeypatch)
    assert read(tmp_path, "s") == expected(3)
    for loaded in NUMBERS[(2 * saved + 1) % every :: every]:
        assert together(run(loaded, load, tmp_path, patch=monkeypatch)) == (expected(3), STEP + 3), loaded


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 2), (0, 2), (2, 0)])
def test_on_each_store(tmp_path, monkeypatch, options, saved, loaded):
    run(saved, save, tmp_path, patch=monkeypatch, options=options)
    assert together(run(loaded, load, tmp_path, patch=monkeypatch, options=options)) == (expected(0), STEP)


def weights(rows):
    return {key: row[:DIM] for key, row in rows.items()}


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 2), (2, 0)])
def test_state_is_brought_left_behind_or_added(tmp_path, monkeypatch, saved, loaded):
    run(saved, save, tmp_path, 1, patch=monkeypatch)
    # An embedding that knows no optimizer yet takes the state along.
    assert together(run(loaded, load, tmp_path, patch=monkeypatch, state=False)) == (expected(1), STEP + 1)
    rows, step = together(run(loaded, load, tmp_path, patch=monkeypatch, weights_only=True))
    assert step == 0 and weights(rows) == weights(expected(1))
    assert {row[DIM:] for row in rows.values()} == {(0.0,) * DIM}
    run(saved, save, tmp_path / "bare", 2, patch=monkeypatch, state=False)
    rows, step = together(run(loaded, load, tmp_path / "bare", patch=monkeypatch))
    assert step == 0 and weights(rows) == expected(2, state=0)
    assert {row[DIM:] for row in rows.values()} == {(0.0,) * DIM}


def test_each_rank_reads_only_parts_that_hold_its_rows(tmp_path, monkeypatch):
    run(4, save, tmp_path, patch=monkeypatch)
    opened = {}
    real = LocalFileSystem.open

    def note(fs, path, **how):
        if "/chunks/" in path:
            opened.setdefault(threading.current_thread().name, set()).add(path.split("/rank-")[1].split("/")[0])
        return real(fs, path, **how)

    monkeypatch.setattr(LocalFileSystem, "open", note)
    run(2, load, tmp_path, patch=monkeypatch)
    parts = [{part for part in opened[f"rank-{rank}"] if part.endswith("of-4")} for rank in range(2)]
    assert parts == [{"0-of-4", "1-of-4"}, {"2-of-4", "3-of-4"}]
    opened.clear()
    run(4, load, tmp_path, patch=monkeypatch)
    assert all(opened[f"rank-{rank}"] == {f"{rank}-of-4"} for rank in range(4)), "each its own"


@pytest.mark.parametrize("owners", range(1, 10))
def test_owners_that_share_keys_are_those_of_which_a_key_is_seen(owners):
    id_N = np.random.default_rng(owners).integers(-(2**63), 2**63 - 1, 20000)
    table_N = np.zeros(len(id_N), np.int32)
    mine_N = owner_of(table_N, id_N, owners)
    for others in range(1, 10):
        seen = set(zip(mine_N.tolist(), owner_of(table_N, id_N, others).tolist(), strict=True))
        said = {(a, b) for a in range(owners) for b in range(others) if owners_share_keys(a, owners, b, others)}
        assert seen == said


# ---- names, order, deletion ----------------------------------------------------------------------------------------


def with_embedding(ranks, path, call, **how):
    """What the call gives for an embedding that is closed afterwards."""
    embedding = make(ranks, path, **how)
    try:
        return call(embedding)
    finally:
        embedding.close()


def on(size, path, call, patch, **how):
    """What the call gives on each of so many ranks."""
    return run(size, lambda ranks: with_embedding(ranks, path, call, **how), patch=patch)


def test_snapshots_of_any_number_of_ranks_are_listed_in_order_and_deleted_by_any(tmp_path, monkeypatch):
    for size, name in [(2, "b"), (0, "c"), (3, "a"), (2, "d")]:
        run(size, save, tmp_path, size, name, patch=monkeypatch)
    for size in (0, 1, 2, 3):
        assert on(size, tmp_path, lambda embedding: embedding.snapshots(), monkeypatch) == [list("bcad")] * max(1, size)
    on(3, tmp_path, lambda embedding: embedding.delete_snapshot("c"), monkeypatch)
    on(0, tmp_path, lambda embedding: embedding.delete_snapshot("b"), monkeypatch)
    on(2, tmp_path, lambda embedding: embedding.delete_snapshot("a"), monkeypatch)
    assert on(1, tmp_path, lambda embedding: embedding.snapshots(), monkeypatch) == [["d"]]
    assert read(tmp_path, "d") == expected(2)
    assert {path.split("/")[0] for path in files_in(tmp_path) if "/" in path} == {"rank-0-of-2", "rank-1-of-2"}

    def delete_none(embedding):
        with pytest.raises(SnapshotNotFoundError, match="'a'.*there are: 'd'"):
            embedding.delete_snapshot("a")

    on(2, tmp_path, delete_none, monkeypatch)


@pytest.mark.parametrize(
    ("first", "second"),
    [(0, 2), (2, 3), (3, 0), (2, 2)]
    + [pytest.param(*its, marks=pytest.mark.slow) for its in [(0, 0), (0, 3), (2, 0), (3, 2), (3, 3)]],
)
def test_a_name_is_taken_or_replaced_whoever_has_saved_it(tmp_path, monkeypatch, first, second):
    run(first, save, tmp_path, 1, patch=monkeypatch)
    with pytest.raises(SnapshotExistsError, match="overwrite=True"):
        run(second, save, tmp_path, 2, patch=monkeypatch)
    assert read(tmp_path, "s") == expected(1)
    for version in (3, 4, 5):
        run(second, save, tmp_path, version, patch=monkeypatch, overwrite=True)
        assert read(tmp_path, "s") == expected(version)
        for size in (first, second):
            assert together(run(size, load, tmp_path, patch=monkeypatch)) == (expected(version), STEP + version)
    held = {part.folder for part in look_at([str(tmp_path)]).parts}
    assert len(held) == max(1, second), "nothing of the replaced one is left"
    assert_nothing_is_unneeded(tmp_path)


@pytest.mark.parametrize(("first", "second"), [(2, 2), (3, 2), (0, 2), (2, 0)])
def test_the_newer_of_two_counts_until_the_older_one_goes(tmp_path, monkeypatch, first, second):
    """As where all ranks are killed at the moment at which the newer one is whole."""
    run(first, save, tmp_path, 1, patch=monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("oneemb.checkpoints.rank_snapshots.RankSnapshots._remove", lambda *_: None)
        run(second, save, tmp_path, 2, patch=patch, overwrite=True)
    assert len(look_at([str(tmp_path)]).parts) == max(1, first) + max(1, second)
    for size in (0, 2, 3):
        assert together(run(size, load, tmp_path, patch=monkeypatch)) == (expected(2), STEP + 2)
    assert read(tmp_path, "s") == expected(2)
    run(second, save, tmp_path, 3, "t", patch=monkeypatch)
    assert read(tmp_path, "s") == expected(2)
    assert_nothing_is_unneeded(tmp_path)


def assert_nothing_is_unneeded(root):
    """Every file below belongs to a whole snapshot, but for the locks."""
    found = look_at([str(root)])
    assert not found.incomplete() and not found.leftovers() and not found.damaged
    for folder in found.folders:
        info = oneemb_info(folder)
        assert info.unsaved_bytes == 0 and not info.kept, folder
        assert not marks_at(LocalFileSystem(), folder)
        rest = {name for name in os.listdir(folder) if not name.startswith("rank-")}
        assert rest == {"LOCK", "chunks", "snapshots"}, folder


def oneemb_info(folder):
    from oneemb.storage.table.table_info import table_info

    return table_info(folder)


def test_the_parts_of_a_snapshot_share_an_identity_that_all_ranks_know(tmp_path, monkeypatch):
    named = run(3, save, tmp_path, patch=monkeypatch)
    assert named[0] == named[1] == named[2]
    parts = look_at([str(tmp_path)]).parts
    assert {part.info.identity for part in parts} == {named[0]["oneemb_identity"]}


# ---- one rank fails --------------------------------------------------------------------------------------------------


def caught(embedding, call):
    try:
        call()
    except Exception as error:
        return error
    return None


ACTIONS = {
    "save": lambda embedding: embedding.save_snapshot("t"),
    "overwrite": lambda embedding: embedding.save_snapshot("s", overwrite=True),
    "delete": lambda embedding: embedding.delete_snapshot("s"),
}
FEW = 6


def act(ranks, path, action, calls):
    """One action by an embedding with other rows than those of the snapshot `s`. Returns what it raised."""
    embedding = make(ranks, path)
    fill(embedding, 2, FEW)
    with calls.counted():
        error = caught(embedding, lambda: ACTIONS[action](embedding))
    embedding.close()
    return error


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("action", "once"), [("save", False), ("overwrite", True)])
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    tmp_path, monkeypatch, action, once, stride
):
    run(2, save, tmp_path / "template", 1, patch=monkeypatch, count=FEW)
    at, failed, reached = 0, 0, True
    while reached:
        root = tmp_path / "full"
        shutil.copytree(tmp_path / "template", root)
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            calls = FaultyCalls(patch, rank=1, at=at, error=full, once=once)
            errors = run_ranks(2, act, root, action, calls, patch=patch)
            reached = calls.reached
        if errors == [None, None]:
            assert read(root, "t" if action == "save" else "s") == expected(2, FEW)
        else:
            failed += 1
            assert isinstance(errors[0], RankError) and "rank 1 has failed" in str(errors[0])
            assert isinstance(errors[1], oneemb.StorageError) and "ENOSPC" in str(errors[1])
            assert read(root, "s") == expected(1, FEW)
            assert on(2, root, lambda embedding: embedding.snapshots(), monkeypatch) == [["s"]] * 2
            if once:  # There is room again to take back what was saved.
                assert len(look_at([str(root)]).parts) == 2
        # Once there is room again, the next save takes away what could not be.
        run(2, save, root, 3, "u", patch=monkeypatch, count=FEW)
        assert read(root, "u") == expected(3, FEW)
        assert_nothing_is_unneeded(root)
        shutil.rmtree(root)
        at += stride
    assert failed > 0


# ---- a rank is killed ------------------------------------------------------------------------------------------------


MAY_BE = {
    "save": {"s": [1], "t": [None, 2]},
    "overwrite": {"s": [1, 2], "t": [None]},
    "delete": {"s": [1, None], "t": [None]},
}
"""What the snapshots may be after a killed action: for each name the versions of rows, None = it is not there."""


@pytest.mark.parametrize(
    ("action", "before", "size", "every"),
    [("save", 2, 2, False), ("overwrite", 2, 2, False), ("delete", 2, 2, False)]
    + [pytest.param(*case, True, marks=pytest.mark.slow) for case in [
        ("save", 2, 2), ("overwrite", 2, 2), ("delete", 2, 2), ("overwrite", 3, 2), ("overwrite", 0, 2),
        ("overwrite", 2, 0), ("delete", 3, 0)]],
)  # fmt: skip
def test_a_kill_at_any_file_call_leaves_snapshots_whole_or_absent(tmp_path, monkeypatch, action, before, size, every):
    """At every file call, or at those that follow a change of names."""
    run(before, save, tmp_path / "template", 1, patch=monkeypatch, count=FEW)
    outcomes = set()
    names_of = names_of_calls(tmp_path, monkeypatch, action, size)
    for rank, calls_of_rank in enumerate(names_of):
        after = [at + 1 for at, name in enumerate(calls_of_rank) if name in ("rename", "remove")]
        for at in (
            range(len(calls_of_rank))
            if every
            else sorted({0, *after[2 :: 1 if action == "delete" else 9], *after[-2:]})
        ):
            root = tmp_path / "killed"
            shutil.copytree(tmp_path / "template", root)
            with monkeypatch.context() as patch:
                calls = FaultyCalls(patch, rank=rank, at=at)
                killed(size, root, action, calls, patch, rank)
                calls.free_locks()
            versions = {}
            for name, allowed in MAY_BE[action].items():
                versions[name] = version_of(root, name)
                assert versions[name] in allowed, (action, rank, at, versions)
            outcomes.add(tuple(versions.values()))
            # The next job: it sees the same, saves, and what was left is gone.
            other = 3 if at % 2 else max(1, size)
            names = on(other, root, lambda embedding: sorted(embedding.snapshots()), monkeypatch)
            assert set(map(tuple, names)) == {tuple(sorted(name for name in versions if versions[name] is not None))}
            for name, version in versions.items():
                if version is not None:
                    assert together(run(other, load, root, name, patch=monkeypatch))[0] == expected(version, FEW)
            run(other, save, root, 3, "t", patch=monkeypatch, overwrite=True, count=FEW)
            assert read(root, "t") == expected(3, FEW)
            if versions["s"] is not None:
                assert read(root, "s") == expected(versions["s"], FEW)
            assert_nothing_is_unneeded(root)
            shutil.rmtree(root)
    assert len(outcomes) == 2, "it was killed before the moment that counts, and after it"


@pytest.mark.parametrize(
    ("action", "unheard"),
    [("save", {0})] + [pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("save", {1}), ("overwrite", {0}), ("overwrite", {1}), ("delete", {0}), ("delete", {1})]],
)  # fmt: skip
def test_a_rank_that_dies_in_an_exchange_of_which_some_have_heard_leaves_nothing(
    tmp_path, monkeypatch, action, unheard
):
    """Of three ranks the last dies; one of the others takes the exchange for done, and the other one for failed."""
    run(3, save, tmp_path / "template", 1, patch=monkeypatch, count=FEW)
    outcomes, at, reached = set(), 0, True
    while reached:
        root = tmp_path / "torn"
        shutil.copytree(tmp_path / "template", root)
        with monkeypatch.context() as patch:
            calls = FaultyCalls(patch)
            torn = Torn(at, 2, frozenset(unheard), calls)
            announced = None in run_ranks(3, act, root, action, calls, patch=patch, dies=[2], torn=torn)[:2]
            reached = calls.reached
            calls.free_locks()  # What the dead rank has raised holds its table no more.
        versions = tuple(version_of(root, name) for name in MAY_BE[action])
        for name, version in zip(MAY_BE[action], versions, strict=True):
            assert version in MAY_BE[action][name], (at, versions)
        if announced and action != "delete":
            assert 2 in versions
        outcomes.add(versions)
        run(2 + at % 2, save, root, 3, "u", patch=monkeypatch, count=FEW)
        assert_nothing_is_unneeded(root)
        assert tuple(version_of(root, name) for name in MAY_BE[action]) == versions
        shutil.rmtree(root)
        at += 1
    assert len(outcomes) == 2


def names_of_calls(tmp_path, patch, action, size):
    """The names of the file calls of each rank in an action that nobody stops."""
    root = tmp_path / "counted"
    shutil.copytree(tmp_path / "template", root)
    with patch.context() as inner:
        calls = FaultyCalls(inner)
        killed(size, root, action, calls, inner, None)
        return [calls.of(rank) for rank in range(max(1, size))]


def killed(size, root, action, calls, patch, rank):
    """An action of which one rank is killed, or none."""
    if size == 0:
        run_ranks(1, lambda _: act(None, root, action, calls), dies=[rank])
    else:
        run_ranks(size, act, root, action, calls, patch=patch, dies=[rank])


def version_of(root, name):
    """Which version's rows a snapshot has; None = there is none."""
    try:
        rows = read(root, name)
    except SnapshotNotFoundError:
        return None
    return next(version for version in (1, 2) if rows == expected(version, FEW))


# ---- what is left, and what is missing ------------------------------------------------------------------------------


def test_a_part_whose_others_are_away_is_kept_and_its_name_stays_taken(tmp_path, monkeypatch):
    """A disk that is not mounted: nothing of the snapshots may be taken for a leftover."""
    folders = [tmp_path / "a", tmp_path / "b"]
    run(2, save, folders, 1, patch=monkeypatch)
    os.rename(folders[1], tmp_path / "away")

    def go_on(ranks):
        embedding = make(ranks, folders)
        assert embedding.snapshots() == []
        with pytest.raises((SnapshotNotFoundError, RankError), match="part 1 of 2 is missing"):
            embedding.load_snapshot("s")
        fill(embedding, 2)
        with pytest.raises(SnapshotExistsError):
            embedding.save_snapshot("s")
        embedding.save_snapshot("t")
        embedding.close()

    run_ranks(2, go_on, patch=monkeypatch)
    shutil.rmtree(folders[1])
    os.rename(tmp_path / "away", folders[1])
    assert together(run(2, load, folders, patch=monkeypatch)) == (expected(1), STEP + 1)
    with pytest.raises(SnapshotNotFoundError, match="missing"):
        run(2, load, folders, "t", patch=monkeypatch)
    on(2, folders, lambda embedding: embedding.delete_snapshot("t"), monkeypatch)
    for folder in folders:
        assert [part.whole.name for part in find_parts([str(folder)]).parts] == ["s"]


def test_parts_are_found_in_whichever_of_the_listed_folders_they_are(tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    run(3, save, folders, 1, patch=monkeypatch)
    assert together(run(3, load, folders[::-1], patch=monkeypatch)) == (expected(1), STEP + 1)
    assert read(folders, "s") == read(folders[::-1], "s") == expected(1)
    run(3, save, folders[::-1], 2, patch=monkeypatch, overwrite=True)
    assert read(folders, "s") == expected(2)
    assert sum(len(find_parts([str(folder)]).parts) for folder in folders) == 3
    with pytest.raises(oneemb.StorageError, match=r"has 3 parts.*part 1, 2 of 3 is missing"):
        read(folders[2], "s")


def test_what_a_writer_has_written_to_several_paths_ranks_load_and_replace(tmp_path, monkeypatch):
    folders = [str(tmp_path / f"rank-{rank}-of-3") for rank in range(3)]
    table_N, id_N, row_NW = rows_of(1)
    with oneemb.make_persistent_table_writer(folders, "s", "int64", "float32", 2 * DIM, embedding_dim=DIM) as writer:
        writer.write(id_N, row_NW, table_N)
    assert read(tmp_path, "s") == read(folders, "s") == expected(1)
    for size in (0, 2, 3):
        assert together(run(size, load, tmp_path, patch=monkeypatch))[0] == expected(1)
    run(2, save, tmp_path, 2, patch=monkeypatch, overwrite=True)
    assert read(tmp_path, "s") == expected(2)
    assert_nothing_is_unneeded(tmp_path)
    with pytest.raises(SnapshotExistsError):
        oneemb.make_persistent_table_writer(str(tmp_path), "s", "int64", "float32", 1)


def test_parts_of_earlier_releases_each_have_an_identity_of_their_own(tmp_path, monkeypatch):
    """Their meta names the shard alone."""
    run(2, save, tmp_path, 1, patch=monkeypatch)
    for folder in folders_at([str(tmp_path)]):
        rewrite_meta(folder, "s", lambda meta: {key: value for key, value in meta.items() if key != "snapshot"})
    assert read(tmp_path, "s") == expected(1)
    for size in (0, 2, 3):
        assert together(run(size, load, tmp_path, patch=monkeypatch)) == (expected(1), STEP + 1)


def rewrite_meta(folder, name, change):
    """Let a snapshot have another meta, and an identity of its own."""
    from oneemb.kernels.threads import Threads
    from oneemb.storage.table.persistent_table import PersistentTable
    from oneemb.storage.table.snapshot_reader import read_snapshot_info

    info = read_snapshot_info(folder, name)
    with PersistentTable.open(folder, row_width=info.row_width, threads=Threads(1)) as table:
        table.save_snapshot(name, change(table.load_snapshot(name)), overwrite=True)


@pytest.mark.parametrize("wrong", [{"snapshot": 3}, {"snapshot": ""}, {"shard": [2, 2]}, {"shard": "x"}])
def test_nonsense_about_parts_is_an_error_that_names_the_snapshot(tmp_path, monkeypatch, wrong):
    run(2, save, tmp_path, 1, patch=monkeypatch)
    rewrite_meta(str(tmp_path / "rank-1-of-2"), "s", lambda meta: meta | wrong)
    with pytest.raises(CorruptTableError, match="'s' does not say"):
        read(tmp_path, "s")
    with pytest.raises(CorruptTableError, match="'s' does not say"):
        run(2, load, tmp_path, patch=monkeypatch)


def test_marks_are_kept_and_damaged_ones_mark_nothing(tmp_path):
    fs, folder = LocalFileSystem(), str(tmp_path)
    one, other = "0" * 32, "f" * 32
    assert marks_at(fs, folder) == set()
    mark(fs, folder, [one])
    mark(fs, folder, [other])
    assert marks_at(fs, folder) == {one, other}
    path = tmp_path / "UNFINISHED"
    path.write_bytes(path.read_bytes().replace(one.encode(), b"1" * 32))
    assert marks_at(fs, folder) == {other}
    path.write_bytes(path.read_bytes()[:-3])
    assert marks_at(fs, folder) == set()
    mark(fs, folder, [one])
    unmark(fs, folder, [one, other])
    assert os.listdir(folder) == []


# ---- loads that do not succeed --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(tmp_path, monkeypatch):
    run(3, save, tmp_path, 1, patch=monkeypatch)

    def refuse(ranks):
        for how, words in [({"dim": DIM + 1}, "weights"), ({"tables": 1}, "tables")]:
            embedding = make(ranks, tmp_path, state=False, **how)
            fills = embedding.store
            fills.build()
            for call in (embedding.load_snapshot, functools.partial(internals.check_fits, embedding)):
                with pytest.raises((oneemb.StorageError, RankError), match=words):
                    call("s")
            embedding.store.stats()  # It is not broken.
            embedding.close()
        embedding = make(ranks, tmp_path)
        internals.check_fits(embedding, "s")
        with pytest.raises(SnapshotNotFoundError, match="there are: 's'"):
            internals.check_fits(embedding, "t")
        embedding.close()

    run_ranks(2, refuse, patch=monkeypatch)


def flip(path):
    data = bytearray(path.read_bytes())
    data[4096 + 5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("saved", "damaged"), [(2, "rank-1-of-2"), (3, "rank-2-of-3"), (3, "rank-1-of-3")])
def test_a_damaged_part_leaves_the_rows_of_all_ranks_as_they_were(tmp_path, monkeypatch, saved, damaged):
    run(saved, save, tmp_path, 1, patch=monkeypatch)
    flip(next((tmp_path / damaged / "chunks").glob("*.rows")))

    def stays(ranks):
        embedding = make(ranks, tmp_path)
        fill(embedding, 2)
        with pytest.raises((CorruptTableError, RankError), match="checksum"):
            embedding.load_snapshot("s")
        found = content(embedding)
        embedding.close()
        return found

    assert together(run_ranks(2, stays, patch=monkeypatch)) == (expected(2), STEP + 2)


@pytest.mark.parametrize("saved", [2, 3])
def test_after_a_load_that_stopped_half_way_every_rank_raises_until_another(tmp_path, monkeypatch, saved):
    run(saved, save, tmp_path, 1, patch=monkeypatch)

    def fails(*args, **how):
        raise oneemb.StorageError("no disk any more")

    def half(ranks):
        embedding = make(ranks, tmp_path)
        fill(embedding, 2)
        ranks.agree("before")
        snapshots = embedding.store.snapshots
        if "rank-1-of-2" in embedding.store.plan.persistent_path:
            snapshots.load_rows = fails
        with pytest.raises((oneemb.StorageError, RankError), match="no disk"):
            embedding.load_snapshot("s")
        ranks.agree("after")
        vars(snapshots).pop("load_rows", None)
        for call in (embedding.store.stats, lambda: embedding.save_snapshot("t")):
            with pytest.raises((BrokenStoreError, RankError)):
                call()
        embedding.load_snapshot("s")
        found = content(embedding)
        embedding.close()
        return found

    assert together(run_ranks(2, half, patch=monkeypatch)) == (expected(1), STEP + 1)


# ---- state dicts, warnings, clear -----------------------------------------------------------------------------------


def test_state_dicts_of_all_ranks_name_one_snapshot_and_load_it_on_any_number(tmp_path, monkeypatch):
    def name(ranks):
        embedding = make(ranks, tmp_path)
        empty = embedding.state_dict()
        assert oneemb.snapshot_name(empty["_extra_state"]) is None
        fill(embedding, 1)
        if ranks.rank == 0:  # What has changed on one rank alone is new for all.
            embedding.store.changes += 1
        first = embedding.state_dict()
        again = embedding.state_dict()
        assert torch.equal(first["_extra_state"], again["_extra_state"])
        if ranks.rank == 1:
            embedding.store.changes += 1
        other = embedding.state_dict()
        assert not torch.equal(first["_extra_state"], other["_extra_state"])
        embedding.load_state_dict(empty)
        assert content(embedding) == ({}, 0)
        embedding.load_state_dict(first)
        embedding.close()
        return first["_extra_state"].tolist(), other["_extra_state"].tolist()

    named = run_ranks(2, name, patch=monkeypatch)
    assert named[0] == named[1]

    def go_on(ranks):
        embedding = make(ranks, tmp_path)
        embedding.load_state_dict({"_extra_state": torch.tensor(named[0][0], dtype=torch.uint8)})
        found = content(embedding)
        embedding.close()
        return found

    for size in (0, 2, 3):
        assert together(run(size, go_on, patch=monkeypatch)) == (expected(1), STEP + 1)


def test_a_state_dict_of_another_run_is_refused_on_all_ranks(tmp_path, monkeypatch):
    first = run(2, save, tmp_path / "a", patch=monkeypatch)
    run(2, save, tmp_path / "b", patch=monkeypatch)

    def refuse(embedding):
        with pytest.raises(OtherSnapshotError, match="another run's"):
            internals.load_named(embedding, first[0])

    for size in (0, 2, 3):
        on(size, tmp_path / "b", refuse, monkeypatch)


def test_clear_forgets_the_rows_of_all_ranks_and_keeps_snapshots(tmp_path, monkeypatch):
    def clear(ranks):
        embedding = make(ranks, tmp_path)
        fill(embedding, 1)
        embedding.save_snapshot("s")
        embedding.clear()
        assert content(embedding) == ({}, 0) and embedding.snapshots() == ["s"]
        embedding.close()

    run_ranks(2, clear, patch=monkeypatch)


@pytest.mark.parametrize("size", [0, 2])
def test_the_first_rank_alone_says_that_an_embedding_starts_empty_beside_snapshots(tmp_path, monkeypatch, size):
    run(3, save, tmp_path, patch=monkeypatch)
    said = []
    monkeypatch.setattr(
        "oneemb.embeddings.snapshot_calls.warn_user", lambda text: said.append((threading.current_thread().name, text))
    )

    def begin(ranks):
        embedding = oneemb.MultiTableEmbedding(
            "items", DIM, torch.float32, torch.int64, [oneemb.make_table()], OPTIONS["device"](str(tmp_path)),
            process_group=ranks,
        )  # fmt: skip
        embedding.warn_if_empty()
        embedding.close()

    run(size, begin, patch=monkeypatch)
    assert [name for name, _ in said] == ["rank-0" if size else "MainThread"]
    assert "starts empty" in said[0][1] and "'s'" in said[0][1]
