"""Layers beside a served file: rows that have changed in deltas, without a whole file written anew."""

import errno
import gc
import mmap
import os
import pathlib
import shutil
import threading

import numpy as np
import pytest
import torch

import oneemb
from oneemb.serving.layers import VersionFile, files_of
from oneemb.storage.errors import CorruptTableError, StorageError
from oneemb.storage.fs import LocalFileSystem
from tests.support.forks import ended_well, in_child
from tests.support.waits import ended

ROWS, DIM, TABLES = 3000, 5, 3


class Job:
    """A training job with three tables, whose snapshots "0", "1" and so on are a whole snapshot and deltas."""

    def __init__(self, folder, seed=0, rows=ROWS):
        self.rng, self.rows, self.folder, self.saved = np.random.default_rng(seed), rows, str(folder / "job"), 0
        initial = oneemb.make_uniform_initializer(-1.0, 1.0)
        self.embedding = oneemb.MultiTableEmbedding(
            "rows", DIM, torch.float32, torch.int64, [oneemb.make_table(initial)] * TABLES,
            oneemb.make_device_mem_store_options(self.folder),
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.embedding.parameters(), lr=0.1)
        self.train(np.arange(rows))
        self.embedding.save_snapshot("0")

    def train(self, ids):
        tables = self.rng.integers(0, TABLES, len(ids)).astype(np.int32)
        rows = self.embedding(torch.from_numpy(ids), torch.from_numpy(tables))
        (rows * torch.from_numpy(self.rng.standard_normal(rows.shape, np.float32))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def delta(self, count=40):
        """Train some rows, new ones too, erase others, and save a delta."""
        self.train(self.rng.integers(-9, self.rows + 300, count))
        for table in range(TABLES):
            self.embedding.erase(torch.from_numpy(self.rng.integers(0, self.rows, count // 8)), table)
        self.train(self.rng.integers(0, self.rows, count // 8))  # some of those that have been erased
        self.saved += 1
        self.embedding.save_delta(str(self.saved), since=str(self.saved - 1))

    def keys(self, count=4000):
        tables = self.rng.integers(0, TABLES, count).astype(np.int32)
        return torch.from_numpy(self.rng.integers(-20, self.rows + 400, count)), torch.from_numpy(tables)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.embedding.close()


def opened(job, **options):
    return oneemb.InferenceEmbedding.open(job.folder, **options)


def layers_in(folder):
    return sorted(path for path in pathlib.Path(folder).iterdir() if "-since-" in path.name)


def whole_files_in(folder):
    return sorted(path for path in pathlib.Path(folder).glob("*.serving") if "-since-" not in path.name)


def same(served, job, keys=None):
    """Whether float32 rows have the bits of a lookup in eval mode."""
    ids, tables = job.keys() if keys is None else keys
    job.embedding.eval()
    with torch.no_grad():
        want = job.embedding(ids, tables)
    job.embedding.train()
    return torch.equal(served(ids, tables).view(torch.int32), want.view(torch.int32))


class Looks(torch.nn.Sequential):
    """A model whose answers are rows."""

    def forward(self, ids, tables):
        return self[0](ids, tables)


def save_model(job, folder):
    torch.save(Looks(job.embedding).state_dict(), folder / "new.pt")
    os.replace(folder / "new.pt", folder / "model.pt")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_every_delta_reads_as_its_whole_file(job, tmp_path, dtype):
    served = opened(job, dtype=dtype)
    for n in range(1, 13):
        job.delta()
        assert served.refresh() and served.version.name == str(n)
        ids, tables = job.keys()
        with opened(job, dtype=dtype, folder=tmp_path / f"whole {n}") as whole:
            assert torch.equal(served(ids, tables), whole(ids, tables))
            offsets = torch.arange(0, len(ids) + 1, 8)
            scales = torch.rand(len(ids))
            for pooling in ("sum", "mean", "max"):
                bags = {"table_ids": tables[: len(offsets) - 1], "offsets": offsets, "pooling": pooling}
                assert torch.equal(served(ids, **bags), whole(ids, **bags))
            bags = {"table_ids": tables[: len(offsets) - 1], "offsets": offsets, "per_sample_weights": scales}
            assert torch.equal(served(ids, **bags), whole(ids, **bags))
        assert not layers_in(tmp_path / f"whole {n}")
        assert dtype != "float32" or same(served, job, (ids, tables))
        assert len(whole_files_in(job.folder + "/serving")) <= 2  # that of a version with many layers is made beside
        assert 1 <= len(layers_in(job.folder + "/serving")) <= 8  # those of this version and of the one before
    assert served.quantization_error == (0, 0) or dtype != "float32"


def test_some_tables_in_another_order_and_absent_zeros(job, tmp_path):
    options = {"tables": [2, 0], "absent": "zeros"}
    served = opened(job, **options)
    for n in range(3):
        job.delta()
        served.refresh()
        with opened(job, **options, folder=tmp_path / f"whole {n}") as whole:
            ids = torch.from_numpy(job.rng.integers(-20, ROWS + 400, (500, 2)))
            assert torch.equal(served(ids), whole(ids))
            assert (served(ids) == 0).all(2).any()
    assert layers_in(job.folder + "/serving")


def test_one_layer_takes_over_deltas_that_were_missed(job):
    served = opened(job)
    for _ in range(5):
        job.delta(20)
    assert served.refresh() and same(served, job)
    assert len(layers_in(job.folder + "/serving")) == 1


def test_a_row_that_is_erased_and_trained_again_in_missed_deltas_is_there(job):
    served, ids = opened(job), torch.arange(20)
    keys = ids.repeat(TABLES), torch.arange(TABLES, dtype=torch.int32).repeat_interleave(20)
    for n in range(2):
        for table in range(TABLES):
            job.embedding.erase(ids, table)
        job.train(np.arange(20 * n))
        job.saved += 1
        job.embedding.save_delta(str(job.saved), since=str(job.saved - 1))
    assert served.refresh() and same(served, job, keys) and layers_in(job.folder + "/serving")


def test_a_whole_snapshot_is_taken_over_by_a_layer_of_its_changes(job):
    served, folder = opened(job), job.folder + "/serving"
    first = whole_files_in(folder)
    for n in range(3):
        job.delta()
        assert served.refresh()
        job.train(job.rng.integers(0, ROWS, 40))
        job.embedding.erase(torch.arange(20 * n, 20 * n + 9), 0)
        job.saved += 1
        job.embedding.save_snapshot(str(job.saved))
        if n == 1:
            job.delta()  # The server has not seen its parent.
        assert served.refresh() and served.version.name == str(job.saved) and same(served, job)
        assert whole_files_in(folder) == first
    job.saved += 1
    job.train(job.rng.integers(0, ROWS, 40))
    job.embedding.save_snapshot(str(job.saved))
    for name in list(job.embedding.snapshots())[-2::-1]:
        job.embedding.delete_snapshot(name)
    assert served.refresh() and same(served, job)
    assert len(whole_files_in(folder)) == 2, "the version before is not there, so all rows are written"


def test_a_layer_goes_on_from_files_that_are_open(job, monkeypatch):
    with opened(job) as served:
        job.delta()
        served.refresh()
        with monkeypatch.context() as patched:
            patched.setattr("oneemb.serving.layers.ServedFile", None)  # No file can be opened there.
            job.delta(200)  # enough to take the first layer in
            served.refresh()
        assert served.version.name == "2" and same(served, job)


def test_large_changes_make_a_whole_file(job):
    served = opened(job)
    job.delta(ROWS)
    assert served.refresh() and same(served, job)
    assert not layers_in(job.folder + "/serving")


def test_a_whole_file_is_made_beside_and_later_deltas_go_on_from_it(job):
    served, folder = opened(job), job.folder + "/serving"
    job.delta(ROWS // 6)
    assert served.refresh() and layers_in(folder)
    for thread in threading.enumerate():
        if thread.name == "oneemb-whole-file":
            thread.join(60)
            assert not thread.is_alive()
    first, second = whole_files_in(folder)
    assert served.version.identity in second.name
    assert served.version.name == "1" and same(served, job)
    job.delta()
    assert served.refresh() and same(served, job)
    (layer,) = [path for path in layers_in(folder) if served.version.identity in path.name.split("-since-")[0]]
    assert layer.name.split("-since-")[1].startswith(second.name.split("-")[1])


def test_a_rollback_to_any_delta_and_back(job):
    served, keys, answers = opened(job), job.keys(), {}
    for n in range(8):
        if n:
            job.delta()
            served.refresh()
        answers[str(n)] = served(*keys)
    for name in ("3", "7", "0", "6", "1"):
        served.rollback(name)
        assert served.version.name == name and torch.equal(served(*keys), answers[name])
    served.rollback("3")
    assert served.refresh() and served.version.name == "7" and torch.equal(served(*keys), answers["7"])


def test_lookups_of_threads_are_each_of_one_version_while_layers_are_taken_over(tmp_path):
    rows = 2000
    embedding = oneemb.MultiTableEmbedding(
        "rows", 4, torch.float32, torch.int64, [oneemb.make_table(oneemb.make_constant_initializer(0.0))],
        oneemb.make_device_mem_store_options(str(tmp_path / "job")),
    )  # fmt: skip
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(torch.arange(rows))
    embedding.save_snapshot("0")
    served, changed, ends, wrong, looked = (
        oneemb.InferenceEmbedding.open(str(tmp_path / "job")), torch.arange(0, rows, 40), threading.Event(), [], []
    )  # fmt: skip

    def look():
        last = 0
        while not ends.is_set():
            found = served(changed)
            if found.min() != found.max() or found.min() < last:
                wrong.append(found)
            last = found.min()
            looked.append(int(last))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(1, 20):
        embedding(changed).sum().mul(-1).backward()
        optimizer.step()
        optimizer.zero_grad()
        embedding.save_delta(str(n), since=str(n - 1))
        assert served.refresh()
    ends.set()
    ended(*threads)
    embedding.close()
    assert not wrong and len(set(looked)) > 1 and served(changed).unique().tolist() == [19]
    assert layers_in(tmp_path / "job" / "serving")


def test_layers_that_no_version_has_are_unmapped(job):
    served = opened(job)
    for _ in range(12):
        job.delta()
        served.refresh()
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = {line.split("serving/")[1].split(" ")[0].strip() for line in maps if job.folder + "/serving" in line}
    named = {path.name for path in pathlib.Path(job.folder, "serving").glob("*.serving")}
    assert 2 <= len(mapped) <= 5 and mapped <= named


def test_more_versions_in_use_than_have_places_are_mapped_anew(job, tmp_path):
    keys, versions = job.keys(), []
    save_model(job, tmp_path)
    with oneemb.serve_model(tmp_path / "model.pt", Looks(job.embedding)) as model:
        for _ in range(24):
            job.delta(8)
            save_model(job, tmp_path)
            assert model.refresh() and same(model, job, keys)
            versions.append((model.current, model(*keys)))
        assert len({id(version.rows["0"].base) for version, _ in versions}) > 1
        assert len({version.rows["0"].base.path for version, _ in versions}) == 1
        for version, answer in versions:
            assert torch.equal(version(*keys), answer)


def test_a_process_with_few_addresses_makes_whole_files(job, monkeypatch):
    def limited(file, size, memory=mmap.mmap, **options):
        if size > 1 << 20:
            raise OSError(errno.ENOMEM, "out of addresses")
        return memory(file, size, **options)

    monkeypatch.setattr(mmap, "mmap", limited)
    served = opened(job)
    for _ in range(2):
        job.delta()
        assert served.refresh() and same(served, job)
        assert served.version.identity in whole_files_in(job.folder + "/serving")[-1].name


def flipped(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.unlink()
    path.write_bytes(data)


def test_a_flipped_byte_anywhere_in_a_layer_is_an_error_that_names_it(job):
    served, other, folder = opened(job), opened(job), job.folder + "/serving"
    job.delta()
    other.refresh()
    (layer,) = layers_in(folder)
    good, before = layer.read_bytes(), served(*job.keys())
    for place in [*range(0, 128, 9), *range(4096, len(good), 97)]:
        flipped(layer, place)
        with pytest.raises(CorruptTableError, match=layer.name):
            served.refresh()
        assert served.version.name == "0" and layer.name in str(served.error)
        layer.write_bytes(good)
    layer.unlink()
    assert served.refresh() and same(served, job) and len(before)


def test_a_layer_of_another_version_is_refused_and_a_missing_one_is_made_again(job):
    served, folder = opened(job), job.folder + "/serving"
    job.delta(60)
    served.refresh()
    job.delta(20)
    with opened(job) as other:
        assert other.version.name == "2"
    first, second = layers_in(folder)
    shutil.copy(first, second)
    with pytest.raises(CorruptTableError, match=f"{second.name}.*must go on from"):
        served.refresh()
    assert served.version.name == "1"
    second.unlink()
    first.unlink()
    assert served.refresh() and served.version.name == "2" and same(served, job)


def test_a_layer_alone_is_not_served(job):
    served = opened(job)
    job.delta()
    served.refresh()
    (layer,) = layers_in(job.folder + "/serving")
    with pytest.raises(ValueError, match="only rows that have changed"):
        oneemb.InferenceEmbedding.open(layer)


class Calls(LocalFileSystem):
    """Counts the calls that write; at call `at` it calls `act`."""

    count, at, act = 0, -1, None

    def _call(self):
        type(self).count += 1
        if type(self).count - 1 == type(self).at:
            type(self).act()


def _counted(name):
    def call(self, *args, **options):
        self._call()
        return getattr(LocalFileSystem, name)(self, *args, **options)

    return call


for _name in ("make_directories", "create", "write", "sync", "rename", "remove", "sync_directory", "lock"):
    setattr(Calls, _name, _counted(_name))


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr("oneemb.serving.build.LocalFileSystem", Calls)
    monkeypatch.setattr("oneemb.storage.serving.served_writer.LocalFileSystem", Calls)
    Calls.count, Calls.at = 0, -1
    return Calls


def calls_of_a_takeover(job, served, calls):
    job.delta()
    calls.count = 0
    served.refresh()
    return calls.count


def test_a_kill_at_any_file_call_of_a_takeover_leaves_what_others_can_take_over(job, calls):
    served = opened(job)
    count = calls_of_a_takeover(job, served, calls)
    assert count > 6
    for call in range(count):
        job.delta(8)

        def takes_over(call=call):
            calls.count, calls.at, calls.act = 0, call, lambda: os._exit(7)
            served.refresh()

        child = in_child(takes_over)
        ended(child)
        assert child.exitcode in (7, 1), call
        assert served.refresh() and same(served, job), call
        assert not list(pathlib.Path(job.folder, "serving").glob("*.tmp")), call


def test_a_full_disk_at_any_call_is_an_error_and_the_former_version_stays(job, calls):
    served = opened(job)
    count = calls_of_a_takeover(job, served, calls)

    def full():
        raise OSError(errno.ENOSPC, "no space left")

    failed = 0
    for call in range(count):
        job.delta(8)
        before = served.version.name
        calls.count, calls.at, calls.act = 0, call, full
        try:
            served.refresh()
        except StorageError:
            assert served.version.name == before
            failed += 1
        calls.at = -1
        served.refresh()
        assert served.version.name == str(job.saved) and same(served, job), call
    assert failed > 4


def test_a_child_of_fork_takes_over_layers_of_its_own(job):
    served, keys = opened(job), job.keys()
    job.delta()
    served.refresh()
    answer = served(*keys)
    job.delta()
    job.embedding.eval()
    with torch.no_grad():
        want = job.embedding(*keys)

    def follows():
        return served.refresh() and torch.equal(served(*keys), want)

    assert ended_well(in_child(follows)) is True
    assert torch.equal(served(*keys), answer)
    assert served.refresh() and torch.equal(served(*keys), want)


def test_processes_that_follow_share_one_layer_of_each_delta(job):
    served, keys = opened(job), job.keys()
    job.delta()
    job.embedding.eval()
    with torch.no_grad():
        want = job.embedding(*keys)

    def follows():
        return served.refresh() and torch.equal(served(*keys), want)

    children = [in_child(follows) for _ in range(4)]
    assert [ended_well(child) for child in children] == [True] * 4
    assert len(layers_in(job.folder + "/serving")) == 1


def test_a_served_model_takes_over_a_checkpoint_of_a_delta_by_a_layer(job, tmp_path):
    save_model(job, tmp_path)
    keys = job.keys()
    with oneemb.serve_model(tmp_path / "model.pt", Looks(job.embedding)) as model:
        first = model.current.rows["0"]
        for _ in range(3):
            job.delta()
            save_model(job, tmp_path)
            assert model.refresh() and same(model, job, keys)
            assert model.current.rows["0"].base is first.base
        assert model.current.snapshots["0"].name == "3"
    assert len(whole_files_in(job.folder + "/serving")) == 1


def test_the_files_of_a_version_are_found_by_their_identities():
    def one(sequence, identity, since=""):
        return VersionFile(sequence, identity, since, f"{sequence}-{identity}-{since}")

    a, b, ab, bc, ac, cd, x = (
        one(1, "a"), one(2, "b"), one(2, "b", "a"), one(3, "c", "b"), one(3, "c", "a"), one(4, "d", "c"),
        one(5, "e", "stranger"),
    )  # fmt: skip
    assert files_of("c", [a, ab, bc]) == [a, ab, bc]
    assert files_of("c", [a, ab, bc, ac]) == [a, ac]  # fewest layers
    assert files_of("d", [a, b, ab, bc, ac, cd]) == [b, bc, cd]  # newest whole file
    assert files_of("e", [a, x]) is None and files_of("d", [cd, bc]) is None
    assert files_of("p", [one(2, "p", "q"), one(1, "q", "p")]) is None  # a circle
