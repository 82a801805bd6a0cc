"""A folder is copied while a job saves to it: docs/backups.md says in which order, and what a copy has then."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from oneemb.storage.table.check import check_table
from tests.storage import test_persistent_table_crash as crash
from tests.storage.test_persistent_table import open_table
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.table_model import check, put_random, scanned

CHUNKS, SNAPSHOTS = "chunks", "snapshots"
RIGHT = [CHUNKS, SNAPSHOTS, CHUNKS]


def link(fs, source, target):
    """As `cp -al`: both are one file, which grows for both."""
    fs.entries[target] = fs.entries[source]


def copy(fs, source, target):
    """As rsync: what is there now, in place of what was copied before."""
    fs.entries[target] = type(fs.entries[source])(bytes(fs.entries[source].now))


class Vanished(Exception):
    """A snapshot has gone since its folder was listed, which cp and rsync say: the copy is made anew."""


def backed_up(order, put, change, at):
    """A copy of a table, made file by file, with the change before the file of this number.

    Returns:
        The disk with the copy, what each save held, and whether there was such a file.
    """
    fs = FaultyFileSystem()
    world = crash.World(fs)
    world.delete("a")
    saved = dict(world.saved.values())
    for folder in (CHUNKS, SNAPSHOTS):
        fs.make_directories(f"/copy/{folder}")
    done = 0
    for folder in order:
        for name in sorted(fs.names(f"/t/{folder}")):
            if done == at:
                change(world)
                saved |= dict(world.saved.values())
            done += 1
            if f"/t/{folder}/{name}" in fs.entries:
                put(fs, f"/t/{folder}/{name}", f"/copy/{folder}/{name}")
            elif folder == SNAPSHOTS:
                raise Vanished
    for _ in range(2):  # The job goes on.
        world.put(170)
        world.save("b", overwrite=True)
    return fs, saved, done > at


def replace(world):
    """Other rows in other chunks, in place of the snapshot."""
    for _ in range(3):
        world.put(170)
    world.save("b", overwrite=True)


def save_and_delete(world):
    """As a graph that keeps one: a new one is saved, then the former one is deleted."""
    for _ in range(3):
        world.put(170)
    world.save("c")
    world.delete("b")


def wrong_in(fs, saved):
    """What is wrong with a copy: what `check` says, or what is loaded from it."""
    problems = check_table("/copy", fs=fs).problems
    if problems:
        return problems
    disk = FaultyFileSystem()
    for folder in (CHUNKS, SNAPSHOTS):
        disk.make_directories(f"/t/{folder}")
        for name in fs.names(f"/copy/{folder}"):
            content = bytes(fs.entries[f"/copy/{folder}/{name}"].now)
            disk.entries[f"/t/{folder}/{name}"] = type(fs.entries[f"/copy/{folder}/{name}"])(content)
    with crash.open_table(disk) as table:
        names = [info.name for info in table.snapshots()]
        sound = names and all(saved[table.load_snapshot(name)["n"]] == scanned(table) for name in names)
    return [] if sound else [f"other rows, or none: {names}"]


def wrongs(order, put, change):
    """What is wrong with the copies, wherever the change comes."""
    found, at, more = [], 0, True
    while more:
        try:
            fs, saved, more = backed_up(order, put, change, at)
            found += [f"before file {at}: {wrong}" for wrong in wrong_in(fs, saved)]
        except Vanished:
            assert change is save_and_delete
        at += 1
    assert at > 5
    return found


@pytest.mark.parametrize("change", [replace, save_and_delete])
@pytest.mark.parametrize("put", [link, copy])
def test_a_copy_of_chunks_then_snapshots_then_chunks_is_whole_wherever_a_save_comes(put, change):
    assert wrongs(RIGHT, put, change) == []


def test_the_commands_of_the_docs_copy_the_tables_below_a_folder(tmp_path):
    (commands,) = re.findall(r"```sh\n(.*?)```", (Path(__file__).parents[2] / "docs" / "backups.md").read_text(), re.S)
    live, held = tmp_path / "live", {}
    for folder in (live, live / "rank-0-of-2"):
        with open_table(folder) as table:
            put_random(table, held.setdefault(folder, {}), np.random.default_rng(len(held)), 100)
            table.save_snapshot("a", {})
    commands = commands.replace("/data/items.copy", f"{tmp_path}/copy").replace("/data/items", f"{live}")
    subprocess.run(["bash", "-e", "-c", commands.replace("oneemb check", "true")], check=True)
    for folder, rows in held.items():
        its = tmp_path / "copy" / folder.relative_to(live)
        assert check_table(its).problems == [] and sorted(os.listdir(its / CHUNKS)) == sorted(
            os.listdir(folder / CHUNKS)
        )
        assert not (its / "LOCK").exists()
        with open_table(its) as table:
            assert table.recovery.lost == [] and table.recovery.kept == []
            table.load_snapshot("a")
            check(table, rows)


def test_a_copy_of_links_and_the_table_are_cut_back_without_each_other(tmp_path):
    rows, earlier = {}, {}
    with open_table(tmp_path / "live") as table:
        for name, held in (("a", earlier), ("b", rows)):
            put_random(table, rows, np.random.default_rng(0 if name == "a" else 1), 100)
            held |= rows
            table.save_snapshot(name, {})
    for folder in (CHUNKS, SNAPSHOTS):
        (tmp_path / "copy" / folder).mkdir(parents=True)
        for file in (tmp_path / "live" / folder).iterdir():
            os.link(file, tmp_path / "copy" / folder / file.name)
    with open_table(tmp_path / "live") as table:
        table.delete_snapshot("b")
    with open_table(tmp_path / "live") as table:  # It needs less of its chunks now.
        table.load_snapshot("a")
        check(table, earlier)
    assert check_table(tmp_path / "copy").problems == []
    with open_table(tmp_path / "copy") as table:
        table.load_snapshot("b")
        check(table, rows)
        table.delete_snapshot("a")
    shutil.rmtree(tmp_path / "live")
    with open_table(tmp_path / "copy") as table:
        table.delete_snapshot("b")
    assert not any((tmp_path / "copy" / CHUNKS).iterdir())


@pytest.mark.parametrize("order", [[CHUNKS, SNAPSHOTS], [SNAPSHOTS, CHUNKS]], ids=str)
def test_a_copy_of_each_once_is_damaged_where_a_save_comes_between(order):
    assert wrongs(order, link, replace) and wrongs(order, copy, save_and_delete)
