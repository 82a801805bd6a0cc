"""Tables of docs/, made of the results in benchmarks/results.

    python benchmarks/readme_tables.py              writes each table anew between its markers
    python benchmarks/readme_tables.py --check      exit code 1 if a table is not what its results say

A table stands between two markers, and everything between them is written by this program:

    <!-- table: small_step -->
    ...
    <!-- end of table -->

It is made of benchmarks/results/small_step.json, which that benchmark writes where it is told
`--out benchmarks/results/small_step.json`; `make bench-tables` runs all of them. Below a table stand the machine
and the versions that gave its figures.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TABLES", "TableError", "filled"]

ROOT = Path(__file__).resolve().parent.parent

Case = Mapping[str, Any]

_MARKED = re.compile(r"(<!-- table: ([^>]*?) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_BEGIN, _END = "<!-- table: ", "<!-- end of table -->"


class TableError(ValueError):
    """A table cannot be made: its markers, its name or its results are wrong."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: docs/*.md")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    status = 0
    for file in options.files or sorted((ROOT / "docs").glob("*.md")):
        text = file.read_text()
        try:
            new = filled(text, options.results)
        except TableError as error:
            print(f"{file}: {error}", file=sys.stderr)
            status = 1
            continue
        if new != text and options.check:
            print(f"{file}: a table differs from its results; run python benchmarks/readme_tables.py", file=sys.stderr)
            status = 1
        elif new != text:
            file.write_text(new)
            print(f"{file}: written")
    return status


def filled(text: str, results: Path) -> str:
    """The text with each table made anew.

    Raises:
        TableError: a marker has no other half, no table has its name, or its results are not there or lack a figure.
    """
    if not text.count(_BEGIN) == text.count(_END) == len(_MARKED.findall(text)):
        raise TableError(f"each marker `{_BEGIN}NAME -->`, alone on its line, needs one `{_END}` below it")
    return _MARKED.sub(lambda match: match[1] + _made(match[2], results) + match[4], text)


def _made(name: str, results: Path) -> str:
    if name not in TABLES:
        raise TableError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
    file = results / f"{name}.json"
    if not file.exists():
        raise TableError(f"table {name!r} is made of {file}, which is not there; its benchmark writes it with --out")
    found = json.loads(file.read_text())
    head, rows_of = TABLES[name]
    try:
        rows = rows_of(found["cases"])
        about = found["about"]
        gpu = f"{about['gpu']}, CUDA {about['cuda']}, " if "cuda" in about else ""
        machine = f"{gpu}{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['torch']}."
    except KeyError as error:
        raise TableError(f"{file} has no {error}: it is of another version of its benchmark; run that anew") from None
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(["", *lines, "", machine, ""]) + "\n"


# ---- one function a table: from the cases of its results to its rows -------------------------------------------------

_STEPS = {"lookup": "lookup", "row_wise_adagrad": "row-wise Adagrad", "sgd": "SGD", "adagrad": "Adagrad",
          "adam": "Adam"}  # fmt: skip
_PEERS = ("oneemb_graph", "fbgemm", "torch", "torchrec")
_PEER_HEADS = ["oneemb", "in a graph", "FBGEMM, CPU", "nn.EmbeddingBag, sparse", "TorchRec DMP, one rank"]


def _systems(case: Case) -> list[str]:
    """Milliseconds of oneemb and of each peer, with oneemb's share of the peer's time."""
    ms, ratio = case["median_ms"], case["ratio"]
    return [_ms(ms["oneemb"]), *(f"{_ms(ms[peer])} ({ratio[peer]:.2f})" if peer in ratio else "" for peer in _PEERS)]


def _embedding_step(cases: Sequence[Case]) -> list[list[str]]:
    pooled = {True: ", 1 to 20 ids pooled", False: ""}
    return [
        [_STEPS[case["case"]["optimizer"]] + pooled[case["case"]["pooled"]], *_systems(case)] for case in cases
    ]  # fmt: skip


def _batch_sizes(cases: Sequence[Case]) -> list[list[str]]:
    return [[f"{case['case']['batch']:,}", *_systems(case)] for case in cases]


def _small_step(cases: Sequence[Case]) -> list[list[str]]:
    what = {"step": "step", "read": "lookup of one sample"}
    return [
        [what[case["what"]], case["system"], _ms(case["ms"]), f"{case['ratio']:.2f}", f"{case['python_calls']:,}",
         f"{case['c_calls']:,}"] for case in cases
    ]  # fmt: skip


def _lookup_threads(cases: Sequence[Case]) -> list[list[str]]:
    return [
        [f"{case['ids']:,}", _ms(case["ms_one"]), _ms(case["ms_two"]), f"{case['two_over_one']:.2f}"] for case in cases
    ]  # fmt: skip


def _dense_share(cases: Sequence[Case]) -> list[list[str]]:
    return [[case["system"], *(_ms(case[part]) for part in ("whole", "dense", "rows")), f"{case['share']:.2f}"]
            for case in cases]  # fmt: skip


def _longest_steps(cases: Sequence[Case]) -> list[list[str]]:
    return [
        [case["store"], case["policy"], f"{case['slots']:,}", _ms(case["ms"]), f"{case['p99']:.1f}",
         f"{case['longest']:.1f}"]
        for case in cases
    ]  # fmt: skip


def _scale_out(cases: Sequence[Case]) -> list[list[str]]:
    ours = {case["case"]: case["ms"] for case in cases if case["system"] == "oneemb, called"}
    return [
        [case["case"], case["system"], _ms(case["ms"]), f"{ours[case['case']] / case['ms']:.2f}",
         f"{case['sent_bytes'] / 1e6:.1f}" if "sent_bytes" in case else ""]
        for case in cases
    ]  # fmt: skip


