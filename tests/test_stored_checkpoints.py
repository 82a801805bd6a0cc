"""Checkpoints in an object store: whole wherever a save ends, loaded by any number of ranks, without a shared disk."""

import itertools
import random
import shutil
import threading
import uuid

import fsspec
import pytest
import torch

import oneemb
from oneemb.storage.errors import StorageError
from oneemb.storage.objects import marks, push as push_module
from oneemb.storage.objects.manifests import get_part, names_in, newest_in, part_keys_in
from oneemb.storage.objects.object_store import ObjectStore
from tests.support.rank_jobs import killed
from tests.support.thread_ranks import FaultyCalls, restored_job, run_ranks
from tests.test_rank_checkpoints import FEW, STEP, Filled, expected, run, together
from tests.test_train_graph_checkpoint import IDS, graph_at, state_of

pytestmark = pytest.mark.filterwarnings("ignore:embedding 'items' starts empty")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/bucket/c.pt"
    return f"memory://{uuid.uuid4().hex}/job/c.pt"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(push_module, "_PIECE_BYTES", 3000)
    monkeypatch.setattr("oneemb.storage.objects.object_store._WAIT_S", 0)


def rows_store(url):
    return ObjectStore(f"{url}.rows/embedding")


@pytest.mark.parametrize("where", ["an empty folder", "the same folder", "a folder with an older snapshot"])
def test_a_graph_goes_on_bit_for_bit_on_another_machine(tmp_path, url, where):
    graph = graph_at(tmp_path / "rows")
    for step in range(3):
        graph(IDS + step)
        if step == 1:
            graph.save(url)
            shutil.copytree(tmp_path / "rows", tmp_path / "older", ignore=shutil.ignore_patterns("LOCK"))
    graph.save(url)
    expected = [graph(IDS + step) for step in range(4)], state_of(graph), graph.steps
    graph.embedding.close()
    folder = {"the same folder": "rows", "an empty folder": "new"}.get(where, "older")
    again = graph_at(tmp_path / folder)
    torch.manual_seed(99)
    again.load(url)
    assert again.steps == 3 and again.embedding.last_snapshot == again.embedding.snapshots()[-1]
    assert ([again(IDS + step) for step in range(4)], state_of(again), again.steps) == expected
    again.embedding.save_delta("delta", since=again.embedding.last_snapshot)
    again.embedding.close()
    assert not (tmp_path / f"{folder}.pull").exists()


def test_a_load_that_is_interrupted_once_its_rows_are_here_leaves_no_folder_to_the_next(tmp_path, url, monkeypatch):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(url)
    graph.embedding.close()
    again = graph_at(tmp_path / "new")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(again.embedding.rank_snapshots), "load", lambda *args, **more: interrupt())
        again.load(url)
    assert (tmp_path / "new.pull").exists()
    again.load(url)
    assert not (tmp_path / "new.pull").exists()
    assert again.steps == 1
    again.embedding.close()


def interrupt():
    raise KeyboardInterrupt


def assert_goes_on(tmp_path, url, graph, folder):
    """A graph at another folder goes on from the URL as this one does."""
    expected = [graph(IDS + step) for step in range(4)], state_of(graph), graph.steps
    graph.embedding.close()
    again = graph_at(folder)
    again.load(url)
    assert ([again(IDS + step) for step in range(4)], state_of(again), again.steps) == expected
    return again


@pytest.mark.parametrize("what", ["a job that runs", "a folder of another job"])
def test_rows_are_copied_where_they_cannot_be_linked(tmp_path, url, what):
    graph, other = graph_at(tmp_path / "rows"), graph_at(tmp_path / "other")
    for step in range(3):
        graph(IDS + step)
        other(IDS + 10 * step)
    graph.save(url)
    other.embedding.save_snapshot("other")
    expected = [graph(IDS + step) for step in range(2)], state_of(graph)
    graph.embedding.close()
    if what == "a folder of another job":
        other.embedding.close()
        other = graph_at(tmp_path / "other")
    other.load(url)
    assert other.embedding.last_snapshot is None and other.embedding.snapshots() == ["other"]
    assert ([other(IDS + step) for step in range(2)], state_of(other)) == expected
    other.save(url, keep=1)
    other.load(url)
    other.embedding.load_snapshot("other")
    other.embedding.close()
    assert not (tmp_path / "other.pull").exists()


def disks(root, size):
    return [f"{root}/disk{rank}" for rank in range(max(1, size))]


