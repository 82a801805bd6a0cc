"""Files of compiled CUDA loops: what is read from them, and what is not. Nothing is compiled here."""

import os
import threading

import pytest

from oneemb.kernels import cuda_code, gather_cuda, jit_cuda
from oneemb.kernels.cuda_code import Image, cache_folder, images_of, keep, key_of
from oneemb.kernels.cuda_signatures import cases

LOOP, SIGNATURE = cases()["gather float32 x4"]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Forms of loops that were compiled, in an empty cache."""
    found = []

    def compile(loop, signature, capability, form):
        found.append((loop, signature, capability, form))
        return Image(f"entry{len(found)}", b"code\n\0" + form.encode())

    monkeypatch.setattr(cuda_code, "compiled", compile)
    monkeypatch.setattr(cuda_code, "PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr(jit_cuda, "COMPILES", True)
    monkeypatch.setattr(jit_cuda, "tools", lambda: "compiler 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def first(loop=LOOP, signature=SIGNATURE, capability=(9, 0)):
    return next(images_of(loop, signature, capability))


def test_a_loop_is_compiled_once(compiled):
    assert first() == first() == Image("entry1", b"code\n\0cubin") and len(compiled) == 1


def test_all_that_decides_the_code_is_in_the_key(compiled, monkeypatch):
    keys = {key_of(loop, signature) for loop, signature in cases().values()}
    assert len(keys) == len(cases()) and None not in keys
    first()
    for other in [
        (LOOP.at(V=1), SIGNATURE, (9, 0)), (LOOP, ("int16[2]", *SIGNATURE[1:]), (9, 0)), (LOOP, SIGNATURE, (8, 0)),
        (gather_cuda.copy_in_loop, SIGNATURE, (9, 0)),
    ]:  # fmt: skip
        before = len(compiled)
        first(*other)
        assert len(compiled) == before + 1
    monkeypatch.setattr(jit_cuda, "tools", lambda: "compiler 2")
    before = len(compiled)
    first()
    assert len(compiled) == before + 1


def test_a_change_of_a_source_is_another_key(compiled, monkeypatch):
    from oneemb.kernels import jit

    before = key_of(LOOP, SIGNATURE)
    monkeypatch.setattr(jit, "sources_digest", lambda files, more="": f"of {sorted(map(str, files))}")
    after = key_of(LOOP, SIGNATURE)
    assert before != after and "gather_cuda.py" in after and "jit_cuda.py" in after
    adam, of_adam = cases()["adam float32 x4"]
    assert "update_adam.py" in key_of(adam, of_adam)


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "other", "head"])
def test_a_damaged_file_is_compiled_anew(compiled, damage):
    first()
    (file,) = cache_folder().iterdir()
    data = file.read_bytes()
    file.write_bytes({
        "cut": data[:-1], "bit": data[:-1] + bytes([data[-1] ^ 1]), "empty": b"", "other": b"[1]\n" + data,
        "head": data.replace(b"gather_loop:", b"gather_lop:"),
    }[damage])  # fmt: skip
    assert first() == Image("entry2", b"code\n\0cubin") and len(compiled) == 2
    assert first().entry == "entry2" and len(compiled) == 2


def test_a_folder_that_cannot_be_written_to_costs_compiling(compiled, tmp_path):
    (tmp_path / "cache").write_text("in the place of the folder")
    assert first().entry == "entry1" and first().entry == "entry2"


def test_a_named_folder_that_cannot_be_written_to_is_an_error(compiled, tmp_path):
    (tmp_path / "cubins").write_text("in the place of the folder")
    with pytest.raises(OSError, match="compiled loops cannot be written to .*cubins: make it a folder"):
        cuda_code.kept(tmp_path / "cubins", LOOP, SIGNATURE, (9, 0), "cubin")


def test_a_write_that_fails_leaves_nothing(compiled, monkeypatch):
    def fail(*args):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "replace", fail)
    first()
    assert list(cache_folder().iterdir()) == []


def test_threads_that_compile_at_once_leave_one_whole_file(compiled):
    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(cache_folder().iterdir())) == 1
    before = len(compiled)
    first()
    assert len(compiled) == before


def test_code_of_the_package_comes_first_and_needs_no_compiler(compiled, monkeypatch):
    monkeypatch.setattr(jit_cuda, "COMPILES", False)
    key = key_of(LOOP, SIGNATURE)
    with pytest.raises(ImportError, match=r"gather_cuda.gather_loop is not compiled.*pip install 'oneemb\[cuda\]'"):
        first()
    keep(cuda_code.PACKAGE_FOLDER, key, "sm_80", Image("of_80", b"1"))
    keep(cuda_code.PACKAGE_FOLDER, key, "ptx", Image("of_ptx", b"2"))
    assert [first(capability=(8, minor)).entry for minor in (0, 6, 9)] == ["of_80"] * 3
    assert [first(capability=(major, 0)).entry for major in (9, 10, 12)] == ["of_ptx"] * 3
    assert compiled == []


def test_ptx_follows_a_cubin_that_no_driver_takes(compiled):
    first()
    assert [image.code[6:] for image in images_of(LOOP, SIGNATURE, (9, 0))] == [b"cubin", b"ptx"]
    assert len(compiled) == 2
