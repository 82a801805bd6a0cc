"""What is done to the snapshots of ranks without a job, or beside one: readers, the command line, files of rows."""

import os

import numpy as np
import pytest
import torch

import oneemb
from oneemb.embeddings import internals
from oneemb.graph.ranks import RankError
from oneemb.kernels.owner import owner_of
from oneemb.rows.reshard import reshard
from oneemb.storage.errors import LockedError, SnapshotExistsError, SnapshotNotFoundError
from oneemb.storage.fs import LocalFileSystem
from oneemb.storage.snapshots.part_folders import check_parts
from oneemb.storage.snapshots.snapshot_parts import look_at
from oneemb.storage.snapshots.unfinished import mark
from tests.support.thread_ranks import FaultyCalls, run_ranks
from tests.test_cli import run as command, run_json
from tests.test_rank_snapshots import (
    DIM,
    FEW,
    STEP,
    assert_nothing_is_unneeded,
    content,
    expected,
    fill,
    flip,
    load,
    make,
    read,
    rows_of,
    run,
    save,
    together,
    version_of,
)

# ---- reshard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "numbers"),
    [(0, [4, 1]), (3, [2, 9]), (9, [1])]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in [
        *((before, [4, 1, 2, 9, 3]) for before in range(4)), (9, [8, 1])]],
)  # fmt: skip
def test_a_snapshot_is_resharded_from_any_number_to_any_other(tmp_path, monkeypatch, before, numbers):
    named = run(before, save, tmp_path, 1, patch=monkeypatch)[0]
    done = []

    def progress(*counts):
        done.append(counts)

    for ranks in numbers:
        folders = reshard(tmp_path, "s", ranks, progress=progress)
        assert len(folders) == ranks and (done == [] or done[-1] == (len(expected(1)), len(expected(1))))
        done.clear()
        found = look_at([str(tmp_path)])
        assert sorted(part.folder for part in found.parts) == sorted(folders), "the new parts have replaced the others"
        assert read(tmp_path, "s") == expected(1)
        assert_nothing_is_unneeded(tmp_path)
        size = 0 if ranks == 1 else ranks
        opened = note_opened(monkeypatch)
        assert together(run(size, load, tmp_path, patch=monkeypatch)) == (expected(1), STEP + 1)
        assert not opened or all(len(read) == 1 for rank, read in opened.items() if rank.startswith("rank-"))

        def go_on(ranks):
            embedding = make(ranks, tmp_path)
            internals.load_named(embedding, named)
            embedding.close()

        run(size, go_on, patch=monkeypatch)


def note_opened(patch):
    """The folders of which each rank opens rows."""
    import threading

    opened = {}
    real = LocalFileSystem.open

    def note(fs, path, **how):
        if path.endswith(".rows"):
            opened.setdefault(threading.current_thread().name, set()).add(path.split("/chunks")[0])
        return real(fs, path, **how)

    patch.setattr(LocalFileSystem, "open", note)
    return opened


