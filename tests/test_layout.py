"""The rules of the source tree that no linter knows."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["kernels", "storage", "graph", "oneemb"]  # each may import those before it


def setup():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path_or_text):
    text = path_or_text if isinstance(path_or_text, str) else path_or_text.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "oneemb" else [node.module]
            )


def package_of(module):
    parts = module.split(".")
    if parts[0] != "oneemb":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "oneemb"


def against_direction(package, modules):
    rank = PACKAGES.index(package)
    return [m for m in modules if package_of(m) is not None and PACKAGES.index(package_of(m)) > rank]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    wrong = {str(path): bad for path in sources(package) if (bad := against_direction(package, imported(path)))}
    assert not wrong, f"{package} may import only {PACKAGES[: PACKAGES.index(package) + 1]}: {wrong}"


def test_the_import_rule_finds_an_import_against_the_direction():
    text = "from oneemb.graph import ops\nimport oneemb.storage.fs\nfrom oneemb import nn\n"
    assert against_direction("storage", imported(text)) == ["oneemb.graph", "oneemb.nn"]


def test_nobody_imports_a_top_level_folder_by_its_bare_name():
    wrong = [
        (str(path), m) for path in sources(*PACKAGES, "tests", "examples", "benchmarks")
        for m in imported(path) if m.split(".")[0] in ("graph", "storage", "kernels")
    ]  # fmt: skip
    assert not wrong


def test_only_the_jit_modules_import_numba():
    users = {path.name for path in sources(*PACKAGES) if any(m.split(".")[0] == "numba" for m in imported(path))}
    assert users == {"jit.py", "jit_cuda.py", "jit_lanes.py"}


def test_every_package_is_listed_for_installation():
    listed = set(setup()["options"]["packages"].split())
    found = set()
    for package in PACKAGES:
        for init in (ROOT / package).rglob("__init__.py"):
            name = ".".join(init.parent.relative_to(ROOT).parts)
            found.add(name if package == "oneemb" else f"oneemb.{name}")
    assert listed == found


def test_importing_oneemb_loads_neither_torch_nor_numba():
    code = "import sys, oneemb; print([m for m in ('torch', 'numba', 'torchrec', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_loaded():
    import oneemb

    assert sorted(oneemb.__all__) == sorted(name for name in oneemb.__all__ if getattr(oneemb, name) is not None)


# ---- the Pythons it runs on ------------------------------------------------------------------------------------------


def minors(text):
    """What stands behind the dot of every 3.x."""
    return [int(minor) for minor in re.findall(r"3\.(\d+)", text)]


def test_every_tool_knows_the_same_oldest_python():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    classified = minors(setup()["metadata"]["classifiers"])
    oldest = min(classified)
    assert classified == list(range(oldest, max(classified) + 1))
    assert setup()["options"]["python_requires"] == f">=3.{oldest}, <3.{max(classified) + 1}"
    assert tools["ruff"]["target-version"] == f"py3{oldest}"
    assert tools["mypy"]["python_version"] == f"3.{oldest}"
    assert setup()["vermin"]["targets"] == f"3.{oldest}-"
    for name in ["Makefile", "README.md"]:
        written = re.findall(r"Python 3\.\d+ to 3\.\d+", (ROOT / name).read_text())
        assert written == [f"Python 3.{oldest} to 3.{max(classified)}"], name


@pytest.mark.parametrize(
    ("text", "newer"),
    [
        ("import itertools\n\nitertools.pairwise('ab')\n", False),
        ("import torch\n\ntorch.ones(1).long()\n", False),
        ("import itertools\n\nitertools.batched('ab', 1)\n", True),
        ("from typing import override\n", True),
        ("from pathlib import Path\n\nPath('a').walk()\n", True),
        ("import warnings\n\n\n@warnings.deprecated('')\ndef f(): ...\n", True),
    ],
)
def test_names_newer_than_the_oldest_python_are_found(text, newer, tmp_path):
    (tmp_path / "planted.py").write_text(text)
    check = "import vermin; vermin.main()"
    command = [sys.executable, "-c", check, "--config-file", ROOT / "setup.cfg", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "planted.py" in done.stdout) == (int(newer), newer), done.stdout


# ---- what make does --------------------------------------------------------------------------------------------------


def dry_make(*arguments):
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # the make that runs this test
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=outside).stdout


TARGETS = ["demo", "test", "test-slow", "check", "bench", "gpu-test", "gpu-bench", "gpu-sanitize"]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_in_an_environment_that_is_there_makes_and_installs_nothing(target, tmp_path):
    here = dry_make(target, "RUN=some-python", f"VENV={tmp_path}")
    assert not re.search(rf"\b(pip|venv)\b|{tmp_path}", here), here
    assert "some-python " in here
    fresh = dry_make(target, f"VENV={tmp_path}")
    assert "-m venv" in fresh and "pip install" in fresh, "without RUN it does both"


def test_gpu_tests_say_once_that_there_is_no_gpu():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_copies.py"]
    unseen = os.environ | {"ONEEMB_TEST_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=unseen)
    assert done.returncode == 1 and done.stdout.count("there is no GPU to test on: ") == 1, done.stdout


def test_every_target_is_tried_in_an_environment_that_is_there():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    assert sorted(TARGETS) == sorted(set(phony) - {"clean"})


@pytest.mark.parametrize("constraints", ["demo.txt", "test.txt", "bench.txt"])
def test_everything_is_pinned_once_and_exactly(constraints):
    lines = (ROOT / "constraints" / constraints).read_text().splitlines()
    pins = [line for line in lines if not line.startswith(("#", "-c "))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len({pin.split("==")[0].lower().replace("_", "-") for pin in pins}) == len(pins)
