"""All CUDA loops there are, found in the modules of oneemb.kernels."""

import importlib
import pkgutil

import oneemb.kernels
from oneemb.kernels.jit import CudaLoop


def all_loops():
    """Name -> loop or inner function, for every one a module of kernels defines."""
    loops = {}
    for module in pkgutil.iter_modules(oneemb.kernels.__path__):
        if module.name == "jit_cuda":
            continue
        found = vars(importlib.import_module(f"oneemb.kernels.{module.name}"))
        for value in found.values():
            if isinstance(value, CudaLoop) and value.function.__module__ == f"oneemb.kernels.{module.name}":
                loops[f"{module.name}.{value.function.__name__}"] = value
    return loops
