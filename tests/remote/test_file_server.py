"""Rows in a folder: what was pushed is there after a kill and a loss of power, or an error says that it is not."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.errors import CorruptTableError, LockedError
from oneemb.storage.remote.file_server import FileServer
from oneemb.storage.remote.parameter_server import Erases, LostRowsError, ServerError
from oneemb.storage.remote.servers import open_server
from tests.support.faulty_fs import FaultyFileSystem
from tests.support.forks import ended_well, in_child
from tests.support.parameter_server_suite import SUITE, check_pull, push, random_ids, random_part, run_check
from tests.support.power_losses import power_losses

IDS = np.array([5, 7, -9])


def rows(value, *widths):
    """Rows of IDS whose numbers are all this value."""
    return [np.full((len(IDS), width), value, np.float32) for width in widths]


def values_of(server, *widths, table="t"):
    """The one value of each part of each row of IDS, None where there is none: [N, P]."""
    parts, found_NP = server.pull(table, IDS, widths)
    for part in parts:
        assert (part == part[:, :1]).all(), "half of one value and half of another"
    return [[part[n, 0] if found else None for part, found in zip(parts, found_P, strict=True)]
            for n, found_P in enumerate(found_NP)]  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(path=tmp_path / "rows", **options):
        made.append(FileServer(path, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_a_folder_is_a_parameter_server(check, tmp_path):
    run_check(check, lambda: open_server(f"file://{tmp_path}/rows"))


SEVERAL = [check for check in SUITE if check.__name__.startswith(("many_calls", "erased", "rows_outlive", "a_push"))]


@pytest.mark.parametrize("check", SEVERAL, ids=lambda check: check.__name__)
def test_a_folder_that_saves_seldom_is_a_parameter_server(check, tmp_path):
    run_check(check, lambda: open_server(f"file://{tmp_path}/rows?save_bytes=3000"))


def test_no_id_is_taken_for_another(opened):
    rng = np.random.default_rng(3)
    ids = rng.integers(-(2**63), 2**63 - 1, 100_000)
    ids = np.unique(np.concatenate([ids, ids ^ (1 << 40), [0, -1, -(2**63), 2**63 - 1]]))
    assert len(ids) >= 200_000
    rng.shuffle(ids)
    halves = ids.view(np.uint32).reshape(-1, 2)
    server = opened()
    for n in np.array_split(np.arange(len(ids)), 3):
        server.push("t", ids[n], [halves.view(np.float32)[n]])
    server.close()
    server, order = opened(), rng.permutation(len(ids))
    parts, found_NP = server.pull("t", ids[order], [2])
    assert found_NP.all() and np.array_equal(parts[0].view(np.uint32), halves[order])


def test_a_value_may_change_its_width(opened):
    server, rng, values = opened(), np.random.default_rng(0), {}
    ids = random_ids(rng, 40)
    push(server, values, "t", ids, [random_part(rng, 40, 3), random_part(rng, 40, 1)])
    push(server, values, "t", ids[:10].copy(), [random_part(rng, 10, 5)])
    server.close()
    server = opened()
    check_pull(server, values, "t", ids[:10], [5, 1])
    check_pull(server, values, "t", ids[10:], [3, 1])
    with pytest.raises(ServerError, match=rf"part 0 of row {ids[3]} of table 't' must have 12 bytes, has 20"):
        server.pull("t", ids[3:20], [3])
    push(server, values, "t", ids, [random_part(rng, 40, 3)])
    check_pull(server, values, "t", ids, [3, 1])
    server.erase("t", ids, 2)
    assert not server.pull("t", ids, [3, 5])[1].any() and isinstance(server, Erases)


def test_a_value_of_two_widths_is_told(opened, monkeypatch):
    server = opened()
    server.push("t", IDS, rows(1, 3))
    monkeypatch.setattr(FileServer, "_erase", lambda *arguments, **options: None)  # As if a kill came between.
    server.push("t", IDS, rows(2, 4))
    monkeypatch.undo()
    for width in (3, 4):
        with pytest.raises(ServerError, match="row 5 of table 't' has values of . and of . numbers.* push the row"):
            server.pull("t", IDS, [width])
    server.push("t", IDS, rows(2, 4))
    assert values_of(server, 4) == [[2]] * 3


# ---- who has the folder ----------------------------------------------------------------------------------------------


def test_one_process_has_a_folder_at_a_time(opened, tmp_path):
    server = opened()
    with pytest.raises(ServerError, match=f"process {os.getpid()} on host") as caught:
        open_server(f"file://{tmp_path}/rows")
    assert isinstance(caught.value.__cause__, LockedError)
    server.push("t", IDS, rows(1, 2))
    server.close()
    assert values_of(opened(), 2) == [[1]] * 3


def test_whoever_opens_a_folder_again_in_the_process_has_the_same_rows(tmp_path):
    one, two = (open_server(f"file://{tmp_path}/{name}") for name in ("rows", "./rows"))
    one.push("t", IDS, rows(1, 2))
    assert values_of(two, 2) == [[1]] * 3
    one.close()
    one.close()
    with pytest.raises(ServerError, match="is closed; open it again"):
        one.pull("t", IDS, [2])
    two.push("t", IDS, rows(2, 2))
    with pytest.raises(ValueError, match="open in this process with save_bytes=0, got 9"):
        open_server(f"file://{tmp_path}/rows?save_bytes=9")
    two.close()
    again = open_server(f"file://{tmp_path}/rows?save_bytes=9")
    assert values_of(again, 2) == [[2]] * 3
    again.close()


def test_a_model_with_averages_and_a_copy_has_its_rows_in_one_folder(tmp_path):
    options = oneemb.make_cached_remote_store_options(f"file://{tmp_path}/server", 1, tmp_path / "a")
    table = oneemb.make_table(oneemb.make_uniform_initializer(-1, 1))
    embedding = oneemb.MultiTableEmbedding("a", 4, torch.float32, torch.int64, [table], options)
    averaged, optimizer = (
        oneemb.AveragedEmbedding(embedding, tmp_path / "b"),
        torch.optim.SGD(embedding.parameters(), lr=1.0),
    )
    begun = embedding(torch.arange(9)).detach()
    for _ in range(2):
        averaged.update_rows()
        embedding(torch.arange(9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    copy = embedding.copy_to(tmp_path / "c")
    assert torch.equal(copy(torch.arange(9)), begun - 1 - 1)
    assert torch.allclose(averaged(torch.arange(9)), begun - 0.5)


def test_another_process_finds_the_rows(opened, tmp_path):
    server = opened()
    server.push("a table", IDS, rows(4, 2, 1))
    server.close()
    code = f"""