def save(ranks, root, size, url, *versions, keep=1, load=False):
    graph = Filled(ranks, disks(root, size))
    if load:
        graph.load(url)
    for version in versions:
        graph.have(version).save(url, keep=keep)
    found = graph.what() if load and not versions else None
    graph.embedding.close()
    return found


def version_at(root, size, url, patch):
    """The version that so many ranks load, each on a disk of its own; it has to be whole."""
    found = run(size, lambda ranks: save(ranks, root, size, url, load=True), patch=patch)
    (version,) = {version for version, _ in found}
    assert together([rows for _, rows in found]) == (expected(version, FEW), STEP + version)
    return version


def assert_only(url, snapshots):
    """The store has so many snapshots, and no other object."""
    store = rows_store(url)
    names = names_in(store)
    assert len(names) == snapshots, names
    used = {digest for one in part_keys_in(store) for file in get_part(store, *one).files for digest, _ in file.pieces}
    assert {one[0] for one in part_keys_in(store)} == set(names)
    assert {key.rpartition("/")[2] for key in store.keys("objects/")} == used
    parent, _, name = url.rpartition("/")
    assert {key for key in ObjectStore(parent).keys("") if not key.startswith(f"{name}.rows/")} == {name}
    assert {key.partition("/")[0] for key in store.keys("")} <= {"snapshots", "objects", "newest.json"}


@pytest.mark.parametrize("size", [0, 2, 3])
def test_any_number_of_ranks_loads_what_any_number_has_saved_without_a_shared_disk(tmp_path, url, size, monkeypatch):
    run(size, lambda ranks: save(ranks, tmp_path, size, url, 1, 2), patch=monkeypatch)
    assert_only(url, 1)
    for other in (0, 2, 3):
        assert version_at(tmp_path / f"new{other}", other, url, monkeypatch) == 2
    run(3, lambda ranks: save(ranks, tmp_path / "new3", 3, url, 3, load=True), patch=monkeypatch)
    assert_only(url, 1)
    assert version_at(tmp_path, size, url, monkeypatch) == 3


@pytest.mark.parametrize("size", [0, 2])
def test_the_newest_save_is_that_of_a_job_whose_folders_count_anew(tmp_path, url, size, monkeypatch):
    run(0, lambda ranks: save(ranks, tmp_path, 0, url, 1, 2, 3, keep=None), patch=monkeypatch)

    def go_on(ranks):
        graph = Filled(ranks, disks(tmp_path / "new", size))
        graph.have(9).load(url)  # rows are there, or there are more ranks: the rows of the store are copied
        graph.have(4).save(url)
        name = graph.embedding.last_snapshot
        graph.embedding.close()
        return name

    name, *_ = run(size, go_on, patch=monkeypatch)
    assert newest_in(rows_store(url))[0] == name
    assert len(names_in(rows_store(url))) == 4


def test_a_rank_on_a_new_machine_brings_its_part_and_the_others_have_theirs(tmp_path, url, monkeypatch):
    run(2, lambda ranks: save(ranks, tmp_path, 2, url, 1), patch=monkeypatch)
    shutil.rmtree(tmp_path / "disk1")
    get, brought = ObjectStore.get, []
    monkeypatch.setattr(
        ObjectStore, "get", lambda store, piece: brought.append(threading.current_thread()) or get(store, piece)
    )
    assert version_at(tmp_path, 2, url, monkeypatch) == 1
    parts = [get_part(rows_store(url), *one) for one in part_keys_in(rows_store(url))]
    assert len(brought) == sum(len(file.pieces) for file in parts[1].files)


