"""Batches of files against plain Python over the same rows: any sizes, windows, workers and ranks, and any resumes."""

import copy
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import oneemb
from oneemb.data import ChangedSourceError, Files, GrowingFolder, Ids, Lists, Loader, Numbers

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
xxhash = pytest.importorskip("xxhash")

COLUMNS = {"ids": Ids("user", "item"), "n": "n", "tags": Lists("tags")}


def row_of(n):
    return {"user": f"u{n % 7}", "item": n * 3, "n": n, "tags": [f"t{k}" for k in range(n % 4)]}


def hashed(text):
    return int(np.uint64(xxhash.xxh64_intdigest(text.encode())).astype(np.int64))


def batch_of(numbers):
    """The batch of some rows, as lists."""
    rows = [row_of(n) for n in numbers]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row["tags"]))
    return {
        "ids": [[hashed(row["user"]), row["item"]] for row in rows],
        "n": [float(row["n"]) for row in rows],
        "tags": ([hashed(tag) for row in rows for tag in row["tags"]], offsets),
    }


def as_lists(batch):
    values, offsets = batch["tags"]
    return {"ids": batch["ids"].tolist(), "n": batch["n"].tolist(), "tags": (values.tolist(), offsets.tolist())}


def numbers_of(batches):
    return [int(n) for batch in batches for n in batch["n"].tolist()]


def write(folder, files, group_rows=5, kind="parquet", first=0):
    """Files with so many rows each, numbered from `first` on. Returns the number of rows."""
    for number, rows in enumerate(files):
        end = first + rows
        table = pa.Table.from_pylist([row_of(n) for n in range(first, end)], schema=SCHEMA)
        path = f"{folder}/{len(os.listdir(folder)):03}-{number}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=group_rows)
        else:
            with pa.ipc.new_file(path, SCHEMA) as writer:
                writer.write_table(table, max_chunksize=group_rows)
        first = end
    return first


SCHEMA = pa.schema(
    {"user": pa.string(), "item": pa.int64(), "n": pa.int32(), "tags": pa.list_(pa.string()), "unused": pa.float64()}
)


def loader_of(folder, batch_size=4, **options):
    return Loader(Files(f"{folder}/*"), batch_size, COLUMNS, **options)


