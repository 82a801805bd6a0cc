"""Replacement of `torch.cuda` in rewritten scripts: one device, number 0, which is the CPU.

Functions have the names and arguments of `torch.cuda`. Functions that only matter on a GPU do nothing: `set_device`,
`device`, `synchronize`, `empty_cache`. `manual_seed` and `manual_seed_all` seed the CPU's generator. No function uses a
GPU; torch is imported when a function needs it.
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

# Name of the GPU that scripts are told of; None = no GPU.
_pretended: str | None = None


def pretend(name: str | None) -> None:
    """Tell scripts of a GPU with this name from now on; None = no GPU."""
    global _pretended
    _pretended = name


def place(value: Any) -> Any:
    """`value`, a script's argument for a device; "cpu" if it is a GPU's number."""
    return "cpu" if isinstance(value, int) and not isinstance(value, bool) else value


def is_available() -> bool:
    """False, unless the runner was given the name of a GPU."""
    return _pretended is not None


def device_count() -> int:
    """1, for the CPU."""
    return 1


def current_device() -> int:
    """0, always."""
    return 0


def set_device(device: Any) -> None:
    """Do nothing, for any number: each rank of a machine sets its own."""


def device(device: Any) -> nullcontext[None]:
    """Context that changes nothing."""
    return nullcontext()


def synchronize(device: Any = None) -> None:
    """Do nothing: an operation on a CPU has ended when it returns."""


def empty_cache() -> None:
    """Do nothing: there is no GPU memory."""


def manual_seed(seed: int) -> None:
    """Seed torch's CPU generator."""
    import torch

    torch.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Same as `manual_seed`."""
    manual_seed(seed)


def get_device_name(device: Any = None) -> str:
    """Name of the GPU that scripts are to see, if the runner was given one; else the name of the CPU. `device` has no
    effect."""
    return _pretended if _pretended is not None else _cpu_name()


@dataclass(frozen=True)
class _Properties:
    """Name of the device, and bytes of its memory, which is the machine's."""

    name: str
    total_memory: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"get_device_properties(...).{name} is not there, since this machine has no GPU; oneemb.compat has only"
            " name and total_memory"
        )


def get_device_properties(device: Any = None) -> _Properties:
    """Name of the device, and the machine's memory in bytes."""
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
        f"torch.cuda.{name} is not there, since this machine has no GPU; oneemb.compat, which replaces torch.cuda, has"
        f" only {', '.join(__all__)}; guard the use with torch.cuda.is_available()"
    )
