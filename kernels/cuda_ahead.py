"""Compiles all CUDA loops before they are launched, here or on another machine."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from oneemb.kernels import cuda_code, cuda_driver
from oneemb.kernels.cuda_signatures import cases
from oneemb.kernels.extras import missing

SHIPPED = [((8, 0), "cubin"), ((9, 0), "cubin"), (cuda_code.PTX_CAPABILITY, "ptx")]
"""Forms for machines that have no compiler: code of two kinds of GPU, and PTX for all later ones."""


class _Job(NamedTuple):
    name: str
    folder: Path | None
    capability: tuple[int, int]
    form: str


def compile_ahead(
    folder: Path | None,
    forms: Sequence[tuple[tuple[int, int], str]],
    *,
    report: Callable[[str], object],
) -> tuple[int, int]:
    """Compile every loop that is not in the folder yet, on all cores; for this machine, also the function that launches
    loops.

    Args:
        folder: where files go; None = the cache of the user.
        forms: compute capability, and "cubin" or "ptx".
        report: given a line now and then.

    Returns:
        Number of loops and forms, and of those that were compiled now.

    Raises:
        ImportError: numba-cuda is not installed.
    """
    if not cuda_code.compiles():
        raise missing("compiling loops for GPUs", "numba-cuda", "cuda")
    if folder is None:
        cuda_driver.compile_launches()
    names = list(cases(every=True))
    jobs = [_Job(name, folder, *form) for name in names for form in forms]
    compiled = 0
    processes = min(len(os.sched_getaffinity(0)), max(1, len(jobs)))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done, new in enumerate(pool.map(_compile, jobs, chunksize=4), 1):
            compiled += new
            if done % 50 == 0 or done == len(jobs):
                report(f"{done} of {len(jobs)}")
    return len(jobs), compiled


def _compile(job: _Job) -> bool:
    loop, signature = cases(every=True)[job.name]
    return cuda_code.kept(job.folder, loop, signature, job.capability, job.form)[1]