def loaders_of(folder, world_size, batch_size=4, **options):
    return [loader_of(folder, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@given(
    files=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    group_rows=st.integers(1, 17), batch_size=st.integers(1, 50), workers=st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_rows_in_order_are_those_of_plain_python(tmp_path_factory, kind, files, group_rows, batch_size, workers):
    folder = tmp_path_factory.mktemp("files")
    total = write(folder, files, group_rows, kind)
    loader = loader_of(folder, batch_size, workers=workers)
    assert len(loader) == math.ceil(total / batch_size)
    expected = [batch_of(range(begin, min(begin + batch_size, total))) for begin in range(0, total, batch_size)]
    for _ in range(2):  # epochs
        assert [as_lists(batch) for batch in loader] == expected


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_resumed_on_any_number_of_ranks_each_row_is_given_once(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("files")
    files = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda rows: sum(rows) > 30))
    total = write(folder, files, data.draw(st.integers(1, 30)))
    batch_size = data.draw(st.integers(1, 9))
    seen, states = [], None
    for _ in range(data.draw(st.integers(1, 3))):
        world_size = data.draw(st.integers(1, 4))
        shuffle = data.draw(st.sampled_from([0, 3, 20, 500]))
        workers = data.draw(st.integers(0, 2))
        loaders = loaders_of(folder, world_size, batch_size, shuffle=shuffle, seed=3, workers=workers)
        left = total - len(seen)
        try:
            for loader in loaders:
                if states is not None:
                    loader.load_state_dict(copy.deepcopy(states))
                lengths = {len(one) for one in loaders[: loader.rank + 1]}
        except ValueError as error:
            assert "train on fewer ranks" in str(error) and (batch_size == 1 or left < 5 * world_size)
            return
        assert len(lengths) == 1, "ranks give equally many batches"
        steps = data.draw(st.integers(0, *lengths))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            for iterator in iterators:
                batch = next(iterator)
                numbers = numbers_of([batch])
                assert 1 <= len(numbers) <= batch_size and as_lists(batch) == batch_of(numbers)
                seen += numbers
        states = [loader.state_dict() for loader in loaders]
        assert (
            len(set(seen)) == len(seen)
            and [len(loader) for loader in loaders] == [*lengths] * 0 + [min(lengths) - steps] * world_size
        )
    counts = set()
    for loader in loaders:
        batches = list(loader)
        counts.add(len(batches))
        seen += numbers_of(batches)
    assert len(counts) == 1 and sorted(seen) == list(range(total))
    epoch = numbers_of(batch for loader in loaders for batch in loader)
    assert sorted(epoch) == list(range(total))


@pytest.mark.parametrize("shuffle", [0, 7, 1000])
def test_any_workers_and_a_resume_at_any_batch_give_the_same_batches(tmp_path, shuffle):
    total = write(tmp_path, [23, 1, 40], 6)
    whole = loader_of(tmp_path, 3, shuffle=shuffle, seed=5)
    expected, states = [], [copy.deepcopy(whole.state_dict())]
    for _ in range(2):
        for batch in whole:
            expected.append(as_lists(batch))
            states.append(copy.deepcopy(whole.state_dict()))
    first, second = numbers_of_lists(expected, total)
    assert (first == list(range(total))) == (shuffle == 0) and (first != second) == (shuffle > 0)
    for at, state in enumerate(states):
        again = loader_of(tmp_path, 3, shuffle=shuffle, seed=5, workers=at % 3)
        again.load_state_dict(state)
        found = [as_lists(batch) for batch in again]
        end = -(-total // 3)
        assert found == (expected[at:end] if at <= end else expected[at:])
    other = loader_of(tmp_path, 3, shuffle=shuffle, seed=6)
    assert ([as_lists(batch) for batch in other] == expected[: -(-total // 3)]) == (shuffle == 0)


def numbers_of_lists(batches, total):
    numbers = [int(n) for batch in batches for n in batch["n"]]
    assert sorted(numbers) == sorted([*range(total)] * 2)
    return numbers[:total], numbers[total:]


def test_a_loop_that_is_left_goes_on_and_one_that_another_replaced_raises(tmp_path):
    total = write(tmp_path, [20])
    loader = loader_of(tmp_path)
    left = iter(loader)
    seen = numbers_of([next(left), next(left)])
    goes_on = iter(loader)
    seen += numbers_of([next(goes_on)])
    with pytest.raises(RuntimeError, match="before another one begins"):
        next(left)
    assert seen + numbers_of(goes_on) == list(range(total))


def test_stop_ends_a_loop_and_the_next_one_goes_on(tmp_path):
    total = write(tmp_path, [20])
    loader, seen = loader_of(tmp_path, shuffle=8), []
    for batch in loader:
        seen += numbers_of([batch])
        if len(seen) == 12:
            loader.stop()
    assert len(seen) == 12 and sorted(seen + numbers_of(loader)) == list(range(total))


@pytest.mark.parametrize("change", ["gone", "replaced", "added", "renamed"])
def test_a_state_of_other_files_is_refused(tmp_path, change):
    write(tmp_path, [8, 8])
    loader = loader_of(tmp_path)
    next(iter(loader))
    state, files = loader.state_dict(), sorted(tmp_path.iterdir())
    if change == "gone":
        files[1].unlink()
    elif change == "replaced":
        table = pq.read_table(files[0])
        pq.write_table(table.set_column(1, "item", pa.array(range(8))), files[0], row_group_size=5)
    elif change == "added":
        write(tmp_path, [8])
    else:
        files[0].rename(tmp_path / "another.parquet")
    again = loader_of(tmp_path)
    with pytest.raises(ChangedSourceError, match="restore"):
        again.load_state_dict(state)
    assert numbers_of([next(iter(again))]) != []  # It begins anew.


def test_states_of_other_ranks_and_batch_sizes_are_refused(tmp_path):
    write(tmp_path, [20])
    states = [loader.state_dict() for loader in loaders_of(tmp_path, 2)]
    for state, options, text in [
        (states[0], {"rank": 1, "world_size": 2}, "got one of rank 0 of 2"),
        (states[0], {}, "list of the states of all ranks"),
        (states[:1], {}, "must get the states of all ranks"),
        (states[0], {"rank": 0, "world_size": 2, "batch_size": 5}, "batch_size must be 4"),
        *(
            (wrong, {}, "must get a result of state_dict")
            for wrong in [
                {"at": 3},
                None,
                [],
                [[]],
                {**states[0], "open": None},
                {**states[0], "open": [{}]},
                {name: states[0][name] for name in states[0] if name != "next"},
            ]
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            loader_of(tmp_path, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="train on fewer ranks"):
        len(loaders_of(tmp_path, 21)[0])


def test_files_are_read_once_folders_are_left_out_and_a_name_may_look_like_a_pattern(tmp_path):
    (tmp_path / "a[1]").mkdir()
    total = write(tmp_path / "a[1]", [3])
    (tmp_path / "a[1]" / "000-0.parquet").rename(tmp_path / "a[1]" / "b[2].parquet")
    write(tmp_path, [4], first=total)
    found = Files(f"{tmp_path}/**/*.parquet", f"{tmp_path}/*.parquet", f"{tmp_path}/a[1]/b[2].parquet", f"{tmp_path}/*")
    assert sorted(numbers_of(Loader(found, 4, COLUMNS))) == list(range(7))


def test_a_loop_that_goes_on_in_a_fork_is_an_error_and_another_one_is_not(tmp_path):
    total = write(tmp_path, [40])
    for workers in (0, 2):
        loader = loader_of(tmp_path, 4, workers=workers)
        loop = iter(loader)
        seen = numbers_of([next(loop)])
        child = os.fork()
        if not child:
            status = 1
            try:
                list(loop)
            except RuntimeError as error:
                again = loader_of(tmp_path, 4, workers=workers)
                again.load_state_dict(loader.state_dict())
                if "must stay in its process" in str(error) and numbers_of(again)[-1] == total - 1:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert seen + numbers_of(loop) == list(range(total))


def test_files_that_are_none_or_are_damaged_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"\*.parquet.*check the pattern"):
        Files(f"{tmp_path}/*.parquet")
    for content in (b"", b"PAR1 not at all", b"ARROW1 neither"):
        (tmp_path / "damaged.parquet").write_bytes(content)
        with pytest.raises(ValueError, match="damaged.parquet must be a whole Parquet or Arrow file"):
            list(loader_of(tmp_path))
    (tmp_path / "damaged.parquet").unlink()
    write(tmp_path, [200], 100)
    path = next(tmp_path.iterdir())
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="must be a whole Parquet or Arrow file"):
        list(loader_of(tmp_path))


def test_memory_is_bounded_by_pieces_and_a_window(tmp_path):
    """Rows that the loader holds while it gives the first batch, by the bytes that Arrow has allocated."""
    rows = 600_000
    table = pa.table({"n": np.arange(rows), "text": [str(n) * 10 for n in range(rows)]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=rows)
    size = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    loader = Loader(Files(f"{tmp_path}/*"), 64, {"n": Numbers("n"), "ids": Ids("text")}, shuffle=1000)
    held = []
    for batch in loader:
        held.append(pa.total_allocated_bytes() - before)
        assert len(batch["n"])
    assert max(held) < size / 2 and len(held) == rows // 64


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rows_before_a_damaged_row_group_are_given(tmp_path, workers):
    total = write(tmp_path, [40], 5)
    (path,) = tmp_path.iterdir()
    begin = pq.ParquetFile(path).metadata.row_group(6).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + 20] = bytes(20)
    path.write_bytes(data)
    seen = []
    with pytest.raises(ValueError, match="must be a whole Parquet or Arrow file"):
        for batch in loader_of(tmp_path, 5, workers=workers):
            seen += numbers_of([batch])
    assert seen == list(range(30)) and total == 40


@pytest.mark.parametrize("workers", [0, 1])
def test_a_window_holds_no_strings(tmp_path, workers):
    """Bytes that Arrow has allocated while a window of all rows is open."""
    rows = 200_000
    table = pa.table({"n": range(rows), "text": [f"{n:0100}" for n in range(rows)]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=20_000)
    size = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    loader = Loader(Files(f"{tmp_path}/*"), 1000, {"n": "n", "ids": Ids("text")}, shuffle=rows, workers=workers)
    loop = iter(loader)
    next(loop)
    assert pa.total_allocated_bytes() - before < size / 2


def test_damaged_arrow_files_are_named_and_do_not_end_the_process(tmp_path):
    """Offsets beyond their values, and any damaged bytes."""
    write(tmp_path, [200], 50, "arrow")
    (path,) = tmp_path.iterdir()
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(60):
        data = bytearray(whole)
        for place in rng.integers(0, len(data) - 8, 3):
            data[place : place + 4] = rng.choice([b"\xff\xff\xff\x7f", bytes(rng.integers(0, 256, 4).tolist())])
        path.write_bytes(data)
        try:
            list(loader_of(tmp_path))
        except ValueError as error:
            refused += 1
            assert path.name in str(error)
    path.write_bytes(whole)
    loop = iter(loader_of(tmp_path))
    next(loop)
    os.truncate(path, len(whole) // 2)  # while it is read
    with pytest.raises(ValueError, match="must be a whole Parquet or Arrow file"):
        list(loop)
    assert refused > 20


# ---- a folder that grows ---------------------------------------------------------------------------------------------


def folder_loaders(folder, world_size, **options):
    options = {"end_after_s": 0.0, "max_wait_s": 0.0, **options}
    return [
        Loader(GrowingFolder(f"{folder}/*"), 4, COLUMNS, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_growing_folder_gives_each_row_once_on_any_ranks(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("folder")
    seen, states, total = [], None, 0
    for _ in range(data.draw(st.integers(1, 4))):
        files = data.draw(st.lists(st.integers(0, 20), max_size=2))
        total = write(folder, files, data.draw(st.integers(1, 9)), first=total)
        shuffle = data.draw(st.sampled_from([0, 9, 100]))
        loaders = folder_loaders(folder, data.draw(st.integers(1, 3)), shuffle=shuffle)
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(copy.deepcopy(states))
            for _, batch in zip(range(data.draw(st.integers(0, 6))), loader, strict=False):
                assert as_lists(batch) == batch_of(numbers_of([batch]))
                seen += numbers_of([batch])
        states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        seen += numbers_of(loader)
    assert sorted(seen) == list(range(total))
    write(folder, [7], first=total)
    for loader in loaders:  # A further loop gives what has come since.
        seen += numbers_of(loader)
    assert sorted(seen) == list(range(total + 7))


def test_a_growing_folder_misses_a_file_that_is_gone_replaced_or_late(tmp_path):
    write(tmp_path, [12, 12])
    first, second = sorted(tmp_path.iterdir())
    (loader,) = folder_loaders(tmp_path, 1)
    iterator = iter(loader)
    states = [copy.deepcopy(loader.state_dict()) for batch in iterator]
    first.unlink()  # It is read.
    (again,) = folder_loaders(tmp_path, 1)
    again.load_state_dict(states[3])
    assert numbers_of(again) == list(range(16, 24))
    again.load_state_dict(states[1])
    with pytest.raises(ChangedSourceError, match="and is gone; restore it"):
        list(again)
    pq.write_table(pq.read_table(second).slice(1), second)
    again.load_state_dict(states[3])
    with pytest.raises(ChangedSourceError, match="must be the file of the loader's position"):
        list(again)
    (loader,) = folder_loaders(tmp_path, 1, end_after_s=60)
    iterator = iter(loader)
    next(iterator)
    (tmp_path / "000-late.parquet").write_bytes(second.read_bytes())
    with pytest.raises(ChangedSourceError, match="000-late.parquet does not; rename it"):
        list(iterator)


def test_a_file_that_is_read_may_be_deleted_also_if_it_ends_with_an_empty_row_group(tmp_path):
    for number in range(2):
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", SCHEMA) as writer:
            for rows in ([row_of(4 * number + n) for n in range(4)], []):
                writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA))
    (loader,) = folder_loaders(tmp_path, 1)
    assert numbers_of([next(iter(loader))]) == [0, 1, 2, 3]
    (tmp_path / "0.arrow").unlink()
    (again,) = folder_loaders(tmp_path, 1)
    again.load_state_dict(loader.state_dict())
    assert numbers_of(again) == [4, 5, 6, 7]


def test_rank_and_world_size_are_given_together():
    assert oneemb.data.Loader is Loader
    with pytest.raises(ValueError, match="give rank and world_size"):
        Loader(None, 4, {}, rank=1)
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        Loader(None, 4, {}, rank=2, world_size=2)
    for options in ({"batch_size": 0}, {"shuffle": -1}, {"workers": True}, {"bad_rows": "ignore"}, {"max_wait_s": "1"},
                    {"max_wait_s": None}, {"end_after_s": -1}, {"max_wait_s": math.nan}):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            Loader(**{"source": None, "batch_size": 4, "columns": {}, **options})
    with pytest.raises(TypeError, match="columns must be a dict"):
        Loader(None, 4, ["user"])
