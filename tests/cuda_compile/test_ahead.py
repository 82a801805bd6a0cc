"""Loops compiled ahead, by `oneemb warmup`, are all that a machine without a compiler needs."""

import importlib.metadata
import json

import pytest
from click.testing import CliRunner

from oneemb.cli.commands import oneemb
from oneemb.kernels import cuda_ahead, cuda_code, jit_cuda
from oneemb.kernels.cuda_signatures import cases


@pytest.fixture
def few(monkeypatch):
    """Few loops that are compiled ahead, in this process."""
    found = {name: cases()[name] for name in ("release", "begin")}
    monkeypatch.setattr(cuda_ahead, "cases", lambda every: found)
    monkeypatch.setattr(cuda_ahead, "ProcessPoolExecutor", InThisProcess)
    return found


class InThisProcess:
    def __init__(self, *args, **kwargs):
        self.map = lambda call, jobs, chunksize: map(call, jobs)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def test_loops_in_the_folder_of_the_package_need_no_compiler(few, tmp_path, monkeypatch):
    folder = tmp_path / "cubins"
    said = CliRunner().invoke(oneemb, ["warmup", "--cuda-folder", str(folder), "--json"])
    assert said.exit_code == 0, said.output
    assert {key: json.loads(said.stdout)[key] for key in ("loops", "compiled")} == {"loops": 6, "compiled": 6}
    again = CliRunner().invoke(oneemb, ["warmup", "--cuda-folder", str(folder)])
    assert f"0 of 6 loops compiled into {folder}" in again.stdout and str(cuda_code.PACKAGE_FOLDER) in again.stdout
    monkeypatch.setattr(cuda_code, "PACKAGE_FOLDER", folder)
    monkeypatch.setattr(jit_cuda, "COMPILES", False)
    for loop, signature in few.values():
        for capability in [(8, 0), (8, 6), (9, 0), (10, 0), (12, 1)]:
            image = next(cuda_code.images_of(loop, signature, capability))
            assert loop.__name__ in image.entry
            assert (image.code[:4] == b"\x7fELF") == (capability[0] < 10)
            if capability[0] >= 10:
                assert b".target sm_80" in image.code and image.code.endswith(b"\0")


def test_loops_for_the_gpus_here_need_one(few, monkeypatch, tmp_path):
    from oneemb.kernels import cuda_driver

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_driver, "capabilities", set)
    said = CliRunner().invoke(oneemb, ["warmup", "--cuda"])
    assert said.exit_code == 2 and "there is no GPU here" in said.output and "--cuda-folder" in said.output
    monkeypatch.setattr(cuda_driver, "capabilities", lambda: {(9, 0)})
    assert "2 of 2 loops compiled" in CliRunner().invoke(oneemb, ["warmup", "--cuda"]).stdout
    monkeypatch.setattr(jit_cuda, "compile_ptx", None)
    for loop, signature in few.values():
        assert next(cuda_code.images_of(loop, signature, (9, 0))).code[:4] == b"\x7fELF"


def test_without_a_compiler_warmup_says_what_to_install(few, monkeypatch, tmp_path):
    monkeypatch.setattr(jit_cuda, "COMPILES", False)
    said = CliRunner().invoke(oneemb, ["warmup", "--cuda-folder", str(tmp_path)])
    assert said.exit_code == 2 and "pip install 'oneemb[cuda]'" in said.output


def test_a_linker_that_is_older_than_the_compiler_is_named(monkeypatch):
    from cuda.bindings import nvjitlink

    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "13.4.21" if name == "nvidia-nvvm" else version(name)
    )
    monkeypatch.setattr(nvjitlink, "version", lambda: (13, 0))
    with pytest.raises(
        ImportError, match=r"nvidia-nvvm 13.4.21 .* nvidia-nvjitlink 13.0 cannot .*'nvidia-nvvm==13.0.\*'"
    ):
        jit_cuda.tools.__wrapped__()
    monkeypatch.setattr(nvjitlink, "version", lambda: (13, 4))
    assert "nvidia-nvvm 13.4.21" in jit_cuda.tools.__wrapped__()