def test_resharded_elsewhere_the_source_stays(tmp_path, monkeypatch):
    run(2, save, tmp_path / "a", 1, patch=monkeypatch)
    result = run_json("reshard", tmp_path / "a", "--name", "s", "--ranks", 3, "--to", tmp_path / "b")
    assert result["folders"] == [str(tmp_path / "b" / f"rank-{rank}-of-3") for rank in range(3)]
    folders = [tmp_path / name for name in "cde"]
    command("reshard", tmp_path / "a", "--name", "s", "--ranks", 3, *(f"--to={folder}" for folder in folders))
    assert read(tmp_path / "a", "s") == read(tmp_path / "b", "s") == read(folders, "s") == expected(1)
    assert together(run(3, load, folders, patch=monkeypatch)) == (expected(1), STEP + 1)
    with pytest.raises(SnapshotExistsError, match="give another folder"):
        reshard(tmp_path / "a", "s", 2, tmp_path / "b")
    with pytest.raises(SnapshotNotFoundError):
        reshard(tmp_path / "a", "t", 2)
    with pytest.raises(ValueError, match="1 or more"):
        reshard(tmp_path / "a", "s", 0)
    with pytest.raises(ValueError, match="one for each of 3"):
        reshard(tmp_path / "a", "s", 3, [tmp_path / "x", tmp_path / "y"])


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_reshard_that_is_killed_anywhere_leaves_the_snapshot_whole(tmp_path, monkeypatch, stride):
    at, reached, seen = 5 % stride, True, set()
    while reached:
        root = tmp_path / str(at)
        run(2, save, root, 1, patch=monkeypatch, count=FEW)
        with monkeypatch.context() as patch:
            calls = FaultyCalls(patch, at=at)

            def act(_, root=root, calls=calls):
                with calls.counted():
                    reshard(root, "s", 3)

            run_ranks(1, act, dies=[0])
            reached = calls.reached
            calls.free_locks()
        assert version_of(root, "s") == 1
        # What lies in the folders of the other number of ranks is of no use, and is told.
        other = {2: 3, 3: 2}[len(look_at([str(root)]).get("s").parts)]
        left = [str(file) for file in root.glob(f"rank-*-of-{other}/*/*") if file.name != "probe.tmp"]
        told = check_parts(str(root))
        assert sorted(told.unneeded) == sorted(left) and not told.problems and told.snapshots == ["s"]
        empty = [folder for folder in root.glob("rank-*") if not (folder / "snapshots").exists()]
        assert len(told.left_over) == sum(file.endswith(".snapshot") for file in left) + len(empty)
        seen.add((bool(empty), bool(left)))
        run(2, save, root, 2, "t", patch=monkeypatch, count=FEW)
        assert version_of(root, "s") == 1
        assert_nothing_is_unneeded(root)
        at += stride
    assert at > 50 and {(True, False), (False, True)} <= seen


# ---- the command line ------------------------------------------------------------------------------------------------


def test_commands_on_the_folder_of_a_job(tmp_path, monkeypatch):
    root = tmp_path / "root"
    run(2, save, root, 1, "a", patch=monkeypatch)
    run(3, save, root, 2, "b", patch=monkeypatch)
    assert run_json("snapshot", "list", root)["snapshots"] == ["a", "b"]
    assert command("snapshot", "list", root).stdout.split() == ["a", "b"]
    found = run_json("inspect", root)
    assert [(s["name"], s["rows"], s["shards"], s["step"]) for s in found["snapshots"]] == [
        ("a", len(expected(1)), 2, STEP + 1), ("b", len(expected(2)), 3, STEP + 2),
    ]  # fmt: skip
    assert len(found["folders"]) == 5 and found["incomplete"] == {}
    text = command("inspect", root).stdout
    assert "rank-1-of-3" in text and "parts" in text and text.index("a ") < text.index("b ")
    checked = run_json("check", root)
    assert checked["sound"] and checked["snapshots"] == ["a", "b"] and checked["rows"] == 2 * len(expected(1))
    run_json("compact", root)
    for suffix in (".npz", ".safetensors"):
        assert run_json("export", root, tmp_path / f"rows{suffix}", "--snapshot", "b", "--with-state")["rows"] == len(
            expected(2)
        )
        command("import", tmp_path / f"rows{suffix}", tmp_path / suffix, "--snapshot", "s", "--with-state")
        assert read(tmp_path / suffix, "s") == expected(2)
    command("import", root, tmp_path / "c", "--from-snapshot", "a", "--snapshot", "s", "--with-state")
    assert read(tmp_path / "c", "s") == expected(1)
    assert "'a', 'b'" in command("export", root, tmp_path / "x.npz", code=2).stderr
    command("import", tmp_path / "rows.npz", root, "--snapshot", "c", "--with-state")
    assert together(run(3, load, root, "c", patch=monkeypatch))[0] == expected(2)
    assert "has a snapshot 'a'" in command("import", tmp_path / "rows.npz", root, "--snapshot", "a", code=2).stderr
    freed = run_json("snapshot", "delete", root, "a", "--yes")["bytes_freed"]
    assert freed > 0 and run_json("snapshot", "list", root)["snapshots"] == ["b", "c"]
    assert "there are: 'b', 'c'" in command("snapshot", "delete", root, "a", "--yes", code=2).stderr
    assert_nothing_is_unneeded(root)


