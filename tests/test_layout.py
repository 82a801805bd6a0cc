"""The rules of the source tree that no linter knows."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["kernels", "storage", "graph", "oneemb"]  # each may import those before it


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
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
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
