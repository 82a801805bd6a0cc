"""Tables that earlier releases wrote are read for ever."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.table.snapshot_reader import SnapshotReader, read_snapshot_info
from tests.storage.golden.make_golden import golden_rows, make
from tests.support.table_model import check, note, scanned

GOLDEN = Path(__file__).parent / "golden"
TABLES = sorted(GOLDEN.glob("format_*/block_*"))
SNAPSHOTS = {
    "small": ("small", {"name": "small", "pi": 3.5, "list": [1, None, "é"]}),
    "a/large one": ("large", {"name": "large"}),
}


def test_there_are_golden_tables():
    assert [path.parent.name for path in TABLES] == ["format_1", "format_1"]


@pytest.mark.parametrize("golden", TABLES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_golden_table_is_read(golden, tmp_path):
    path = shutil.copytree(golden, tmp_path / "t")
    assert [info.name for info in read_snapshot_info(path)] == list(SNAPSHOTS)
    with PersistentTable.open(path, row_width=7, threads=Threads(1)) as table:
        for name, (rule, meta) in SNAPSHOTS.items():
            rows = {}
            if rule == "large":
                note(rows, *golden_rows("small"))
            note(rows, *golden_rows(rule))
            assert table.load_snapshot(name) == meta
            check(table, rows)
            with SnapshotReader.open(path, name) as reader:
                assert scanned(reader) == rows


def test_this_release_writes_the_golden_bytes(tmp_path):
    make(str(tmp_path))
    for path in sorted(p for p in (GOLDEN / "format_1").rglob("*") if p.suffix in (".rows", ".keys")):
        ours = (tmp_path / path.relative_to(GOLDEN / "format_1")).read_bytes()
        golden = path.read_bytes()
        # The header names the release, and everything after it in a keys file depends on it by the chained checksum.
        if path.suffix == ".rows":
            assert ours[4096:] == golden[4096:], path
        else:
            keys = slice(128 + 24, 128 + 24 + 8 * 40)
            assert len(ours) == len(golden) and ours[keys] == golden[keys], path
            assert np.frombuffer(golden[keys], np.int64)[:2].tolist() in ([0, -1], golden_rows("large")[1][:2].tolist())