def test_check_finds_damage_in_any_part_and_parts_that_are_missing(tmp_path, monkeypatch):
    run(3, save, tmp_path, 1, patch=monkeypatch)
    flip(next((tmp_path / "rank-2-of-3" / "chunks").glob("*.rows")))
    assert "rank-2-of-3" in command("check", tmp_path, code=1).stdout
    os.rename(tmp_path / "rank-2-of-3", tmp_path / "away")
    assert "part 2 of 3 is missing" in command("check", tmp_path, code=1).stdout
    listed = run_json("snapshot", "list", tmp_path, code=1)
    assert listed["snapshots"] == [] and "part 2 of 3" in listed["incomplete"]["s"]
    assert "part 2 of 3" in command("inspect", tmp_path).stdout
    assert "part 2 of 3" in command("export", tmp_path, tmp_path / "x.npz", "--snapshot", "s", code=2).stderr
    command("snapshot", "delete", tmp_path, "s", "--yes")
    assert run_json("snapshot", "list", tmp_path)["incomplete"] == {}


def test_what_a_killed_save_has_left_is_no_contradiction_and_goes_with_compact(tmp_path, monkeypatch):
    run(2, save, tmp_path, 1, patch=monkeypatch)
    run(2, save, tmp_path, 2, "t", patch=monkeypatch)
    part = next(part for part in look_at([str(tmp_path)]).parts if part.info.name == "t")
    mark(LocalFileSystem(), part.folder, [part.info.identity])
    other = next(p for p in look_at([str(tmp_path)]).parts if p.info.name == "t" and p.folder != part.folder)
    from oneemb.storage.snapshots.part_folders import open_anew

    with open_anew(other.folder) as table:
        table.delete_snapshot("t")
    assert run_json("check", tmp_path)["snapshots"] == ["s"]
    assert run_json("snapshot", "list", tmp_path) == {
        "path": str(tmp_path), "snapshots": ["s"], "damaged": {}, "incomplete": {},
    }  # fmt: skip
    command("compact", tmp_path)
    assert_nothing_is_unneeded(tmp_path)