import numpy as np
from oneemb.storage.remote.servers import open_server
server = open_server("file://{tmp_path}/rows")
parts, found_NP = server.pull("a table", np.array({IDS.tolist()}), [2, 1])
assert found_NP.all() and all((part == 4).all() for part in parts)
server.push("a table", np.array([1]), [np.ones((1, 2), np.float32)])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert opened().pull("a table", np.array([1]), [2, 1])[1].tolist() == [[True, False]]


def test_a_forked_child_is_told_that_the_folder_is_its_parents(opened):
    server = opened()
    server.push("t", IDS, rows(1, 2))

    def child():
        for call in (lambda: server.pull("t", IDS, [2]), lambda: server.push("t", IDS, rows(2, 2)), server.flush):
            with pytest.raises(ServerError, match="forked child"):
                call()
        server.close()
        return True

    assert ended_well(in_child(child)) is True
    server.push("t", IDS, rows(3, 2))
    assert values_of(server, 2) == [[3]] * 3


def test_a_closed_server_is_told(opened):
    server = opened()
    server.close()
    with pytest.raises(ServerError, match="is closed; open it again"):
        server.pull("t", IDS, [2])


def test_a_folder_that_was_removed_is_told(opened, tmp_path):
    server = opened()
    server.push("t", IDS, rows(1, 2))
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(ServerError, match="was removed"):
        server.push("t", IDS, rows(2, 2))
    other = opened()
    other.push("t", IDS, rows(7, 2))
    server.close()
    assert values_of(other, 2) == [[7]] * 3


# ---- URLs and arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["file://", "file://?save_bytes=1", "file:///x?save=1", "file:///x?save_bytes=-1"])
def test_a_url_that_names_no_folder_or_other_options_is_told(url):
    with pytest.raises(ValueError, match="file://"):
        open_server(url)


def test_parts_of_another_form_are_refused(opened):
    server = opened()
    for part in (np.zeros((3, 2)), np.zeros((2, 2), np.float32), np.zeros((3, 0), np.float32), np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match=r"parts must be float32 of shape \[3, 1 or more\]"):
            server.push("t", IDS, [part])


# ---- kills -----------------------------------------------------------------------------------------------------------

PUSHER = """
import sys
import numpy as np
from oneemb.storage.remote.servers import open_server

server, ids = open_server(sys.argv[1]), np.arange(-200, 200)
step = int(sys.argv[2])
while True:
    step += 1
    server.push("t", ids, [np.full((400, 8), step, np.float32), np.full((400, 1), step, np.float32)])
    server.push("t", np.array([10**12 + step]), [np.full((1, 8), step, np.float32)])
    server.erase("t", np.array([10**12 + step - 1]), 2)
    print(step, flush=True)
"""