def _persistent_table(cases: Sequence[Case]) -> list[list[str]]:
    """A row for each case, with the figures of both sizes of blocks and of the other systems."""
    by_block = {(case["case"], case["block"]): case for case in cases}

    def figures(name: str, block: int) -> list[str]:
        case = by_block.get((name, block))
        if case is None:
            return ["", ""]
        return [f"{_digits(case['oneemb'])} {case['unit']}", f"{case['of_raw']:.2f}" if case["of_raw"] else ""]

    def peers(name: str) -> list[str]:
        found = next(case["peers"] for case in cases if case["case"] == name)
        return [_digits(found[peer]) if peer in found else "" for peer in ("rocksdb", "lmdb")]

    names = dict.fromkeys(case["case"] for case in cases)
    return [[name, *figures(name, 512), *figures(name, 4096), *peers(name)] for name in names]


def _digits(value: float) -> str:
    return _ms(value) if value < 1000 else f"{value:,.0f}"


def _loader(cases: Sequence[Case]) -> list[list[str]]:
    return [
        [case["loader"], f"{case['rows_per_processor_s']:,}", f"{case['of_step']:.1f}"]
        for case in cases
    ]  # fmt: skip


def _serving_lag(cases: Sequence[Case]) -> list[list[str]]:
    return [
        [f"{case['rows']:,}", f"{case['lag_s']:.2f}", f"{case['lag_p99_s']:.2f}", f"{case['whole_file_s']:.1f}",
         f"{case['meanwhile']:.2f}",
         *(f"{p50:.2f} ({p99:.2f})" for p50, p99 in (case["one_layer"], case["four_layers"]))]
        for case in cases
    ]  # fmt: skip


def _publish(cases: Sequence[Case]) -> list[list[str]]:
    return [
        [case["sink"], _ms(case["delta_ms"]), f"{case['rows_per_processor_s']:,}", _ms(case["all_rows_by_hand_ms"]),
         f"{case['times_less']:.1f}", f"{case['all_rows_per_processor_s']:,}",
         f"{case['lag_p50_s']:.2f} / {case['lag_p99_s']:.2f}"]
        for case in cases
    ]  # fmt: skip


def _train_step(cases: Sequence[Case]) -> list[list[str]]:
    return [
        [case["case"], _ms(case["median_ms"]["compiled + prefetch, SSD"]),
         _ms(case["median_ms"]["compiled + prefetch, memory"]), f"{case['requests_a_step']:,.0f}",
         f"{case['disk_requests_per_s']:,.0f}", f"{case['step_over_limit']:.2f}"]
        for case in cases
    ]  # fmt: skip


def _gpu(cases: Sequence[Case]) -> list[list[str]]:
    peers = "EmbeddingBag sparse, ms", "EmbeddingBag dense, ms"
    return [
        [case["store"], case["optimizer"], _ms(ms := case["oneemb, ms"]),
         *(f"{_ms(case[peer])} ({ms / case[peer]:.2f})" for peer in peers), str(case["loops"]), str(case["waits"])]
        for case in cases if case["bench"] == "gpu_step"
    ]  # fmt: skip


def _gpu_host(cases: Sequence[Case]) -> list[list[str]]:
    figures = "host_us", "torch_us", "oneemb_us", "loops_us", "launches", "waits"
    return [[case["what"], *(str(case[figure]) for figure in figures)] for case in cases]


def _ms(value: float) -> str:
    """Three digits."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


TABLES: dict[str, tuple[list[str], Callable[[Sequence[Case]], list[list[str]]]]] = {
    "embedding_step": (["ms a step", *_PEER_HEADS], _embedding_step),
    "batch_sizes": (["batch", *_PEER_HEADS], _batch_sizes),
    "small_step": (["what", "system", "ms", "of nn.Embedding", "calls of Python", "of C"], _small_step),
    "lookup_threads": (["ids", "one thread, ms", "two threads, ms", "two / one"], _lookup_threads),
    "dense_share": (["system", "whole, ms", "dense, ms", "rows, ms", "(whole - dense) / rows"], _dense_share),
    "longest_steps": (["store", "policy", "slots", "median, ms", "p99 / median", "longest / median"], _longest_steps),
    "scale_out": (["case", "system", "ms a step", "oneemb's share", "MB sent by each"], _scale_out),
    "gpu": (["store", "optimizer", "oneemb, ms", "nn.EmbeddingBag, sparse", "dense", "loops", "waits"], _gpu),
    "gpu_host": (["what", "host, µs", "torch's", "oneemb's", "loops", "launches", "waits"], _gpu_host),
    "loader": (["loader", "rows a second of processor time", "of the step's"], _loader),
    "serving_lag": (["rows", "step to served row, s", "p99", "whole file, s", "p99 of lookups meanwhile / otherwise",
                     "one layer / whole file, p50 (p99)", "four layers / whole file"], _serving_lag),
    "publish": (["sink", "delta, ms", "rows a second", "all rows by hand, ms", "by hand / delta",
                 "first version, rows a second", "lag p50 / p99, s"], _publish),
    "persistent_table": (["case", "blocks of 512 bytes", "of the disk", "blocks of 4,096 bytes", "of the disk",
                          "RocksDB", "LMDB"], _persistent_table),
    "train_step": (["case", "prefetched step, ms", "compute alone, ms", "requests a step", "the disk's a second",
                    "step / limit"], _train_step),
}  # fmt: skip
"""Head of each table, and its rows of the cases in its results."""


if __name__ == "__main__":
    sys.exit(main())
