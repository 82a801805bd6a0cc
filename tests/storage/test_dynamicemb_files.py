"""dynamicemb's dump files: against a reader and a writer of the layout that know nothing of the module."""

import json
import os
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oneemb.foreign.dynamicemb_files import ids_of_numbers, numbers_in_file, owner_of_key
from oneemb.foreign.dynamicemb_reader import find_dump
from oneemb.foreign.dynamicemb_writer import DumpWriter, remove_unfinished, unpublish
from oneemb.storage.errors import CorruptTableError, SnapshotNotFoundError, StorageError
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.power_losses import power_losses

DIM = 3
KEYS = [0, 7, -1, 2**62 + 5, -(2**63), 2**63 - 1, 12, -99]
WIDTHS = {"sgd": [], "adam": [("m", DIM), ("v", DIM)], "adagrad": [("Gt", DIM)], "row-wise": [("Gt", 1)]}
META = {"opt_type": "adam", "lr": 0.5, "evict_strategy": "EvictStrategy.KLfu", "dist_type": "roundrobin"}


def rows_of(keys, width, words=1, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.random((len(keys), DIM)).astype(np.float32)
    values[:1] = np.nan
    scores = rng.integers(-5, 2**62, (len(keys), words))
    return np.array(keys, np.int64), values, scores, rng.random((len(keys), width)).astype(np.float32)


def write_dump(
    folder, parts, *, version="today", states=(), with_state=False, counts=None, meta=META, fs=None, table="t"
):
    """A dump, each part by a rank of its own. "seed" has a last file where it has state."""
    remove_unfinished(folder, table, fs)
    scores = parts[0][2]
    writers = [
        DumpWriter(
            folder,
            table,
            rank=r,
            ranks=len(parts),
            version=version,
            score_words=0 if scores is None else scores.shape[1],
            states=states,
            with_state=with_state,
            with_counts=counts is not None,
            fs=fs,
        )  # fmt: skip
        for r in range(len(parts))
    ]
    for r, (writer, (keys, values, scores, state)) in enumerate(zip(writers, parts, strict=True)):
        for its in np.array_split(np.arange(len(keys)), 3):
            writer.append(keys[its], values[its], None if scores is None else scores[its], state[its])
        if counts is not None:
            writer.append_counter(*counts[r])
        writer.finish()
    unpublish(folder, table, fs)
    for writer in writers:
        writer.publish()
    if with_state or version == "today":
        writers[0].publish_meta(meta)
    for writer in writers:
        writer.discard()


def read(folder, **more):
    """What `find_dump` has: meta, {key: (rank, value, scores, state)}."""
    dump = find_dump(folder, more.pop("table", "t"), dim=DIM, **more)
    found = {}
    for rows in dump.read(3, state=True):
        assert len(rows.key_N) <= 3
        for n, key in enumerate(rows.key_N.tolist()):
            scores = None if rows.score_NS is None else tuple(rows.score_NS[n].tolist())
            state = None if rows.state_NZ is None else rows.state_NZ[n].tobytes()
            found[key] = rows.rank, rows.value_ND[n].tobytes(), scores, state
    assert len(found) == dump.rows
    return dump, found


def numbers(path, kind):
    data = path.read_bytes()
    return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", WIDTHS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("words", [1, 2])
def test_files_of_today_are_the_layouts(tmp_path, optimizer, ranks, words):
    states = WIDTHS[optimizer]
    width = sum(width for _, width in states)
    parts = [rows_of(KEYS[r::ranks], width, words, seed=r) for r in range(ranks)]
    counts = [(np.array([5 + r, -6 - r]), np.array([2, 3])) for r in range(ranks)]
    write_dump(str(tmp_path), parts, states=states, with_state=True, counts=counts)
    end = f".world_size_{ranks}"
    kinds = ["emb_keys", "emb_values", "emb_scores", "opt_values", "counter_keys", "counter_frequencies"]
    expected = {f"t_{kind}.rank_{r}{end}" for kind in kinds for r in range(ranks)} | {"t_opt_args.json"}
    assert set(os.listdir(tmp_path)) == expected
    for r, (keys, values, scores, state) in enumerate(parts):
        its = {kind: tmp_path / f"t_{kind}.rank_{r}{end}" for kind in kinds}
        assert numbers(its["emb_keys"], "q") == keys.tolist()
        assert its["emb_values"].read_bytes() == values.astype("<f4").tobytes()
        assert numbers(its["emb_scores"], "q") == scores.reshape(-1).tolist()
        assert numbers(its["opt_values"], "f") == pytest.approx(state.reshape(-1).tolist())
        assert numbers(its["counter_keys"], "q") == [5 + r, -6 - r]
        assert numbers(its["counter_frequencies"], "q") == [2, 3]
    text = (tmp_path / "t_opt_args.json").read_text()
    assert json.loads(text) == META and text.startswith('{\n    "opt_type"')
    dump, found = read(str(tmp_path))
    assert (dump.version, dump.ranks, dump.score_words, dump.state_width) == ("today", ranks, words, width)
    assert dump.has_counters and dump.meta == META and dump.rows == len(KEYS)
    for r, (keys, values, scores, state) in enumerate(parts):
        for n, key in enumerate(keys.tolist()):
            assert found[key] == (r, values[n].tobytes(), tuple(scores[n].tolist()), state[n].tobytes())
    of_counts = [pair for ids, its in dump.counters(1) for pair in zip(ids.tolist(), its.tolist(), strict=True)]
    assert of_counts == [pair for r in range(ranks) for pair in [(5 + r, 2), (-6 - r, 3)]]


@pytest.mark.parametrize("optimizer", WIDTHS)
@pytest.mark.parametrize("scored", [True, False])
def test_files_of_the_seed_are_the_layouts_and_states_are_found_by_key(tmp_path, optimizer, scored):
    states = WIDTHS[optimizer]
    keys, values, scores, state = rows_of(KEYS, sum(width for _, width in states))
    write_dump(str(tmp_path), [(keys, values, scores if scored else None, state)], version="seed", states=states,
          with_state=True)  # fmt: skip
    names = {"t_keys", "t_values", "t_opt_args.json"} | ({"t_scores"} if scored else set())
    its = ["keys", "values", *["scores"] * scored]
    names |= {f"t_opt_state_{name}_{what}" for name, _ in states for what in its}
    assert set(os.listdir(tmp_path)) == names
    assert numbers(tmp_path / "t_keys", "q") == KEYS
    begin = 0
    for name, width in states:  # upstream's tables of states have orders of their own
        path = tmp_path / f"t_opt_state_{name}_values"
        its = state[:, begin : begin + width]
        assert path.read_bytes() == its.astype("<f4").tobytes()
        order = np.random.default_rng(begin).permutation(len(KEYS))
        path.write_bytes(its[order].astype("<f4").tobytes())
        (tmp_path / f"t_opt_state_{name}_keys").write_bytes(keys[order].astype("<i8").tobytes())
        if scored:
            assert numbers(tmp_path / f"t_opt_state_{name}_scores", "q") == scores[:, 0].tolist()
        begin += width
    dump, found = read(str(tmp_path))
    assert (dump.version, dump.ranks, dump.score_words, dump.state_width) == ("seed", 1, int(scored), begin)
    for n, key in enumerate(KEYS):
        its = tuple(scores[n].tolist()) if scored else None
        assert found[key][1:] == (values[n].tobytes(), its, state[n].tobytes() if states else None)


def test_a_part_may_be_empty_and_so_may_the_state(tmp_path):
    write_dump(str(tmp_path), [rows_of([], 0), rows_of([4], 0)], with_state=True)
    dump, found = read(str(tmp_path))
    assert dump.rows == 1 and list(found) == [4] and dump.state_width == 0
    write_dump(str(tmp_path), [rows_of([], 0)])
    assert read(str(tmp_path))[1] == {}


# ---- which rank has a key --------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 60), min_size=1, max_size=20)


def python_rank(dist, n, ranks, size):
    n %= 2**64
    if dist == "hash_roundrobin":
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            n = ((n ^ n >> 33) * factor) % 2**64
        return (n ^ n >> 33) % ranks, None
    if dist == "roundrobin":
        return n % ranks, None
    block = -(-size // ranks)
    return (n // block, n % block) if n < block * ranks else (n % ranks, n // ranks)


@settings(max_examples=200, deadline=None)
@given(IDS, st.integers(1, 5), st.integers(1, 50), st.sampled_from(["continuous", "roundrobin", "hash_roundrobin"]))
def test_keys_are_dealt_to_ranks_as_upstream_does_and_come_back(ids, ranks, size, dist):
    id_N = np.array(ids, np.int64)
    rank_N, key_N = owner_of_key(dist, id_N, ranks, size), numbers_in_file(dist, id_N, ranks, size)
    for n, rank, key in zip(ids, rank_N.tolist(), key_N.tolist(), strict=True):
        expected, in_file = python_rank(dist, n, ranks, size)
        assert rank == expected and key % 2**64 == (n if in_file is None else in_file) % 2**64
        assert ids_of_numbers(dist, rank, np.array([key]), ranks, size).tolist() == [n]


# ---- damage ----------------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"12345678")


@pytest.mark.parametrize(
    "name", ["emb_keys", "emb_values", "emb_scores", "opt_values", "counter_keys", "counter_frequencies"]
)
@pytest.mark.parametrize("damage", [cut, lengthen, os.remove])
def test_a_file_that_is_not_as_it_has_to_be_is_named(tmp_path, name, damage):
    counts = [(np.array([1]), np.array([2]))] * 2
    parts = [rows_of(KEYS[r::2], 2 * DIM, seed=r) for r in range(2)]
    write_dump(str(tmp_path), parts, states=WIDTHS["adam"], with_state=True, counts=counts)
    damage(tmp_path / f"t_{name}.rank_1.world_size_2")
    # A file of keys decides how long the others are.
    named = {"emb_keys": "emb_values|emb_keys", "counter_keys": "counter_frequencies|counter_keys"}.get(name, name)
    with pytest.raises(StorageError, match=rf"t_({named})\.rank_1\.world_size_2.*(got|is not there)"):
        find_dump(str(tmp_path), "t", dim=DIM)


OF_SEED = ["keys", "values", "scores"]
OF_SEED += [f"opt_state_{part}_{what}" for part in "mv" for what in ("keys", "values", "scores")]


@pytest.mark.parametrize("name", OF_SEED)
@pytest.mark.parametrize("damage", [cut, lengthen])
def test_so_is_one_of_the_seed(tmp_path, name, damage):
    write_dump(str(tmp_path), [rows_of(KEYS, 2 * DIM)], version="seed", states=WIDTHS["adam"], with_state=True)
    damage(tmp_path / f"t_{name}")
    with pytest.raises(CorruptTableError, match=f"{tmp_path}/t_"):
        find_dump(str(tmp_path), "t", dim=DIM)


@pytest.mark.parametrize("name", [*OF_SEED, "opt_args.json"])
def test_so_is_one_of_the_seed_that_is_gone(tmp_path, name):
    write_dump(str(tmp_path), [rows_of(KEYS, 2 * DIM)], version="seed", states=WIDTHS["adam"], with_state=True)
    os.remove(tmp_path / f"t_{name}")
    if name == "scores":  # Tables of LRU have none: who loads says whether there have to be some.
        assert not find_dump(str(tmp_path), "t", dim=DIM).has_scores
        return
    with pytest.raises(CorruptTableError, match=f"{tmp_path}/t_{name}|must have a file of {name}"):
        find_dump(str(tmp_path), "t", dim=DIM)
    os.remove(tmp_path / f"t_{'values' if name == 'keys' else 'keys'}")
    with pytest.raises(CorruptTableError, match="is not there"):
        find_dump(str(tmp_path), "t", dim=DIM)


def test_one_of_the_seed_without_state_is_whole_when_its_keys_are_there(tmp_path):
    write_dump(str(tmp_path), [rows_of(KEYS, 0)], version="seed")
    assert sorted(os.listdir(tmp_path)) == ["t_keys", "t_scores", "t_values"]
    dump, found = read(str(tmp_path))
    assert dump.meta == {} and list(found) == KEYS
    with pytest.raises(SnapshotNotFoundError, match="there are: t$"):
        find_dump(str(tmp_path), "u", dim=DIM)
    os.remove(tmp_path / "t_keys")
    with pytest.raises(CorruptTableError, match="t_keys is not there: the dump of table 't' was cut short"):
        find_dump(str(tmp_path), "t", dim=DIM)


@pytest.mark.parametrize("name", ["opt_args.json", "emb_values.rank_7.world_size_9", "opt_state_Gt_scores", "keys"])
def test_what_killed_dumps_have_left_is_removed_and_nothing_else(tmp_path, name):
    others = ["u_keys.unfinished", "t_notes", "t_other_keys.unfinished.old", "t_keys_.unfinished"]
    write_dump(str(tmp_path), [rows_of(KEYS, 0)])
    for other in others:
        (tmp_path / other).write_bytes(b"x")
    before = sorted(os.listdir(tmp_path))
    (tmp_path / f"t_{name}.unfinished").write_bytes(b"x" * 100)
    remove_unfinished(str(tmp_path), "t")
    assert sorted(os.listdir(tmp_path)) == before and len(read(str(tmp_path))[1]) == len(KEYS)


@pytest.mark.parametrize(
    "said",
    [{"dist_type": "by weekday"}, {"dist_type": ["roundrobin"]}, {"lr": "fast"}, {"lr": float("nan")}, {"iters": -1},
     {"iters": 1.5}, {"step_score": True}, {"step_score": 2**64}, {"evict_strategy": 3}, {"opt_type": None},
     {"beta1": [0.9]}, {"num_embeddings": 0}],
)  # fmt: skip
def test_what_the_last_file_must_not_say_is_named(tmp_path, said):
    write_dump(str(tmp_path), [rows_of(KEYS, 0)], meta=META | said)
    with pytest.raises(CorruptTableError, match=rf"t_opt_args\.json must have .* for {next(iter(said))}, got"):
        find_dump(str(tmp_path), "t", dim=DIM)


def test_ranks_that_no_dump_has_are_no_files_of_one(tmp_path):
    (tmp_path / "t_emb_keys.rank_0.world_size_0").write_bytes(b"")
    with pytest.raises(SnapshotNotFoundError, match="no dump of table 't'"):
        find_dump(str(tmp_path), "t", dim=DIM)


def test_dumps_that_are_not_whole_or_not_one_are_refused(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(SnapshotNotFoundError, match="no folder of dumps"):
        find_dump(f"{folder}/none", "t", dim=DIM)
    write_dump(folder, [rows_of(KEYS, 0)], table="u")
    with pytest.raises(SnapshotNotFoundError, match="no dump of table 't'.*there are: u"):
        find_dump(folder, "t", dim=DIM)
    write_dump(folder, [rows_of(KEYS, 0)])
    meta = tmp_path / "t_opt_args.json"
    for text, message in [(b"{", "must be JSON"), (b"\xff", "must be JSON"), (b"[3]", "must be a JSON object")]:
        meta.write_bytes(text)
        with pytest.raises(CorruptTableError, match=message):
            find_dump(folder, "t", dim=DIM)
    meta.unlink()
    with pytest.raises(CorruptTableError, match="was cut short"):
        find_dump(folder, "t", dim=DIM)
    meta.write_text("{}")
    assert read(folder)[0].rows == len(KEYS)
    (tmp_path / "t_emb_keys.rank_0.world_size_2").write_bytes(b"")
    with pytest.raises(CorruptTableError, match="by 1 and by 2 ranks"):
        find_dump(folder, "t", dim=DIM)
    (tmp_path / "t_emb_keys.rank_0.world_size_2").unlink()
    (tmp_path / "t_keys").write_bytes(b"")
    with pytest.raises(CorruptTableError, match="files of two dumps"):
        find_dump(folder, "t", dim=DIM)
    (tmp_path / "t_keys").unlink()
    with pytest.raises(CorruptTableError, match=r"must be float32 \[8, 4\]"):
        find_dump(folder, "t", dim=4)


@pytest.mark.parametrize("keys, twice", [([3, 4, 3], 3), ([5, -6, 7, -6], -6)])
def test_an_id_that_comes_twice_is_an_error(tmp_path, keys, twice):
    write_dump(str(tmp_path), [rows_of([1, 2], 0), rows_of(keys, 0)])
    with pytest.raises(CorruptTableError, match=f"id {twice} comes twice"):
        find_dump(str(tmp_path), "t", dim=DIM).check_distinct(None)
    write_dump(str(tmp_path), [rows_of([1, 2], 0), rows_of([2, 3], 0)])
    with pytest.raises(CorruptTableError, match="id 2 comes twice"):
        find_dump(str(tmp_path), "t", dim=DIM).check_distinct(None)
    # In blocks of ranks the same number stands for several ids.
    write_dump(str(tmp_path), [rows_of([1, 2], 0), rows_of([2, 3], 0)], meta={"dist_type": "continuous"})
    find_dump(str(tmp_path), "t", dim=DIM).check_distinct(8)


def test_the_state_of_a_row_that_is_missing_is_named(tmp_path):
    write_dump(str(tmp_path), [rows_of([1, 2], DIM)], version="seed", states=WIDTHS["adagrad"], with_state=True)
    (tmp_path / "t_opt_state_Gt_keys").write_bytes(struct.pack("<2q", 1, 3))
    dump = find_dump(str(tmp_path), "t", dim=DIM)
    with pytest.raises(CorruptTableError, match="opt_state_Gt_keys must have the ids .* got 3 in place of 2"):
        dump.check_states()
    assert [rows.state_NZ for rows in dump.read(9, state=False)] == [None]


def test_rows_of_all_ranks_have_one_width_of_state(tmp_path):
    parts = [rows_of([], DIM), *(rows_of(KEYS[r::2], DIM, seed=r) for r in range(2))]
    write_dump(str(tmp_path), parts, states=WIDTHS["adagrad"], with_state=True)
    assert find_dump(str(tmp_path), "t", dim=DIM).state_width == DIM
    (tmp_path / "t_opt_values.rank_2.world_size_3").write_bytes(b"")
    with pytest.raises(
        CorruptTableError, match="must have the same number of state values, got 0 and 3 in .*; restore"
    ):
        find_dump(str(tmp_path), "t", dim=DIM)


@pytest.mark.parametrize("table", ["t[1]*", "a.rank_0.world_size_1", "ü t", "keys"])
def test_tables_may_have_odd_names(tmp_path, table):
    write_dump(str(tmp_path), [rows_of(KEYS, 0)], table=table)
    write_dump(str(tmp_path), [rows_of([1], 0)], table="t")
    assert read(str(tmp_path), table=table)[0].rows == len(KEYS)
    unpublish(str(tmp_path), table)
    assert read(str(tmp_path))[0].rows == 1
    for bad in ("", "a/b", "a\0b"):
        with pytest.raises(ValueError, match="must have no '/'"):
            DumpWriter(str(tmp_path), bad, rank=0, ranks=1)


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_is, new_is", [("today", "today"), ("seed", "seed"), ("today", "seed"), ("seed", "today")])
@pytest.mark.parametrize("with_state", [False, True])
def test_a_loss_of_power_at_any_call_leaves_one_dump_or_none(old_is, new_is, with_state):
    old, new = [rows_of(KEYS[:3], DIM, seed=1)], [rows_of(KEYS[r::2], DIM, seed=2 + r) for r in range(2)]
    if new_is == "seed":  # One writes for all.
        new = new[:1]
    state = {"states": WIDTHS["adagrad"], "with_state": with_state}

    def write(folder, parts, fs):
        write_dump(folder, parts, version=old_is if parts is old else new_is, fs=fs, **state)

    def fresh():
        fs = FaultyFileSystem()
        fs.make_directories("/d")
        write("/d", old, fs=fs)
        return fs

    whole = fresh()
    before = read("/d", fs=whole)[1]
    write("/d", new, fs=whole)
    after, ends = read("/d", fs=whole)[1], set()
    assert before != after

    def look(disk, call, half, fate):
        try:
            found = read("/d", fs=disk)[1]
        except CorruptTableError as error:
            assert re.search("was cut short|is not there", str(error)), (call, fate)
            ends.add("none")
        except SnapshotNotFoundError:
            ends.add("none")
        else:
            assert found in (before, after), (call, fate)
            ends.add("old" if found == before else "new")
        write("/d", new, fs=disk)  # and the next one is whole
        assert read("/d", fs=disk)[1] == after

    fs = fresh()
    power_losses(fs, lambda: write("/d", new, fs=fs), look)
    assert ends == {"old", "new", "none"}


def test_a_full_disk_leaves_the_dump_that_was_there(tmp_path):
    fs = FaultyFileSystem()
    fs.make_directories("/d")
    write_dump("/d", [rows_of(KEYS, 0)], fs=fs)
    names = sorted(fs.names("/d"))

    def full(call, path):
        if call == "write":
            raise OSError(28, "No space left on device")

    writer = DumpWriter("/d", "t", rank=0, ranks=1, fs=fs)
    fs.fail = full
    with pytest.raises(StorageError, match="ENOSPC"):
        writer.append(*rows_of(KEYS, 0))
    fs.fail = None
    writer.discard()
    assert sorted(fs.names("/d")) == names and read("/d", fs=fs)[0].rows == len(KEYS)
