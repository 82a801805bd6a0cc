"""The cache of compiled kernels: never a loop whose rule has changed, and no need of a writable install."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oneemb.kernels import jit

KERNELS = Path(jit.__file__).parent
OWNERS = (
    "import numpy as np; from oneemb.kernels.owner import owner_of;"
    "print(owner_of(np.zeros(64, np.int32), np.arange(64), 7).tolist())"
)


@pytest.fixture
def package(tmp_path):
    """A package of its own that holds the kernels alone, to be edited."""
    root = tmp_path / "oneemb"
    shutil.copytree(KERNELS, root / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "__init__.py").touch()
    return tmp_path


def owners(package, cache):
    environment = {**os.environ, "PYTHONPATH": str(package), "XDG_CACHE_HOME": str(cache)}
    code = f"import sys; sys.path.insert(0, {str(package)!r}); {OWNERS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def compiled_files(cache):
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}


def test_a_rule_changed_in_another_file_is_compiled_into_the_loop(package, tmp_path):
    before = owners(package, tmp_path / "cache")
    rule = package / "oneemb" / "kernels" / "hash_index.py"
    rule.write_text(rule.read_text().replace("0x94D049BB133111EB", "0x94D049BB133111ED"))
    assert owners(package, tmp_path / "cache") != before


def test_the_cache_is_used_again_by_another_install_of_the_same_sources(package, tmp_path):
    before = owners(package, tmp_path / "cache")
    files = compiled_files(tmp_path / "cache")
    assert files
    shutil.move(package / "oneemb", tmp_path / "elsewhere" / "oneemb")
    assert owners(tmp_path / "elsewhere", tmp_path / "cache") == before
    assert compiled_files(tmp_path / "cache") == files


def test_compiling_is_said_once_and_found_loops_are_not(package, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(package), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = (
        f"import sys; sys.path.insert(0, {str(package)!r}); {OWNERS}\n"
        "from oneemb.kernels.unique_keys import unique_keys; unique_keys(np.zeros(3, np.int32), np.arange(3))\n"
        "from oneemb.kernels.compile_notice import compile_notice as notice; print(notice.loops); notice.report()"
    )
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )  # fmt: skip
        said.append((int(done.stdout.splitlines()[-1]), done.stderr.splitlines()))
    loops, (first, last) = said[0]
    assert loops > 1 and "`oneemb warmup` compiles them ahead" in first
    assert last.startswith(f"oneemb has compiled loops ({loops}) in ")
    assert said[1] == (0, [])


def test_a_change_of_a_file_that_a_loop_does_not_depend_on_compiles_nothing(package, tmp_path):
    owners(package, tmp_path / "cache")
    files = compiled_files(tmp_path / "cache")
    (package / "oneemb" / "kernels" / "update_adam.py").write_text("# Another rule.\n")
    owners(package, tmp_path / "cache")
    assert compiled_files(tmp_path / "cache") == files


def modules_imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "oneemb.kernels":
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").removeprefix("oneemb.kernels.")


def test_every_import_of_a_kernel_is_part_of_its_digest():
    files = {path.stem: path for path in KERNELS.glob("*.py")}
    for path in files.values():
        imported = {files[name] for name in modules_imported(ast.parse(path.read_text())) if name in files}
        assert jit.imported_kernels(path.read_text()) == imported, path


def test_imports_of_a_kernel_are_seen_in_each_way_to_write_them():
    text = "from oneemb.kernels import (\n    jit,\n    jit_code,\n)\n    from oneemb.kernels import owner, sketch\n"
    text += "import oneemb.kernels.arrays\nfrom oneemb.kernels.threads import (\n    Threads,\n)\n"
    names = {path.stem for path in jit.imported_kernels(text)}
    assert names == {"jit", "jit_code", "owner", "sketch", "arrays", "threads"}


def test_kernels_compile_where_nothing_can_be_written(package, tmp_path):
    assert owners(package, tmp_path / "cache") == owners(package, "/proc/nowhere")


def test_loops_are_compiled_while_another_thread_exports_a_program(tmp_path):
    """torch has objects of its own in the place of `min`, `max` and `math.pow` then."""
    code = """
import builtins, functools, math, numpy as np
from oneemb.kernels.owner import owner_of
from oneemb.kernels.reduce_grads import row_of

both = lambda *numbers, real: real(*numbers)
before = builtins.min, builtins.max, math.pow
builtins.min, builtins.max = functools.partial(both, real=min), functools.partial(both, real=max)
math.pow = lambda x, y: x**y
print(row_of(np.zeros((3, 8), np.float32), np.arange(3), np.arange(3), 1, 2, 0, 8))
builtins.min, builtins.max, math.pow = before
print(len(owner_of(np.zeros(64, np.int32), np.arange(64), 7)))
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "1\n64\n", done.stderr[-2000:]


def test_of_processes_that_need_a_loop_at_once_one_compiles_it(package, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(package)!r}); import numpy as np; from oneemb.kernels import owner;"
        "sys.stdin.read(); owner.owner_of(np.zeros(64, np.int32), np.arange(64), 7);"
        "print(sum(sum(its.stats.cache_misses.values()) for its in vars(owner).values() if hasattr(its, 'overloads')))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in processes:
        process.stdin.close()
    compiled = sorted(int(process.stdout.read()) for process in processes)
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert compiled[:2] == [0, 0] and compiled[2] > 0, compiled
    assert len(compiled_files(tmp_path / "cache")) >= compiled[2]
