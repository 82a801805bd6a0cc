"""The command `plan`, which computes the cost of a training job before it runs."""

import json
from typing import Any

import click

from oneemb.cli.output import FOLDER, json_option, size_text, table_lines, tell


@click.command("plan")
@click.option("--rows", type=int, required=True, help="Rows of all ranks together.")
@click.option("--dim", "embedding_dim", type=int, required=True, help="Weights of a row.")
@click.option("--ids", type=int, default=1, show_default=True, help="Ids that a sample looks up, in all tables.")
@click.option("--bags", type=int, help="Bags of a sample that these ids lie in, summed; a row for each id without it.")
@click.option("--unique", type=float, help="Share of unique ids in a rank's batch; 1 if neither it nor --log is given.")
@click.option(
    "--log",
    type=click.Path(exists=True, dir_okay=False),
    help="A .npy file of ids, [samples, tables], in which unique ids are counted batch by batch.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of the weights: float32, float16 or bfloat16.")
@click.option("--comm-dtype", default="float32", show_default=True, help="In which rows and gradients travel.")
@click.option("--optimizer", default="SGD", show_default=True, help="A class, or the values of state that a row has.")
@click.option("--batch", type=int, required=True, help="Samples of a step and rank.")
@click.option("--ranks", type=int, multiple=True, default=[1], show_default=True, help="May be repeated, to compare.")
@click.option("--ranks-per-machine", type=int, help="All, if it is not given.")
@click.option("--cache-mb", type=int, help="MiB of a rank's cache over rows on an SSD; without it all are in memory.")
@click.option("--hit-rate", type=float, help="Share of unique ids that the cache holds; needed with --cache-mb.")
@click.option("--index-memory-mb", type=int, help="MiB of a rank for the index of rows on an SSD; else no limit.")
@click.option("--block", "physical_block_size", type=int, default=4096, show_default=True, help="Bytes: 512 or 4096.")
@click.option("--dense-parameters", type=int, default=0, help="Values of the dense modules.")
@click.option("--dense-ms", type=float, default=0.0, help="Their forward and backward, ms.")
@click.option(
    "--machine", "machine_path", type=click.Path(exists=True, dir_okay=False), help="A JSON file of its figures."
)
@click.option("--measure", type=FOLDER, help="Measure this machine first, and the disk of this folder.")
@click.option(
    "--set", "figures", multiple=True, metavar="NAME=FIGURE", help="A figure of the machine, as network_gb_s=25."
)
@json_option
def plan_command(
    unique: float | None, log: str | None, optimizer: str, batch: int, ranks: tuple[int, ...],
    ranks_per_machine: int | None, machine_path: str | None, measure: str | None, figures: tuple[str, ...],
    as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Compute the cost of a training job before it runs.

    Prints bytes between ranks, memory and disk reads of a rank, the time of a step and of its parts, the part that
    limits the job, and advice. With several --ranks it prints one line for each.
    """
    import numpy as np

    from oneemb.planning.plan import plan
    from oneemb.planning.planned_embedding import unique_share

    if unique is not None and log is not None:
        raise ValueError("--unique and --log both say how many ids are unique; give one of them")
    if log is not None:
        ids = np.load(log, mmap_mode="r")
        unique = unique_share(ids[i : i + batch] for i in range(0, max(1, len(ids) - batch + 1), batch))
    arguments |= {
        "unique": 1.0 if unique is None else unique,
        "optimizer": int(optimizer) if optimizer.isdecimal() else optimizer,
        "machine": _machine(machine_path, measure, figures),
    }
    plans = [
        plan(batch=batch, ranks=r, ranks_per_machine=None if ranks_per_machine is None else min(ranks_per_machine, r),
             **arguments)
        for r in ranks
    ]  # fmt: skip
    result = plans[0].to_dict() if len(plans) == 1 else {"plans": [one.to_dict() for one in plans]}
    if len(plans) == 1:
        tell(as_json, result, str(plans[0]))
        return
    columns = ("ranks", "sent a step", "without dedup", "memory", "step", "latency", "transfer", "samples/s", "binds")
    tell(
        as_json,
        result,
        *table_lines(
            columns,
            [
                (
                    f"{one.ranks:,}", size_text(one.bytes_sent), size_text(one.bytes_sent_without_deduplication),
                    size_text(sum(one.memory_bytes.values())), f"{one.step_ms:.1f} ms",
                    f"{one.parts_ms.get('latency', 0):.1f} ms", f"{one.parts_ms.get('transfer', 0):.1f} ms",
                    f"{one.samples_per_s:,.0f}", one.binds,
                )
                for one in plans
            ],
            "no ranks",
        ),
    )  # fmt: skip


def _machine(path: str | None, measure: str | None, figures: tuple[str, ...]) -> Any:
    from oneemb.planning.machine import Machine, measure_machine

    given: dict[str, Any] = {}
    if path is not None:
        with open(path) as file:
            given = json.load(file)
    for figure in figures:
        name, _, value = figure.partition("=")
        try:
            given[name] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise ValueError(f"--set takes NAME=FIGURE, such as network_gb_s=25, got {figure!r}") from None
    machine = Machine.from_json(json.dumps(given))
    return machine if measure is None else measure_machine(measure, **{name: getattr(machine, name) for name in given})
