"""The command `warmup`, which compiles loops before a job needs them."""

import time
from pathlib import Path

import click

from oneemb.cli.output import json_option, tell


@click.command("warmup")
@click.option("--optimizer", "optimizers", multiple=True, help="A class, such as Adam; may be repeated.")
@click.option("--dtype", "dtypes", multiple=True, help="Of rows: float32, float16 or bfloat16; may be repeated.")
@click.option("--cuda", is_flag=True, help="Loops for the GPUs of this machine, instead of those for the processor.")
@click.option(
    "--cuda-folder", type=click.Path(file_okay=False), help="Loops for GPUs of other machines, into this folder."
)
@json_option
def warmup_command(
    optimizers: tuple[str, ...], dtypes: tuple[str, ...], cuda: bool, cuda_folder: str | None, as_json: bool
) -> None:
    """Compile the loops that most jobs need.

    Without this command the first steps of the first job compile them. They are kept in $XDG_CACHE_HOME/oneemb, or
    ~/.cache/oneemb: run it in the image of a container, or on each machine, after an installation. Without options it
    compiles loops of the most used optimizers, and of float32.

    Loops for GPUs are compiled for all optimizers and dtypes. With --cuda-folder they are made for A100 and H100, and
    as PTX for later GPUs. A machine whose oneemb has that folder as kernels/cubins needs no numba-cuda.
    """
    if cuda or cuda_folder is not None:
        _compile_for_gpus(cuda_folder, as_json)
        return
    from oneemb.training.warm_up import DTYPES, OPTIMIZERS, compile_loops

    begun = time.perf_counter()
    loops, seconds = compile_loops(
        optimizers or OPTIMIZERS, dtypes or DTYPES, str if as_json else lambda job: click.echo(job, err=True)
    )
    whole = time.perf_counter() - begun
    tell(
        as_json,
        {"loops": loops, "compiling_s": seconds, "seconds": whole},
        f"{loops} loops compiled in {seconds:.1f} s, of {whole:.1f} s",
    )


def _compile_for_gpus(folder: str | None, as_json: bool) -> None:
    from oneemb.kernels.cuda_ahead import SHIPPED, compile_ahead
    from oneemb.kernels.cuda_code import PACKAGE_FOLDER, cache_folder
    from oneemb.kernels.cuda_driver import capabilities

    begun = time.perf_counter()
    forms = SHIPPED if folder is not None else [(capability, "cubin") for capability in sorted(capabilities())]
    if not forms:
        raise ValueError("there is no GPU here to compile loops for; name a folder for other machines: --cuda-folder")
    where = Path(folder) if folder is not None else None
    loops, compiled = compile_ahead(where, forms, report=str if as_json else lambda line: click.echo(line, err=True))
    whole = time.perf_counter() - begun
    place = f"; on the other machine, copy it to {PACKAGE_FOLDER}" if folder is not None else ""
    tell(
        as_json,
        {"loops": loops, "compiled": compiled, "folder": str(where or cache_folder()), "seconds": whole},
        f"{compiled} of {loops} loops compiled into {where or cache_folder()} in {whole:.1f} s{place}",
    )
