"""Exports for other libraries that are killed, or whose file calls fail: old rows, new rows, or an error."""

import errno
import os
import resource
import signal

import numpy as np
import pytest
import torch

import oneemb
from oneemb.storage.fs import LocalFileSystem
from tests.support.foreign import assert_same, rows_in
from tests.support.forks import run_code

ROWS, DIM = 100, 4
FORMATS = {
    "tfra": {"name": "films"},
    "hugectr": {},
    "torch": {"name": "w"},
    "torchrec": {"name": "t", "num_embeddings": 128, "managed_collisions": True},
}
IMPORTS = {
    "tfra": {},
    "hugectr": {},
    "torch": {"name": "w", "ids": "w.ids", "state": "w.state"},
    "torchrec": {"state": "optimizer"},
}
CALLS = ("create", "write", "sync", "rename", "remove", "sync_directory")


def make_table(path, snapshot, seed):
    draws = torch.Generator().manual_seed(seed)
    weight, first, second = (torch.rand(ROWS, DIM, generator=draws) for _ in range(3))
    ids = torch.randperm(10 * ROWS, generator=draws)[:ROWS] if seed else torch.arange(ROWS)
    state = {"step": 3, "exp_avg": first, "exp_avg_sq": second}
    oneemb.import_foreign(path, {"w": weight}, "torch", ids=ids, state=state, with_state=True, snapshot=snapshot)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of a table with the snapshots "old" and "new" of other ids."""
    path = tmp_path_factory.mktemp("source") / "t"
    make_table(path, "old", 0)
    make_table(path, "new", 1)
    return path


def target_of(folder, format):
    folder.mkdir(exist_ok=True)
    return folder if format in ("tfra", "hugectr") else folder / "rows.safetensors"


def export(source, folder, format, snapshot):
    oneemb.export_foreign(
        source, target_of(folder, format), format, snapshot=snapshot, with_state=True, overwrite=True, batch_size=64,
        **FORMATS[format],
    )  # fmt: skip


def found_in(folder, format, into):
    """Rows and state that the files have."""
    options = {"step": 3} if format in ("tfra", "hugectr") else {}
    oneemb.import_foreign(
        into, target_of(folder, format), format, with_state=True, optimizer="adam", snapshot="s", **IMPORTS[format],
        **options,
    )  # fmt: skip
    return rows_in(into, "s")


def fail_call(patch, call, number, code):
    """Let call `number` of the file system's `call` fail. Returns a list that gets an entry if it was made."""
    real, count, failed = getattr(LocalFileSystem, call), [0], []

    def made(fs, *arguments, **options):
        count[0] += 1
        if count[0] == number + 1:
            failed.append(1)
            path = arguments[-1]
            raise OSError(code, os.strerror(code), *([path] if isinstance(path, str) else []))
        return real(fs, *arguments, **options)

    patch.setattr(LocalFileSystem, call, made)
    return failed


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_whose_file_call_fails_leaves_no_keys_with_other_values(
    tmp_path, source, format, call, monkeypatch
):  # fmt: skip
    """Every call of each kind that an export makes fails in turn, without and with files of a former export."""
    old, new = rows_in(source, "old"), rows_in(source, "new")
    for number in range(100):
        failed = []
        for is_there in (False, True):
            folder = tmp_path / f"{number}-{is_there}"
            if is_there:
                export(source, folder, format, "old")
            target_of(folder, format)
            with monkeypatch.context() as patch:
                failed = fail_call(patch, call, number, errno.ENOSPC)
                try:
                    export(source, folder, format, "new")
                    assert not failed or call == "remove"
                except oneemb.StorageError as error:
                    assert failed and "ENOSPC" in str(error) and str(folder) in str(error)
            left = sorted(os.listdir(folder))
            assert not [name for name in left if name.endswith(".tmp")]
            if not is_there and failed:
                assert left == []
            elif failed:
                try:
                    found = found_in(folder, format, tmp_path / f"{number}-t")
                except oneemb.StorageError:
                    assert call in ("rename", "remove", "sync_directory") and format in ("tfra", "hugectr")
                else:
                    assert_same(found, old if min(found) == min(old) and found.keys() == old.keys() else new)
            else:
                assert_same(found_in(folder, format, tmp_path / f"{number}-t-{is_there}"), new)
        if not failed:
            assert number > 0 or call == "remove" or format in ("torch", "torchrec")
            break
    else:
        raise AssertionError("the export makes more calls")


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_to_a_disk_that_is_full_at_any_size_leaves_the_files_that_were_there(tmp_path, source, format):
    """The system refuses to write a file beyond a size, as it does beyond the end of a disk; temporary files too."""
    export(source, tmp_path / "to", format, "old")
    whole = {name: (tmp_path / "to" / name).read_bytes() for name in os.listdir(tmp_path / "to")}
    largest, refused = max(map(len, whole.values())), 0
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in np.linspace(0, largest, 12, dtype=int).tolist():
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            try:
                with pytest.raises(oneemb.StorageError, match="EFBIG"):
                    export(source, tmp_path / "to", format, "new")
                refused += 1
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert {name: (tmp_path / "to" / name).read_bytes() for name in os.listdir(tmp_path / "to")} == whole
            if size >= largest - 1:
                break
    except pytest.fail.Exception:
        assert refused >= 10  # The last size is enough for some.
    finally:
        signal.signal(signal.SIGXFSZ, handler)
    export(source, tmp_path / "to", format, "new")
    assert_same(found_in(tmp_path / "to", format, tmp_path / "t"), rows_in(source, "new"))


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from oneemb.storage.fs import LocalFileSystem
from tests.foreign.test_export_faults import CALLS, export
source, base, format, every = sys.argv[1:]

def counted(real):
    def made(*arguments, **options):
        count[0] += 1
        if count[0] == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return made

export(source, Path(base) / "warm", format, "old")
for call in CALLS:
    setattr(LocalFileSystem, call, counted(getattr(LocalFileSystem, call)))
for number in range(0, 1000, int(every)):
    folder, count = Path(base) / str(number), [0]
    shutil.copytree(Path(base) / "warm", folder)
    child = os.fork()
    if not child:
        export(source, folder, format, "new")
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(number)
        break
"""


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_that_is_killed_at_any_file_call_leaves_old_rows_new_rows_or_an_error(
    tmp_path, source, format, every
):  # fmt: skip
    ended = run_code(KILLED, source, tmp_path, format, every)
    assert ended.returncode == 0, ended.stderr
    kills = int(ended.stdout)
    old, new, outcomes = rows_in(source, "old"), rows_in(source, "new"), set()
    assert kills >= 3
    for number in range(0, kills, every):
        try:
            found = found_in(tmp_path / str(number), format, tmp_path / f"{number}-t")
        except oneemb.StorageError as error:
            assert format in ("tfra", "hugectr") and "restore" in str(error) or "has no file" in str(error)
            outcomes.add("error")
        else:
            is_old = found.keys() == old.keys()
            assert_same(found, old if is_old else new)
            outcomes.add("old" if is_old else "new")
        export(source, tmp_path / str(number), format, "new")  # What the killed export has left does not stop it.
        assert not [name for name in os.listdir(tmp_path / str(number)) if name.endswith(".tmp")]
    assert "old" in outcomes
