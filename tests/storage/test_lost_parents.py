"""Reports of check and salvage on deltas whose parents are lost, on ranks without rows, and beside a writer."""

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.snapshots import part_folders
from oneemb.storage.snapshots.copied_folders import salvage_folder
from oneemb.storage.snapshots.part_folders import check_parts
from oneemb.storage.snapshots.snapshot_parts import FoundParts
from oneemb.storage.table import check as check_module
from oneemb.storage.table.check import check_table
from tests.storage.test_objects import embedding_at, train
from tests.storage.test_persistent_table import open_table
from tests.support.table_model import put_random


@pytest.fixture
def chain(tmp_path):
    """A table with a snapshot `base`, the delta `d1`, and the delta `d2` since `d1`."""
    path = tmp_path / "table"
    with embedding_at(path) as embedding:
        ids = torch.arange(500)
        for n, name in enumerate(("base", "d1", "d2")):
            train(embedding, ids[: 500 // (n + 1)], 0.5)
            embedding.save_snapshot(name) if n == 0 else embedding.save_delta(name, since=("base", "d1")[n - 1])
    return path


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_delta_whose_parent_is_lost_is_not_whole(chain, tmp_path, how):
    file = chain / "snapshots/base.snapshot"
    file.unlink() if how == "removed" else file.write_bytes(b"x" * 200)
    for result in check_parts(str(chain)), salvage_folder(str(chain), str(tmp_path / "new")):
        assert not any(found.whole for found in result.by_snapshot.values())
        assert result.by_snapshot["d1"].unreadable == ["parent 'base'"]
        assert result.by_snapshot["d2"].unreadable == ["parent 'd1'"]
        assert result.by_snapshot["d1"].rows_lost == 0


def test_a_delta_whose_parent_has_lost_rows_says_so(chain, tmp_path):
    first = min((chain / "chunks").glob("*.rows"))
    data = bytearray(first.read_bytes())
    data[4096] ^= 1
    first.write_bytes(data)
    for result in check_parts(str(chain)), salvage_folder(str(chain), str(tmp_path / "new")):
        assert result.by_snapshot["base"].rows_lost > 0
        assert not result.by_snapshot["d1"].whole and "rows of parent 'base'" in result.by_snapshot["d1"].unreadable
        assert "rows of parent 'd1'" in result.by_snapshot["d2"].unreadable
    assert set(oneemb.MultiTableEmbedding.snapshots(embedding_at(tmp_path / "new"))) == {"base", "d1", "d2"}


def test_all_rows_of_ranks_are_found_though_one_has_none(tmp_path):
    folders = [str(tmp_path / f"job/rank-{rank}-of-2") for rank in range(2)]
    writer = oneemb.make_persistent_table_writer(
        folders, "s", torch.int64, torch.float32, storage_dim=4, physical_block_size=512
    )
    with writer:
        writer.write(np.arange(1), np.ones((1, 4), np.float32))
    (empty,) = [folder for folder in (tmp_path / "job").iterdir() if not list(folder.glob("chunks/*"))]
    (empty / "snapshots/s.snapshot").write_bytes(b"x" * 200)
    result = salvage_folder(str(tmp_path / "job"), str(tmp_path / "new"), unlisted="all")
    assert result.by_snapshot["all"].whole and result.by_snapshot["all"].rows == 1
    with embedding_at(tmp_path / "new") as embedding:
        embedding.load_snapshot("all")
        assert embedding.eval()(torch.arange(1)).tolist() == [[1.0] * 4]


def test_all_rows_of_a_table_without_chunks_are_none(tmp_path):
    with embedding_at(tmp_path / "table") as embedding:
        embedding.save_snapshot("s")
    (tmp_path / "table/snapshots/s.snapshot").write_bytes(b"x" * 200)
    result = salvage_folder(str(tmp_path / "table"), str(tmp_path / "new"), unlisted="all")
    assert result.by_snapshot.keys() == {"s"} and not result.by_snapshot["s"].whole


def test_a_chunk_that_a_writer_has_cut_back_meanwhile_is_looked_at_again(tmp_path, monkeypatch):
    rows, rng = {}, np.random.default_rng(0)
    with open_table(tmp_path / "t") as table:
        for name in "ab":
            put_random(table, rows, rng, 5)
            table.save_snapshot(name, {})
    original, calls = check_module.examine_chunk, []

    def cut_back(*args):
        if not calls:
            with open_table(tmp_path / "t") as table:
                table.delete_snapshot("b")
            with open_table(tmp_path / "t") as table:
                assert table.recovery.truncated
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(check_module, "examine_chunk", cut_back)
    result = check_table(tmp_path / "t")
    assert len(calls) == 2 and result.problems == []
    assert result.snapshots == ["a"] and result.by_snapshot.keys() == {"a"} and result.by_snapshot["a"].whole


def test_deltas_that_a_writer_has_deleted_meanwhile_are_no_problem(chain, monkeypatch):
    original, looks = part_folders.look_at, []

    def without_the_parent(*args):
        """Result of `look_at` where a writer deletes all three meanwhile: the parent is gone already."""
        found = original(*args)
        looks.append(found)
        if len(looks) == 1:
            with embedding_at(chain) as embedding:
                for name in ("d2", "d1", "base"):
                    embedding.delete_snapshot(name)
            return FoundParts([one for one in found.parts if one.info.name != "base"], [], found.folders)
        return found

    monkeypatch.setattr(part_folders, "look_at", without_the_parent)
    assert check_parts(str(chain)).problems == []
    assert len(looks) == 2
