"""Replacement of `torch.cuda` in rewritten scripts: one device, number 0, which is the CPU.

Functions have the names and arguments of `torch.cuda`. Functions that only a GPU needs do nothing: `set_device`,
`device`, `synchronize`, `empty_cache`. `manual_seed` and `manual_seed_all` seed the generator of the CPU. No GPU is
asked, and torch is imported when a function needs it.
"""

import os
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "current_device", "device", "device_count", "empty_cache", "get_device_name", "get_device_properties",
    "is_available", "manual_seed", "manual_seed_all", "set_device", "synchronize",
]  # fmt: skip

# Name of the GPU that is reported to scripts; None = no GPU.
_pretended: str | None = None


def pretend(name: str | None) -> None:
    """Report a GPU of this name to scripts from now on; None = no GPU."""
    global _pretended
    _pretended = name


def place(value: Any) -> Any:
    """A script's argument for a device, with "cpu" in place of a GPU's number."""
    return "cpu" if isinstance(value, int) and not isinstance(value, bool) else value


def is_available() -> bool:
    """False, unless the runner was given a GPU's name."""
    return _pretended is not None


def device_count() -> int:
    """1: the CPU."""
    return 1


def current_device() -> int:
    """0, whatever was set."""
    return 0


def set_device(device: Any) -> None:
    """Do nothing. Every number is taken: each rank of a machine sets its own."""


def device(device: Any) -> nullcontext[None]:
    """A context that changes nothing."""
    return nullcontext()


def synchronize(device: Any = None) -> None:
    """Do nothing: a CPU's operations are over when they return."""


def empty_cache() -> None:
    """Do nothing: there is no memory of a GPU."""


def manual_seed(seed: int) -> None:
    """Seed torch's generator of the CPU, on which the tensors of the script are."""
    import torch

    torch.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Do as `manual_seed`."""
    manual_seed(seed)


def get_device_name(device: Any = None) -> str:
    """Name of the CPU, or the name that the runner was given."""
    return _pretended if _pretended is not None else _cpu_name()


@dataclass(frozen=True)
class _Properties:
    """Name of a device, and the bytes of its memory, here the machine's."""

    name: str
    total_memory: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"get_device_properties(...).{name} is not there: this machine has no GPU, and oneemb.compat knows name and"
            " total_memory alone"
        )


def get_device_properties(device: Any = None) -> _Properties:
    """Name of the device, and the machine's memory."""
    return _Properties(get_device_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"torch.cuda.{name} is not there: this machine has no GPU, and oneemb.compat, which stands for torch.cuda here,"
        f" has {', '.join(__all__)}; guard the use with torch.cuda.is_available()"
    )
