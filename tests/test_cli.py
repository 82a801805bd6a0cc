"""The command line: what it prints is compared with what lies on disk, and its exit codes with what was done to it."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
from click.testing import CliRunner

import oneemb
from oneemb.cli.commands import oneemb as command
from oneemb.kernels.threads import Threads
from oneemb.storage.table.persistent_table import PersistentTable

IDS = np.arange(-50, 50)


def run(*arguments, code=0, **options):
    result = CliRunner().invoke(command, [str(a) for a in arguments], **options)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def run_json(*arguments, code=0):
    result = run(*arguments, "--json", code=code)
    assert result.stdout.count("\n") == 1, "one line and nothing else"
    return json.loads(result.stdout)


def vectors(seed=0, dim=4):
    return np.random.default_rng(seed).standard_normal((len(IDS), dim)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    """A table with snapshots "first" and "second"."""
    path = tmp_path / "table"
    for name, seed in [("first", 0), ("second", 1)]:
        with oneemb.make_persistent_table_writer(path, name, "int64", "float32", 4) as writer:
            writer.write(IDS, vectors(seed), IDS % 2)
    return path


def rows_of(path, name, **options):
    with oneemb.make_persistent_table_reader(path, name, "int64", "float32", with_tables=True, **options) as reader:
        return {
            (t, k): v
            for table_N, keys, values in reader
            for t, k, v in zip(table_N.tolist(), keys.tolist(), values.tolist(), strict=True)
        }


def damage(path, suffix=".rows", at=4096):
    (file, *_) = sorted(f for f in path.rglob(f"*{suffix}"))
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return file


def disk_bytes(path):
    return sum(f.stat().st_size for f in path.rglob("*.*") if f.is_file())


# ---- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_says_what_there_is(path):
    found = run_json("inspect", path)
    assert (found["format"], found["format_version"], found["holder"]) == ("oneemb", 1, None)
    assert found["disk_bytes"] == disk_bytes(path) == found["live_bytes"] + found["garbage_bytes"]
    assert found["unsaved_bytes"] == 0 and found["damaged"] == {}
    assert [(s["name"], s["rows"], s["dim"], s["dtype"], s["state_width"]) for s in found["snapshots"]] == [
        ("first", 100, 4, "float32", 0), ("second", 100, 4, "float32", 0),
    ]  # fmt: skip
    text = run("inspect", path).stdout
    assert "format 1" in text and "nobody writes to it" in text and "4 float32" in text
    assert text.index("first") < text.index("second")


def test_inspect_says_what_a_deletion_frees(path):
    found = run_json("inspect", path, "--disk")
    assert found["disk_bytes"] == disk_bytes(path) and set(found["snapshots"]) == {"first", "second"}
    assert "a deletion frees" in run("inspect", path, "--disk").output
    for name in ("first", "second"):
        freed = run_json("inspect", path, "--disk")["snapshots"][name]["freed"]
        before = disk_bytes(path)
        run("snapshot", "delete", path, name, "-y")
        assert before - disk_bytes(path) == freed > 0


def test_inspect_of_the_disk_names_snapshots_that_cannot_be_read(path):
    (file,) = (one for one in (path / "snapshots").iterdir() if b"second" in one.name.encode())
    file.write_bytes(file.read_bytes()[:-1])
    found = run_json("inspect", path, "--disk")
    assert set(found["snapshots"]) == {"first"} and set(found["damaged"]) == {"second"}
    assert f"damaged: {found['damaged']['second']}" in run("inspect", path, "--disk").stdout


def test_inspect_names_the_holder_of_the_lock(path):
    with PersistentTable.open(path, row_width=4, threads=Threads(1)):
        assert f"process {os.getpid()} on host" in run_json("inspect", path)["holder"]
        assert f"held by process {os.getpid()}" in run("inspect", path).stdout


@pytest.mark.parametrize("suffix", [".keys", ".rows"])
def test_inspect_of_a_table_that_lacks_a_file_counts_what_is_there_and_names_the_file(path, suffix):
    (first, _) = sorted((path / "chunks").glob(f"*{suffix}"))
    size = first.stat().st_size
    first.unlink()
    (path / "chunks" / f"000000000077{suffix}").write_bytes(b"x" * 1000)
    found = run_json("inspect", path)
    assert found["missing"] == {str(first): size} and found["unsaved_bytes"] == 1000
    assert found["disk_bytes"] == disk_bytes(path) and 0 <= found["garbage_bytes"] <= found["disk_bytes"]
    text = run("inspect", path).stdout
    assert f"missing: {first}: " in text and " -" not in text.split("\n")[1]


def test_inspect_of_a_damaged_snapshot_shows_the_others(path):
    damage(path, "second.snapshot", 200)
    found = run_json("inspect", path)
    assert [s["name"] for s in found["snapshots"]] == ["first"] and list(found["damaged"]) == ["second"]
    assert "damaged: " in run("inspect", path).stdout


def test_inspect_and_list_of_a_table_of_oneflow(tmp_path):
    with oneemb.make_persistent_table_writer(
        tmp_path / "f", "s", "int32", "float32", 4, format="oneflow"
    ) as writer:  # fmt: skip
        writer.write(IDS.astype(np.int32), vectors())
    found = run_json("inspect", tmp_path / "f")
    assert (found["format"], found["key_bytes"], found["value_bytes"]) == ("oneflow", 4, 16)
    assert found["snapshots"] == [{"name": "s", "rows": 100}]
    assert "a table of OneFlow, keys of 4 bytes, rows of 4 float32" in run("inspect", tmp_path / "f").stdout
    assert run("snapshot", "list", tmp_path / "f").stdout == "s\n"


# ---- check ----------------------------------------------------------------------------------------------------------


def test_check_of_a_sound_table_exits_with_0(path):
    found = run_json("check", path)
    assert found["sound"] and found["problems"] == [] and found["snapshots"] == ["first", "second"]
    assert found["rows"] == 200
    assert "no contradictions; 2 snapshots with 200 rows" in run("check", path).stdout


@pytest.mark.parametrize(("suffix", "at"), [(".rows", 4096), (".rows", 0), (".keys", 300), (".snapshot", 200)])
def test_check_of_a_damaged_table_exits_with_1_and_names_the_file(path, suffix, at):
    file = damage(path, suffix, at)
    found = run_json("check", path, code=1)
    assert not found["sound"] and str(file) in found["problems"][0]
    result = run("check", path, code=1)
    assert str(file) in result.stdout and "1 contradictions" in result.stdout


def test_check_counts_the_lost_rows_of_each_snapshot_and_salvage_saves_the_others(path, tmp_path):
    damage(path)
    found = run_json("check", path, code=1)["by_snapshot"]
    assert sorted((one["whole"], sum(one["lost"].values()) > 0) for one in found.values()) == [
        (False, True),
        (True, False),
    ]
    (lost,) = [name for name, one in found.items() if not one["whole"]]
    assert re.search(rf"{lost} +damaged +[0-9]+ +[0-9]+ +.* of table", run("check", path, code=1).output)
    for shown in (["inspect", path], ["snapshot", "list", path]):
        assert "first" in run(*shown).output and "second" in run(*shown).output
    (sound,) = found.keys() - {lost}
    run("export", path, tmp_path / "sound.npz", "--snapshot", sound)
    report = run_json("salvage", path, tmp_path / "new", code=1)
    assert report["by_snapshot"] == found
    run("check", tmp_path / "new")
    assert rows_of(tmp_path / "new", sound).keys() == rows_of(path, sound).keys()
    assert len(rows_of(tmp_path / "new", lost)) == len(IDS) - sum(found[lost]["lost"].values())
    copied = run_json("backup", tmp_path / "new", tmp_path / "backup")
    assert sorted(copied["copied"]) == ["first", "second"]


def test_check_of_a_table_of_oneflow(tmp_path):
    with oneemb.make_persistent_table_writer(
        tmp_path / "f", "s", "int64", "float32", 4, format="oneflow"
    ) as writer:  # fmt: skip
        writer.write(IDS, vectors())
    assert run_json("check", tmp_path / "f")["rows"] == 100
    (keys,) = (tmp_path / "f/keys").iterdir()
    data = keys.read_bytes()
    keys.write_bytes(data[8:16] + data[8:])
    assert "1 keys twice" in run_json("check", tmp_path / "f", code=1)["problems"][0]
    keys.unlink()
    assert "is missing" in run_json("check", tmp_path / "f", code=1)["problems"][0]


# ---- compact, snapshots ---------------------------------------------------------------------------------------------


def grow(path):
    """Chunks that are mostly garbage, held by a snapshot."""
    with PersistentTable.open(
        path, row_width=4, physical_block_size=512, chunk_bytes=1, threads=Threads(1), background=False
    ) as table:
        table.load_snapshot("first")
        meta = table.snapshots()[0].meta
        for n in range(40):
            table.put(np.zeros(500, np.int32), np.arange(500), np.full((500, 4), n, np.float32))
            table.flush()
            if n % 10 == 0:
                table.save_snapshot(f"old-{n}", meta)
        table.save_snapshot("grown", meta)
        for n in range(0, 40, 10):
            table.delete_snapshot(f"old-{n}")


def test_compact_frees_disk_and_keeps_every_snapshot(path):
    grow(path)
    before = {name: rows_of(path, name) for name in ("first", "second", "grown")}
    size = disk_bytes(path)
    found = run_json("compact", path)
    assert found["disk_bytes_before"] == size > found["disk_bytes"] == disk_bytes(path)
    assert found["bytes_freed"] == size - disk_bytes(path) and found["rows_moved"] > 0
    assert {name: rows_of(path, name) for name in before} == before
    assert "became" in run("compact", path).stdout


def test_commands_that_write_are_refused_while_a_job_has_the_table(path):
    with PersistentTable.open(path, row_width=4, threads=Threads(1)):
        for arguments in (["compact", path], ["snapshot", "delete", path, "first", "--yes"]):
            result = run(*arguments, code=2)
            assert f"process {os.getpid()}" in result.stderr and result.stdout == ""
        run("check", path)
        run("inspect", path)


def test_snapshots_are_listed_and_deleted(path):
    assert run_json("snapshot", "list", path)["snapshots"] == ["first", "second"]
    assert run("snapshot", "list", path).stdout == "first\nsecond\n"
    size = disk_bytes(path)
    run("snapshot", "delete", path, "first", code=1, input="n\n")
    assert run("snapshot", "list", path).stdout == "first\nsecond\n"
    run("snapshot", "delete", path, "first", input="y\n")
    assert run("snapshot", "list", path).stdout == "second\n"
    found = run_json("snapshot", "delete", path, "second", "-y")
    assert found["deleted"] == "second" and 0 < found["bytes_freed"] < size and disk_bytes(path) == 0
    assert "there are: none" in run("snapshot", "delete", path, "second", "-y", code=2).stderr
    assert run("snapshot", "list", path).stdout == "no snapshots\n"


# ---- export, import -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".safetensors"])
def test_rows_go_out_and_come_back(path, tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    found = run_json("export", path, file, "--snapshot", "second")
    assert (found["rows"], found["bytes"]) == (100, file.stat().st_size)
    assert run_json("import", file, tmp_path / "new", "--snapshot", "s")["rows"] == 100
    assert rows_of(tmp_path / "new", "s") == rows_of(path, "second")
    assert "exists" in run("export", path, file, "--snapshot", "first", code=2).stderr
    run("export", path, file, "--snapshot", "first", "--overwrite", "--table", "1")
    run("import", file, tmp_path / "new", "--snapshot", "t", "--table", "1")
    first = rows_of(path, "first")
    assert rows_of(tmp_path / "new", "t") == {key: row for key, row in first.items() if key[0] == 1}


def test_npy_files_and_shards(path, tmp_path):
    files = [tmp_path / f"{name}.npy" for name in ("k", "v", "t")]
    run("export", path, *files, "--snapshot", "first")
    shards = [tmp_path / "a", tmp_path / "b"]
    run("import", *files, shards[0], "--shard", shards[1], "--snapshot", "s")
    assert rows_of(shards, "s") == rows_of(path, "first")
    run("export", shards[1], tmp_path / "again.npz", "--shard", shards[0])
    run("import", tmp_path / "again.npz", tmp_path / "c", "--snapshot", "s")
    assert rows_of(tmp_path / "c", "s") == rows_of(path, "first")
    run("import", files[1], tmp_path / "d", "--snapshot", "numbered")
    assert {key for _, key in rows_of(tmp_path / "d", "numbered")} == set(range(100))


def test_columns_of_a_data_frame_come_in(tmp_path):
    values = vectors(dim=2)
    pandas.DataFrame({"id": IDS, "x": values[:, 0], "y": values[:, 1]}).to_parquet(tmp_path / "f.parquet")
    arguments = ["import", tmp_path / "f.parquet", tmp_path / "t", "--values", "x", "--values", "y"]
    run(*arguments, "--snapshot", "s", "--keys", "id", "--table", "3", "--dtype", "float16", "--block-size", "512")
    expected = values.astype(np.float16).astype(np.float32).tolist()
    assert rows_of(tmp_path / "t", "s") == {(3, k): v for k, v in zip(IDS.tolist(), expected, strict=True)}
    assert run_json("inspect", tmp_path / "t")["snapshots"][0]["physical_block_size"] == 512
    run(*arguments, "--snapshot", "numbered", "--row-numbers")
    assert {key for _, key in rows_of(tmp_path / "t", "numbered")} == set(range(100))


def test_tables_of_other_libraries_come_in_and_go_out_and_what_stays_behind_is_said(tmp_path):
    table = tmp_path / "t"
    checkpoint = Path(__file__).parent / "foreign/tfra/adam/model-1"
    arguments = ["import", checkpoint, table, "--format", "tfra", "--name", "films", "--with-state"]
    told = run(*arguments, "--snapshot", "s").stdout
    assert "carried over: 6 rows, their state of 'adam' at step 3" in told
    assert "not carried over: state of 1 rows" in told
    assert run_json(*arguments, "--snapshot", "t")["rows"] == 6
    os.mkdir(tmp_path / "out")
    found = run_json("export", table, tmp_path / "out", "--snapshot", "s", "--format", "hugectr", "--with-state")
    assert (found["rows"], found["optimizer"]) == (6, "adam")
    assert any("count of optimizer steps, 3" in one for one in found["not_carried"])
    run("import", tmp_path / "out", tmp_path / "u", "--snapshot", "s", "--format", "hugectr", "--with-state",
        "--optimizer", "adam", "--step", "3", "--embedding-dim", "4")  # fmt: skip
    assert rows_of(tmp_path / "u", "s") == rows_of(table, "s")
    for words, text in [
        (["import", tmp_path / "out", table, "--snapshot", "x", "--step", "3"], "--step is only for --format"),
        (["export", table, tmp_path / "x.npz", "--snapshot", "s", "--num-embeddings", "3"], "is only for --format"),
        (["import", checkpoint, table, "--snapshot", "x", "--format", "tfra"], "give --name"),
        (["export", table, tmp_path / "out", "--snapshot", "s", "--format", "hugectr"], "give --overwrite to replace"),
    ]:
        assert text in run(*words, code=2).stderr


def test_tables_of_oneflow_and_of_oneemb_come_in(path, tmp_path):
    shards = [tmp_path / "0-2", tmp_path / "1-2"]
    with oneemb.make_persistent_table_writer(shards, "s", "int64", "float32", 4, format="oneflow") as writer:
        writer.write(IDS, vectors())
    run("import", *shards, tmp_path / "t", "--snapshot", "all")
    run("import", *shards, tmp_path / "t", "--snapshot", "weights", "--embedding-dim", "1")
    expected = {(0, k): v for k, v in zip(IDS.tolist(), vectors().tolist(), strict=True)}
    assert rows_of(tmp_path / "t", "all") == expected
    assert rows_of(tmp_path / "t", "weights") == {key: row[:1] for key, row in expected.items()}
    run("import", *shards, tmp_path / "u", "--snapshot", "state", "--embedding-dim", "1", "--with-state")
    assert rows_of(tmp_path / "u", "state") == expected
    run("import", path, tmp_path / "v", "--from-snapshot", "first", "--snapshot", "copy")
    assert rows_of(tmp_path / "v", "copy") == rows_of(path, "first")


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_mistakes_exit_with_2_and_say_what_to_do(path, tmp_path):
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "v.npz", keys=IDS, values=vectors())
    for arguments, says in [
        (["inspect", tmp_path / "none"], "does not exist"),
        (["inspect", tmp_path / "empty"], "no table of oneemb"),
        (["check", tmp_path / "empty"], "no table of oneemb"),
        (["compact", tmp_path / "empty"], "no table of oneemb"),
        (["snapshot", "list", tmp_path / "empty"], "no table of oneemb"),
        (["snapshot", "delete", tmp_path / "empty", "s", "-y"], "no table of oneemb"),
        (["snapshot", "delete", path, "third", "-y"], "'first', 'second'"),
        (["export", path, tmp_path / "x.npz"], "there are: 'first', 'second'"),
        (["export", path, tmp_path / "x.csv", "--snapshot", "first"], "must end in"),
        (["export", path, tmp_path / "x.npz", "--snapshot", "third"], "no snapshot named 'third'"),
        (["import", tmp_path / "v.npz", path, "--snapshot", "first"], "'first' already"),
        (["import", tmp_path / "v.npz", path], "--snapshot"),
        (["import", tmp_path / "v.npz", path, "--snapshot", "x", "--keys", "id"], "no column 'id'"),
        (["import", tmp_path / "v.npz", path, "--snapshot", "x", "--from-snapshot", "s"], "folders of tables"),
        (["nonsense"], "No such command"),
    ]:
        result = run(*arguments, code=2)
        assert says in result.stderr.replace("\n", " "), result.stderr
        assert result.stdout == "" and "Traceback" not in result.stderr
    assert list((tmp_path / "empty").iterdir()) == []
    assert run("snapshot", "list", path).stdout == "first\nsecond\n"


def test_advice_names_options_and_no_arguments_of_functions(path, tmp_path):
    np.savez(tmp_path / "v.npz", keys=IDS, values=vectors())
    np.savez(tmp_path / "nan.npz", keys=IDS, values=vectors() * np.nan)
    np.save(tmp_path / "v.npy", vectors())
    npy = [tmp_path / f"{name}.npy" for name in "abcd"]
    for arguments, says in [
        (["export", path, tmp_path / "v.npz", "--snapshot", "first"], "give --overwrite to replace it"),
        (["export", path, *npy, "--snapshot", "first"], "only with --with-state"),
        (
            ["export", path, *npy[:3], "--snapshot", "first", "--table", "1"],
            "files of keys and values alone if one table is exported",
        ),
        (["export", path, *npy[:2], "--snapshot", "first"], "or give --table to export one table"),
        (["import", tmp_path / "v.npz", path, "--snapshot", "x", "--keys", "id"], "--row-numbers"),
        (
            ["import", tmp_path / "v.npz", path, "--snapshot", "x", "--values", "id"],
            "name the column of values with --values",
        ),
        (
            ["import", tmp_path / "v.npz", path, "--snapshot", "x", "--with-state"],
            "name the column of state with --state",
        ),
        (["import", tmp_path / "v.npy", path, "--snapshot", "x", "--with-state"], "--with-state needs files"),
        (["import", tmp_path / "nan.npz", path, "--snapshot", "x"], "give --allow-nonfinite to import such weights"),
    ]:
        result = run(*arguments, code=2)
        said = " ".join(result.stderr.split())
        assert says in said, said
        assert not re.search(r"[a-z_]+=(True|False|None|\.\.\.)|Reader|oneemb\.[a-z]", said), said
    with PersistentTable.open(path, row_width=4, threads=Threads(1)):
        said = run("compact", path, code=2).stderr
        assert "snapshots may be read meanwhile" in said.lower() and "SnapshotReader" not in said
    run("import", tmp_path / "nan.npz", path, "--snapshot", "x", "--allow-nonfinite")
    assert np.isnan(list(rows_of(path, "x").values())).all()


def test_a_table_without_rows_is_an_error_that_names_those_with_rows(path, tmp_path):
    result = run("export", path, tmp_path / "x.npz", "--snapshot", "first", "--table", "7", code=2)
    assert "snapshot 'first' has no rows of table 7; it has rows of tables 0, 1" in result.stderr
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("format", ["npz", "npy", "parquet", "safetensors"])
def test_garbage_is_named_without_a_traceback(path, tmp_path, format):
    for content in (b"", b"a text\n" * 50):
        file = tmp_path / f"garbage.{format}"
        file.write_bytes(content)
        result = run("import", file, path, "--snapshot", "x", code=2)
        assert f"garbage.{format} is not a" in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_a_damaged_snapshot_is_named_beside_the_list_and_can_be_deleted(path):
    damage(path, "second.snapshot", 200)
    result = run("snapshot", "list", path, code=1)
    assert result.stdout == "first\n" and "damaged: 'second': " in result.stderr and "checksum" in result.stderr
    found = run_json("snapshot", "list", path, code=1)
    assert found["snapshots"] == ["first"] and "checksum" in found["damaged"]["second"]
    run("snapshot", "delete", path, "second", "-y")
    assert run("snapshot", "list", path).stderr == "" and run_json("check", path)["sound"]


def test_where_every_snapshot_is_damaged_the_tool_that_saves_rows_is_named(path, tmp_path):
    says = f"every snapshot in {path} is damaged: `oneemb salvage` writes what is left"
    for name in ("first", "second"):
        assert says not in run("check", path, code=0 if name == "first" else 1).stdout
        damage(path, f"{name}.snapshot", 200)
    for words in (["check", path], ["backup", path, tmp_path / "copy"], ["push", path, f"file://{tmp_path}/store"]):
        assert says in run(*words, code=1).stdout
        run_json(*words, code=1)


def test_check_beside_a_damaged_snapshot_promises_that_no_file_goes(path):
    damaged = damage(path, "second.snapshot", 200)
    found = run_json("check", path, code=1)
    assert found["unreadable"] == [str(damaged)] and found["kept"] == found["unneeded"] and len(found["kept"]) == 2
    text = run("check", path, code=1).stdout
    assert f"2 of them stay, since {damaged} may need them" in text and "next one removes" not in text
    before = sorted(path.rglob("*.*"))
    PersistentTable.open(path, row_width=4, threads=Threads(1)).close()
    assert sorted(path.rglob("*.*")) == before  # as was said
    run("snapshot", "delete", path, "second", "-y")
    assert len(list((path / "chunks").iterdir())) == 2


def test_what_is_no_table_is_said_to_be_none(path, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with oneemb.make_persistent_table_writer(tmp_path / "f", "s", "int64", "float32", 4, format="oneflow") as writer:
        writer.write(IDS, vectors())
    commands = [["inspect"], ["check"], ["compact"], ["snapshot", "list"], ["snapshot", "delete"], ["export"]]
    for words in commands:
        more = {"delete": ["s", "-y"], "export": [tmp_path / "x.npz", "--snapshot", "s"]}.get(words[-1], [])
        for where in (tmp_path / "empty", path / "snapshots", path / "chunks"):
            said = " ".join(run(*words, where, *more, code=2).stderr.split())
            assert "is no table of oneemb: it has no folder" in said and str(where) in said, said
        assert "is a file" in run(*words, tmp_path / "file", *more, code=2).stderr
        assert "does not exist" in run(*words, tmp_path / "nowhere", *more, code=2).stderr
        if words[-1] in ("compact", "delete"):
            assert "holds a table of OneFlow" in run(*words, tmp_path / "f", *more, code=2).stderr
    for source in (tmp_path / "empty", path / "snapshots"):
        said = run("import", source, tmp_path / "new", "--snapshot", "x", code=2).stderr
        assert "is no table of oneemb" in " ".join(said.split())
        said = run("import", source, tmp_path / "new", "--snapshot", "x", "--from-snapshot", "s", code=2).stderr
        assert "is no table of oneemb" in " ".join(said.split())
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_error_of_ours_keeps_its_traceback(path, monkeypatch):
    def wrong(path):
        raise ZeroDivisionError

    monkeypatch.setattr("oneemb.storage.table.table_info.table_info", wrong)
    result = CliRunner().invoke(command, ["inspect", str(path)])
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_terminal_is_shown_a_progress_bar_and_nobody_else_is(path, monkeypatch):
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(end, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        for arguments, bar in [(["check", str(path)], True), (["check", str(path), "--json"], False)]:
            command(arguments, standalone_mode=False)
            print("|", file=terminal, flush=True)
            shown = os.read(main, 65536)
            assert (b"checking" in shown) == bar, shown
    os.close(main)


# ---- real processes -------------------------------------------------------------------------------------------------


def test_the_installed_command_checks_a_table(path):
    script = os.path.join(os.path.dirname(sys.executable), "oneemb")
    run("check", path)  # It may compile loops; the command would say so.
    done = subprocess.run([script, "check", path, "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["sound"]
    damage(path)
    done = subprocess.run([sys.executable, "-m", "oneemb", "check", path], capture_output=True, text=True)
    assert done.returncode == 1 and "has checksum" in done.stdout and done.stderr == ""


def test_the_command_alone_shows_its_help_and_succeeds():
    assert run().output == run("--help").output and "inspect" in run().output


def test_asking_for_help_loads_neither_torch_nor_numba():
    code = (
        "import sys; from oneemb.cli.commands import oneemb; oneemb(['--help'], standalone_mode=False);"
        "print([m for m in ('torch', 'numba', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "inspect" in done.stdout


def wait_for_a_handler(child, number):
    """Wait until the process has a handler of its own for a signal, or has ended."""
    while child.poll() is None:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())
        if int(caught[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.01)


INTERRUPTED, ENDED = (signal.SIGINT, 130), (signal.SIGTERM, 143)


@pytest.mark.parametrize(
    ("what", "signalled", "delays"),
    [("export", INTERRUPTED, (0, 0.5)), ("import", ENDED, (0, 0.5))]
    + [pytest.param(what, signalled, (0, 0.5, 1.0, 1.5), marks=pytest.mark.slow)
       for what in ("export", "import") for signalled in (INTERRUPTED, ENDED)],
)  # fmt: skip
def test_a_command_that_is_told_to_end_says_so_and_leaves_nothing(tmp_path, what, signalled, delays):
    number, code = signalled
    rows = 400_000
    np.savez(tmp_path / "in.npz", keys=np.arange(rows), values=np.ones((rows, 8), np.float32))
    oneemb.import_rows(tmp_path / "table", tmp_path / "in.npz", snapshot="there")
    arguments = {
        "export": ["export", tmp_path / "table", tmp_path / "out.npz", "--snapshot", "there"],
        "import": ["import", tmp_path / "in.npz", tmp_path / "table", "--snapshot", "new"],
    }[what]
    before = sorted(os.listdir(tmp_path))
    stopped = 0
    for delay in delays:
        child = subprocess.Popen([sys.executable, "-m", "oneemb", *map(str, arguments)], stderr=subprocess.PIPE)
        wait_for_a_handler(child, signal.SIGTERM)
        time.sleep(delay)
        child.send_signal(number)
        said = child.communicate(timeout=600)[1].decode()
        assert child.returncode in (0, code, -number), said  # the last: Python has let go of handlers at its end
        stopped += child.returncode == code
        if child.returncode == 0:
            break
        # It may have come when all was done, but for the program's end.
        assert set(os.listdir(tmp_path)) - {"out.npz"} == set(before)
        if os.path.exists(tmp_path / "out.npz"):
            assert len(np.load(tmp_path / "out.npz")["keys"]) == rows
            os.remove(tmp_path / "out.npz")
        for snapshot in run_json("inspect", tmp_path / "table")["snapshots"]:
            assert snapshot["rows"] == rows
            if snapshot["name"] == "new":
                run("snapshot", "delete", tmp_path / "table", "new", "--yes")
    assert stopped
    assert run_json("check", tmp_path / "table")["sound"]