def test_the_store_keeps_as_many_saves_as_asked_for_and_the_folder_the_last(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    for step, (keep, there) in enumerate([(None, 1), (None, 2), (None, 3), (2, 2), (3, 3), (1, 1)]):
        graph(IDS + step)
        graph.save(url, keep=keep)
        assert_only(url, there)
        assert len(graph.embedding.snapshots()) == 1
    graph.embedding.close()


@pytest.mark.parametrize("keep_deltas", [True, False])
def test_deltas_in_the_store_keep_their_parent_or_go_with_it(tmp_path, url, keep_deltas):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(url, keep=1)
    parent = graph.embedding.last_snapshot
    graph(IDS + 1)
    graph.embedding.save_delta("delta", since=parent)
    oneemb.push(tmp_path / "rows", rows_store(url).url, ["delta"])
    graph(IDS + 2)
    graph.save(url, keep=1, keep_deltas=keep_deltas)
    last = graph.embedding.last_snapshot
    expected = [parent, "delta", last] if keep_deltas else [last]
    assert sorted(graph.embedding.snapshots()) == names_in(rows_store(url)) == sorted(expected)
    graph.embedding.close()


def test_newer_snapshots_in_the_store_are_deleted_where_asked_for(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(url)
    graph(IDS + 1)
    graph.embedding.save_delta("delta", since=graph.embedding.last_snapshot)
    oneemb.push(tmp_path / "rows", rows_store(url).url, ["delta"])
    graph.embedding.close()
    for newer in (False, True):
        again = graph_at(tmp_path / f"new{newer}")
        again.load(url, delete_newer=newer)
        again.embedding.close()
        assert ("delta" in names_in(rows_store(url))) is not newer


def test_a_copy_of_the_checkpoint_finds_its_rows_where_it_was_saved(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(url)
    fs, path = fsspec.core.url_to_fs(url)
    (tmp_path / "copy.pt").write_bytes(fs.cat_file(path))
    fs.pipe_file(f"{path}.copy", fs.cat_file(path))
    graph(IDS + 1)
    graph.save(url)
    graph.embedding.close()
    for n, copy in enumerate([str(tmp_path / "copy.pt"), f"{url}.copy"]):
        again = graph_at(tmp_path / f"new{n}")
        again.load(copy)
        assert again.steps == 1
        again.embedding.close()


def test_a_checkpoint_that_was_moved_with_its_rows_finds_them_beside_it(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(url)
    graph.embedding.close()
    fs, path = fsspec.core.url_to_fs(url)
    for old in fs.find(path.rpartition("/")[0]):
        fs.makedirs(old.replace("c.pt", "moved.pt").rpartition("/")[0], exist_ok=True)
        fs.pipe_file(old.replace("c.pt", "moved.pt"), fs.cat_file(old))
        fs.rm_file(old)
    again = graph_at(tmp_path / "new")
    again.load(url.replace("c.pt", "moved.pt"))
    assert again.steps == 1
    again.embedding.close()


# ---- kills, failures and damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "every"),
    [(0, 23), (2, 41), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_a_kill_at_any_file_call_leaves_a_whole_checkpoint_in_the_store(tmp_path, monkeypatch, size, every):
    url = f"file://{tmp_path}/job/bucket/c.pt"
    run(size, lambda ranks: save(ranks, tmp_path / "job", size, url, 1), patch=monkeypatch)
    root, seen = restored_job(tmp_path), set()

    def act(ranks, calls):
        graph = Filled(ranks if size else None, disks(root, size)).have(2)
        with calls.counted():
            try:
                graph.save(url, keep=1)
            except Exception:
                pass  # Another rank was killed.
        graph.embedding.close()

    with monkeypatch.context() as patch:
        calls = FaultyCalls(patch)
        run_ranks(max(1, size), act, calls, patch=patch)
        counts = [len(calls.of(rank)) for rank in range(max(1, size))]
    for dead, count in enumerate(counts):
        for at in sorted({*range(dead, count, every), *range(count - 3, count)}):
            restored_job(tmp_path)
            with monkeypatch.context() as patch:
                calls = FaultyCalls(patch, rank=dead, at=at)
                run_ranks(max(1, size), act, calls, patch=patch, dies=(dead,))
            version = version_at(tmp_path / f"new{dead}.{at}", size, url, monkeypatch)
            seen.add(version)
            monkeypatch.setattr(marks, "ALIVE_S", -1.0)
            run(size, lambda ranks: save(ranks, root, size, url, 3), patch=monkeypatch)
            assert_only(url, 1)
            assert version_at(tmp_path / f"last{dead}.{at}", size, url, monkeypatch) == 3
    assert seen == {1, 2}


CALLS = ("pipe_file", "cat_file", "info", "find", "rm_file")


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_store_that_fails_at_any_call_is_an_error_and_leaves_a_whole_checkpoint(tmp_path, monkeypatch, every):
    kind, counted = type(fsspec.filesystem("memory")), itertools.count()
    at: list[int | None] = [None]
    for name in CALLS:
        original = getattr(kind, name)

        def failing(fs, path, *args, original=original, **kwargs):
            if threading.current_thread().name == "MainThread" or "oneemb-objects" in threading.current_thread().name:
                n = next(counted)
                if at[0] is not None and n >= at[0]:
                    raise TimeoutError("the network is down")
            return original(fs, path, *args, **kwargs)

        monkeypatch.setattr(kind, name, failing)
    failed, done = 0, False
    for n in itertools.count(0, every):
        url = f"memory://{uuid.uuid4().hex}/c.pt"
        graph = Filled(None, f"{tmp_path}/{n}")
        graph.have(1).save(url, keep=1)
        counted, at[0] = itertools.count(), n
        try:
            graph.have(2).save(url, keep=1)
            done = next(counted) <= n
        except StorageError as error:
            assert "could not be" in str(error) and "the network is down" in str(error)
            failed += 1
        at[0] = None
        found = version_at(tmp_path / f"new{n}", 0, url, monkeypatch)
        graph.have(3).save(url, keep=1)
        assert_only(url, 1)
        assert len(graph.embedding.snapshots()) == 1
        graph.embedding.close()
        assert version_at(tmp_path / f"last{n}", 0, url, monkeypatch) == 3
        if done:
            break
        assert found in (1, 2)
    assert found == 2 and failed > 20 // every


def test_a_damaged_or_missing_object_is_an_error_that_names_it_and_changes_nothing(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    graph(IDS)
    graph.save(url)
    whole, told = state_of(graph), 0
    graph.embedding.close()
    fs, root = fsspec.core.url_to_fs(url.rpartition("/")[0])
    for n, path in enumerate(sorted(fs.find(root))):
        data = fs.cat_file(path)
        for wrong in (data[:-1] if path.endswith(".pt") else data[:-1] + bytes([data[-1] ^ 1]), None):
            fs.rm_file(path) if wrong is None else fs.pipe_file(path, wrong)
            fresh = graph_at(tmp_path / f"new{n}")
            fresh(IDS + 5)
            before = state_of(fresh)
            try:
                fresh.load(url)
            except (ValueError, StorageError, FileNotFoundError) as error:
                assert path.rpartition("/")[2] in str(error) or "no snapshot named" in str(error)
                assert state_of(fresh) == before
                told += 1
            else:  # The object is not read, or the folder of the graph has its bytes.
                assert state_of(fresh) == whole
            fresh.embedding.close()
            shutil.rmtree(tmp_path / f"new{n}")
            fs.pipe_file(path, data)
    assert told > 10


def saves_until_it_is_killed(group, report, root, url):
    """Goes on from the checkpoint that is there, and reports each that it has saved."""
    graph = Filled(group, disks(root, 3 if group is None else group.size()))
    fs, path = fsspec.core.url_to_fs(url)
    if fs.exists(path):
        graph.load(url)
    report(("begins", graph.steps))
    while True:
        graph.have(graph.steps + 1).save(url, keep=1 + graph.steps % 2)
        report(("saved", graph.steps))


@pytest.mark.parametrize("times", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_jobs_lose_no_checkpoint_that_they_have_announced(tmp_path, times, seed, monkeypatch):
    rng, last, url = random.Random(seed), 0, f"file://{tmp_path}/bucket/c.pt"
    monkeypatch.setattr(marks, "ALIVE_S", -1.0)
    for n in range(times):
        root = tmp_path / f"machine{rng.randrange(3)}"
        begun, announced = killed(3, saves_until_it_is_killed, str(root), url, rng=rng, waits=n % 4 != 1)
        assert begun == last
        last = version_at(tmp_path / f"new{n}", 0, url, monkeypatch) if (tmp_path / "bucket/c.pt").exists() else 0
        assert last >= announced, f"version {announced} was announced, {last} was found"
    assert last
    run(0, lambda ranks: save(ranks, tmp_path, 0, url, last + 1), patch=monkeypatch)
    assert_only(url, 1)


@pytest.mark.parametrize("wrong", ["s3://", "s3://checkpoint.pt/", "memory:///"])
def test_a_url_that_names_no_object_is_refused(tmp_path, wrong):
    graph = graph_at(tmp_path / "rows")
    for call in graph.save, graph.load:
        with pytest.raises(ValueError, match="path must be the URL of an object, such as"):
            call(wrong)
    graph.embedding.close()


def test_a_checkpoint_that_is_not_there_is_a_file_that_is_not_found(tmp_path, url):
    graph = graph_at(tmp_path / "rows")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        graph.load(url)
    graph.embedding.close()
