"""The command `warmup`, which compiles loops before a job needs them."""

import time

import click

from oneemb.cli.output import json_option, tell


@click.command("warmup")
@click.option("--optimizer", "optimizers", multiple=True, help="A class, such as Adam; may be repeated.")
@click.option("--dtype", "dtypes", multiple=True, help="Of rows: float32, float16 or bfloat16; may be repeated.")
@json_option
def warmup_command(optimizers: tuple[str, ...], dtypes: tuple[str, ...], as_json: bool) -> None:
    """Compile the loops that most jobs need.

    Without this command the first steps of the first job compile them. They are kept in $XDG_CACHE_HOME/oneemb, or
    ~/.cache/oneemb: run it in the image of a container, or on each machine, after an installation. Without options it
    compiles loops of the most used optimizers, and of float32.
    """
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