def push_until_killed(url, first, rng, steps=3):
    """The last step that was announced by a process that was killed."""
    child = subprocess.Popen([sys.executable, "-c", PUSHER, url, str(first)], stdout=subprocess.PIPE, text=True)
    try:
        announced = [int(child.stdout.readline()) for _ in range(rng.randrange(1, steps))]
    finally:
        child.send_signal(signal.SIGKILL)
    announced += [int(line) for line in child.communicate()[0].split()]
    return announced[-1]


def test_what_a_killed_process_has_pushed_is_there(opened, tmp_path):
    rng, step = random.Random(5), 0
    for _ in range(2):
        step = push_until_killed(f"file://{tmp_path}/rows", step, rng, 12)
        server = opened()
        parts, found_NP = server.pull("t", np.arange(-200, 200), [8, 1])
        assert found_NP.all()
        for part in parts:  # Each part is of the last push that returned, or of the one that the kill has met.
            assert len(np.unique(part)) == 1 and part[0, 0] in (step, step + 1)
        kept = [found for (found,) in server.pull("t", 10**12 + np.arange(step - 3, step + 2), [8])[1].tolist()]
        assert kept[:3] == [False] * 3 and kept[3:] in ([True, False], [True, True], [False, True])
        server.close()


def test_what_a_killed_process_had_not_saved_is_told(opened, tmp_path):
    url = f"file://{tmp_path}/rows?save_bytes=1000000000"
    server = open_server(url)
    server.push("t", IDS, rows(1, 8, 1))
    assert (tmp_path / "rows" / "UNSAVED").exists()
    server.flush()
    assert not (tmp_path / "rows" / "UNSAVED").exists()
    server.close()
    push_until_killed(url, 1, random.Random(0))
    for again in (url, f"file://{tmp_path}/rows"):
        with pytest.raises(LostRowsError, match=r"has lost rows: process \d+ on host .* once with .*accept"):
            open_server(again)
    server = open_server(f"file://{tmp_path}/rows?lost=accept")
    assert values_of(server, 8, 1) == [[1, 1]] * 3
    server.close()
    assert values_of(opened(), 8, 1) == [[1, 1]] * 3


def test_rows_are_saved_when_so_many_bytes_were_pushed(opened, tmp_path):
    server = opened(save_bytes=200)
    marker = tmp_path / "rows" / "UNSAVED"
    there = []
    for step in range(8):
        server.push("t", IDS, rows(step, 2))  # 48 bytes with the ids
        there.append(marker.exists())
    assert there == [True] * 4 + [False] + [True] * 3
    server.close()
    assert not marker.exists() and values_of(opened(), 2) == [[7]] * 3


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def kept(opened, tmp_path):
    """A folder with rows of two widths."""
    server = opened()
    server.push("t", IDS, rows(1, 8, 1))
    server.close()
    return tmp_path / "rows"


