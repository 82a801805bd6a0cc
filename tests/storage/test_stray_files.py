"""Files that nobody expects lie in a table's folders: it opens, lists and works, and touches none of them."""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

from oneemb.cli.commands import oneemb as command
from oneemb.storage.table.check import check_table
from oneemb.storage.table.compact_snapshots import compact_snapshots
from oneemb.storage.table.snapshot_reader import read_snapshot_info
from oneemb.storage.table.table_info import table_info
from tests.storage.test_persistent_table import open_table
from tests.support.models import make_embedding
from tests.support.table_model import check, put_random

STRAYS = [
    "chunks/².rows",
    "chunks/٣.keys",
    "chunks/5.rows",
    "chunks/0000000000001.rows",
    "chunks/000000000001.rows.bak",
    "chunks/notes.txt",
    "chunks/.nfs000001",
    "snapshots/.snapshot",
    "snapshots/old s.snapshot",
    "snapshots/%zz.snapshot",
    "snapshots/%2e%2e.snapshot",
    "snapshots/%FF.snapshot",
    "snapshots/notes.tmp",
    "snapshots/a.snapshot~",
    "snapshots/%zz.snapshot.tmp",
    "notes.txt",
]


def make_table(path):
    rng, rows = np.random.default_rng(0), {}
    with open_table(path) as table:
        put_random(table, rows, rng, 300)
        table.save_snapshot("s", {})
    return rows


def use(path, rows, damaged=()):
    """Everything that one does with a table."""
    with open_table(path) as table:
        assert list(table.recovery.damaged) == list(damaged)
        assert [info.name for info in table.snapshots()] == ["s"]
        table.load_snapshot("s")
        check(table, rows)
        put_random(table, dict(rows), np.random.default_rng(1), 3000)
        table.save_snapshot("t", {})
        table.delete_snapshot("t")
    assert [info.name for info in read_snapshot_info(path)] == ["s"]
    info = table_info(path)
    assert [snapshot.name for snapshot in info.snapshots] == ["s"] and list(info.damaged) == list(damaged)
    assert len(check_table(path).problems) == len(damaged)
    result = CliRunner().invoke(command, ["snapshot", "list", str(path), "--json"])
    listed = json.loads(result.stdout)
    assert listed["snapshots"] == ["s"] and list(listed["damaged"]) == list(damaged)
    text = CliRunner().invoke(command, ["snapshot", "list", str(path)])
    assert text.stdout == "s\n" and all(name in text.stderr for name in damaged)


@pytest.mark.parametrize("kind", ["empty", "text", "folder", "link to nowhere", "unreadable"])
def test_stray_files_are_passed_over(tmp_path, kind):
    rows = make_table(tmp_path)
    for name in STRAYS:
        stray = tmp_path / name
        if kind == "folder":
            stray.mkdir()
            (stray / "file").write_text("x")
        elif kind == "link to nowhere":
            stray.symlink_to(tmp_path / "nowhere")
        else:
            stray.write_text("" if kind == "empty" else "not a table's")
            stray.chmod(0 if kind == "unreadable" else 0o644)
    use(tmp_path, rows)
    compact_snapshots(tmp_path)
    assert all(os.path.lexists(tmp_path / name) for name in STRAYS)


def test_names_that_are_no_text_are_passed_over(tmp_path):
    rows = make_table(tmp_path)
    for folder in ("chunks", "snapshots"):
        for name in (b"\xff\xfe.rows", b"\xff.snapshot", b"\xff.snapshot.tmp"):
            with open(os.fsencode(tmp_path / folder) + b"/" + name, "wb"):
                pass
    use(tmp_path, rows)


@pytest.mark.parametrize("name", ["000000000099.rows", "000000000099.keys"])
@pytest.mark.parametrize("kind", ["folder", "link to nowhere"])
def test_what_has_a_chunks_name_and_is_no_file_is_passed_over(tmp_path, name, kind):
    rows = make_table(tmp_path)
    stray = tmp_path / "chunks" / name
    stray.mkdir() if kind == "folder" else stray.symlink_to(tmp_path / "nowhere")
    use(tmp_path, rows)
    compact_snapshots(tmp_path)
    assert os.path.lexists(stray)


@pytest.mark.parametrize("kind", ["empty", "text", "folder"])
def test_a_file_with_a_snapshots_name_that_is_none_is_listed_as_damaged(tmp_path, kind):
    rows = make_table(tmp_path)
    stray = tmp_path / "snapshots/foo.snapshot"
    if kind == "folder":
        stray.mkdir()
    else:
        stray.write_text("" if kind == "empty" else "not a snapshot " * 100)
    use(tmp_path, rows, damaged=["foo"])
    if kind != "folder":
        result = CliRunner().invoke(command, ["snapshot", "delete", str(tmp_path), "foo", "-y"])
        assert result.exit_code == 0, result.output
        assert not os.path.lexists(stray)
        use(tmp_path, rows)


def test_an_embedding_is_made_beside_a_damaged_snapshot(tmp_path):
    embedding = make_embedding(tmp_path)
    embedding.save_snapshot("sound")
    embedding.save_snapshot("damaged")
    embedding.close()
    (tmp_path / "snapshots/damaged.snapshot").write_bytes(b"")
    embedding = make_embedding(tmp_path)
    assert embedding.snapshots() == ["sound"]
    embedding.load_snapshot("sound")
    embedding.close()