def test_tools_name_every_rank_whose_part_of_a_snapshot_is_damaged(tmp_path, monkeypatch):
    table = tmp_path / "table"
    run(3, save, table, 1, patch=monkeypatch)
    files = list(table.rglob("s.snapshot"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    assert len(files) == 3
    for said in (
        run_json("inspect", table, "--disk")["damaged"]["s"],
        command("inspect", table, "--disk").stdout,
        command("backup", table, tmp_path / "copy", code=1).stdout,
        command("push", table, f"file://{tmp_path}/store", code=1).stdout,
    ):
        assert all(str(file) in said for file in files)


def test_tools_read_beside_a_job_and_are_refused_what_changes(tmp_path, monkeypatch):
    def job(ranks):
        embedding = make(ranks, tmp_path)
        fill(embedding, 1)
        embedding.save_snapshot("s")
        ranks.agree("saved")
        if ranks.rank == 0:
            assert read(tmp_path, "s") == expected(1)
            assert run_json("check", tmp_path)["sound"]
            assert all("process" in info["holder"] for info in run_json("inspect", tmp_path)["folders"].values())
            for arguments in (["compact", tmp_path], ["snapshot", "delete", tmp_path, "s", "--yes"]):
                assert "is held by" in command(*arguments, code=2).stderr
            with pytest.raises(LockedError):
                reshard(tmp_path, "s", 3)
            assert read(tmp_path, "s") == expected(1)
        ranks.agree("done")
        embedding.close()

    run_ranks(2, job, patch=monkeypatch)


# ---- rows of a live embedding in and out -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_all_ranks_go_into_one_file_and_come_back_on_any_number(tmp_path, monkeypatch, size):
    file = tmp_path / "rows.npz"

    def export(ranks):
        embedding = make(ranks, tmp_path / "a")
        fill(embedding, 1)
        count = oneemb.export_rows(embedding, file, with_state=True)
        with pytest.raises((FileExistsError, RankError), match="exists"):
            oneemb.export_rows(embedding, file)
        assert embedding.snapshots() == []
        embedding.close()
        return count

    assert run_ranks(size, export, patch=monkeypatch) == [len(expected(1))] * size
    assert_nothing_is_unneeded(tmp_path / "a")
    with np.load(file) as arrays:
        assert sorted(zip(arrays["tables"].tolist(), arrays["keys"].tolist(), strict=True)) == sorted(expected(1))

    def bring(ranks):
        embedding = make(ranks, tmp_path / "b")
        assert oneemb.import_rows(embedding, file, with_state=True) == len(expected(1))
        with pytest.raises((ValueError, RankError), match="finite"):
            oneemb.import_rows(embedding, (torch.tensor([1]), torch.full((1, DIM), float("nan"))))
        found = content(embedding)
        embedding.close()
        return found

    for other in (0, 2, 3):
        assert together(run(other, bring, patch=monkeypatch)) == (expected(1), STEP + 1)


def test_a_source_that_one_rank_cannot_read_is_an_error_on_all(tmp_path, monkeypatch):
    def bring(ranks):
        embedding = make(ranks, tmp_path / "b")
        table_N, id_N, row_NW = rows_of(1)
        source = (id_N[:5], row_NW[:5, :DIM]) if ranks.rank == 0 else str(tmp_path / "none.npz")
        with pytest.raises((OSError, oneemb.StorageError, RankError)):
            oneemb.import_rows(embedding, source)
        embedding.clear()
        embedding.close()

    run_ranks(2, bring, patch=monkeypatch)


# ---- salvage ---------------------------------------------------------------------------------------------------------


def test_what_is_left_of_the_tables_of_ranks_can_be_loaded(tmp_path, monkeypatch):
    run(3, save, tmp_path / "rows", 1, patch=monkeypatch)
    assert run_json("salvage", tmp_path / "rows", tmp_path / "copy")["whole"]
    assert together(run(2, load, tmp_path / "copy", patch=monkeypatch)) == (expected(1), STEP + 1)
    of_rank_1 = {key for key in expected(1) if owner_of(*(np.array([n]) for n in key), 3) == [1]}
    (file,) = (tmp_path / "rows" / "rank-1-of-3" / "snapshots").iterdir()
    for n, damage in enumerate([lambda: file.write_bytes(file.read_bytes()[:200]), file.unlink]):
        damage()
        found = run_json("salvage", tmp_path / "rows", tmp_path / f"new-{n}", code=1)
        assert found["by_snapshot"]["s"]["unreadable"] == ["part 1"] and not found["whole"]
        left, step = together(run(2, load, tmp_path / f"new-{n}", patch=monkeypatch))
        assert left == {key: row for key, row in expected(1).items() if key not in of_rank_1} and step == STEP + 1
        assert check_parts(str(tmp_path / f"new-{n}")).problems == []
    found = run_json("salvage", tmp_path / "rows", tmp_path / "all", "--all-rows", "everything", code=1)
    assert found["by_snapshot"]["everything"]["rows"] == len(expected(1))  # Chunks of rank 1 have its rows.
    assert read(tmp_path / "all", "everything") == expected(1)


def test_a_salvage_that_is_stopped_leaves_no_folder_and_goes_where_nothing_is(tmp_path, monkeypatch):
    save(None, tmp_path / "rows", 1)
    command_line = [tmp_path / "rows", tmp_path / "new"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "oneemb.storage.table.salvage.check_table", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        command("salvage", *command_line, code=130)
    assert sorted(os.listdir(tmp_path)) == ["rows"]
    killed = tmp_path / "new.0123456789abcdef.tmp"  # What a kill has left.
    (killed / "chunks").mkdir(parents=True)
    command("salvage", *command_line)
    assert sorted(os.listdir(tmp_path)) == ["new", "rows"]
    assert "must be a new or an empty folder" in command("salvage", *command_line, code=2).output
    assert "must be outside" in command("salvage", tmp_path / "rows", tmp_path / "rows" / "new", code=2).output
    assert read(tmp_path / "new", "s") == read(tmp_path / "rows", "s")
    embedding = make(None, tmp_path / "rows")
    fill(embedding, 2)
    assert "must not be in use" in command("salvage", tmp_path / "rows", tmp_path / "other", code=2).output
    embedding.close()