@pytest.mark.parametrize("ending", [".rows", ".keys", ".snapshot"])
def test_damaged_rows_are_told(kept, opened, ending):
    path = next((kept / "width-8").glob(f"*/*{ending}"))
    flip(path, 4096 + 20 if ending == ".rows" else path.stat().st_size // 2)
    with pytest.raises(ServerError, match=path.name) as caught:
        opened().pull("t", IDS, [8])
    causes = [caught.value]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert any(isinstance(cause, CorruptTableError) for cause in causes) or "damaged" in str(caught.value)


def test_a_damaged_or_missing_file_of_names_is_told(kept, opened):
    names = kept / "NAMES"
    whole = names.read_bytes()
    for n in range(0, len(whole), 7):
        flip(names, n)
        with pytest.raises(ServerError, match="NAMES, .* is not what was written: its checksum"):
            opened()
        names.write_bytes(whole)
    for short in (b"", whole[:8], whole[:-8]):
        names.write_bytes(short)
        with pytest.raises(ServerError, match="NAMES, .* is not what was written"):
            opened()
    names.unlink()
    with pytest.raises(ServerError, match="has rows in width-1, width-8 and no file NAMES"):
        opened()
    names.write_bytes(whole)
    assert values_of(opened(), 8, 1) == [[1, 1]] * 3


def test_names_of_a_later_release_are_left_alone(kept, opened, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("oneemb.storage.remote.value_names._VERSION", 2)
        opened(kept.parent / "later").close()
    with pytest.raises(ServerError, match="NAMES has format 2, and this release reads 1: a later release wrote it"):
        opened(kept.parent / "later")


def test_rows_that_are_gone_or_of_another_folder_are_told(kept, opened, tmp_path):
    shutil.copytree(kept, tmp_path / "copy")
    shutil.rmtree(kept / "width-8")
    with pytest.raises(LostRowsError, match="has lost its rows of 8 numbers"):
        opened()
    shutil.rmtree(kept)
    shutil.copytree(tmp_path / "copy", kept)
    next((kept / "width-8" / "snapshots").iterdir()).unlink()
    with pytest.raises(LostRowsError, match="has lost its rows of 8 numbers"):
        opened()
    other = opened(tmp_path / "other")
    other.push("t", IDS, rows(9, 8))
    other.close()
    shutil.rmtree(kept)
    shutil.copytree(tmp_path / "copy", kept)
    shutil.rmtree(kept / "width-8")
    shutil.copytree(tmp_path / "other" / "width-8", kept / "width-8")
    with pytest.raises(ServerError, match="holds rows of another folder"):
        opened()


# ---- losses of power, and calls that fail ----------------------------------------------------------------------------


def work(server, done):
    """Pushes and erases; `done` has what each finished call has left, by width."""
    steps = [
        lambda: server.push("t", IDS, rows(1, 3)),
        lambda: server.push("t", IDS, rows(2, 3, 1)),
        lambda: server.push("u", IDS, rows(3, 1)),
        lambda: server.erase("t", IDS, 2),
        lambda: server.push("t", IDS, rows(4, 3, 1)),
    ]
    for step in steps:
        step()
        done.append(1)


# What `t` (widths 3 and 1) and `u` (width 1) hold after so many steps.
STATES = [
    ([None, None], [None]), ([1, None], [None]), ([2, 2], [None]), ([2, 2], [3]), ([None, None], [3]), ([4, 4], [3]),
]  # fmt: skip


def found_on(fs):
    server = FileServer("/rows", fs=fs, background=False)
    found = [values_of(server, 3, 1), values_of(server, 1, table="u")]
    server.push("t", IDS, rows(8, 3, 1))
    assert values_of(server, 3, 1) == [[8, 8]] * 3
    server.close()
    assert all(row == of_table[0] for of_table in found for row in of_table)
    return [of_table[0] for of_table in found]


def is_between(found, before, after):
    """Whether each part is that of the state before a call or of that after it."""
    return all(
        value in (old, new)
        for parts, olds, news in zip(found, before, after, strict=True)
        for value, old, new in zip(parts, olds, news, strict=True)
    )


@pytest.mark.parametrize("torn", [pytest.param(3, marks=pytest.mark.slow), 1])
def test_power_loss_at_any_call_loses_nothing_that_was_announced(torn):
    fs, done = FaultyFileSystem(), []

    def look(disk, call, half, fate):
        found = found_on(disk)
        before, after = STATES[len(done)], STATES[min(len(done) + 1, 5)]
        assert is_between(found, before, after), f"call {call}, {fate}, {len(done)} steps: {found}"

    power_losses(fs, lambda: work(FileServer("/rows", fs=fs, background=False), done), look, torn=torn)
    assert found_on(fs.survivors()[0][1]) == list(STATES[5])


@pytest.mark.parametrize("save_bytes", [0, 1 << 20])
def test_calls_that_fail_raise_and_what_was_announced_is_there(save_bytes):
    fs, done = FaultyFileSystem(), []
    server = FileServer("/rows", fs=fs, background=False, save_bytes=save_bytes)
    first = len(fs.calls)
    work(server, done)
    server.close()
    calls, raised = len(fs.calls), 0
    for call in range(first, calls, 5):
        fs, done = FaultyFileSystem(), []
        server = FileServer("/rows", fs=fs, background=False, save_bytes=save_bytes)

        def fail(what, path, fs=fs, call=call):
            if len(fs.calls) > call and what not in ("open", "read"):
                raise OSError(errno.ENOSPC, "no space")

        fs.fail = fail
        try:
            work(server, done)
        except ServerError as error:
            assert "ENOSPC" in str(error)
            raised += 1
        fs.fail = None
        try:
            server.flush()  # Once there is room again.
            found = [values_of(server, 3, 1)[0], values_of(server, 1, table="u")[0]]
            server.close()
        except ServerError:
            found = found_on(fs)
        assert is_between(found, STATES[len(done)], STATES[min(len(done) + 1, 5)]), f"call {call}"
        assert is_between(found_on(fs), STATES[len(done)], STATES[min(len(done) + 1, 5)]), f"call {call}"
    assert raised


def test_a_close_that_cannot_save_says_so_and_releases_the_folder():
    fs = FaultyFileSystem()
    server = FileServer("/rows", fs=fs, background=False, save_bytes=1 << 20)
    server.push("t", IDS, rows(1, 2))
    server.flush()
    server.push("t", IDS, rows(2, 2))

    def fail(what, path):
        if what == "write" and "LOCK" not in path:
            raise OSError(errno.ENOSPC, "no space")

    fs.fail = fail
    with pytest.raises(ServerError, match="ENOSPC"):
        server.close()
    fs.fail = None
    with pytest.raises(LostRowsError, match="has lost rows"):
        FileServer("/rows", fs=fs, background=False)
    server = FileServer("/rows", fs=fs, background=False, accept_loss=True)
    assert values_of(server, 2) == [[1]] * 3
