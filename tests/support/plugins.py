"""Plugins of parameter servers, compiled by the system's compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MEMORY_IO = ROOT / "examples" / "io_plugin" / "memory_io.c"
HOSTILE_IO = ROOT / "tests" / "remote" / "plugins" / "hostile_io.c"

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="plugins need a C compiler, cc")


def compile_plugin(source, target, *options):
    """The shared library `target`, of this source."""
    command = ["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([*command, "-pthread", *options, "-o", str(target), str(source)], check=True)
    return target
