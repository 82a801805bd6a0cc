"""Figures of docs/benchmarks.md, drawn from the results in benchmarks/results, in light and dark.

python benchmarks/draw_results.py              writes docs/assets/bench_*.svg
python benchmarks/draw_results.py --check      exit code 1 if a figure is not what its results say
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Group = tuple[str, Mapping[str, float]]
"""A group of dots: its title, and milliseconds of each system."""

THEMES = {
    "light": {"text": "#1f2328", "weak": "#57606a", "line": "#d0d7de",
              "dots": ["#d9730d", "#f2b27a", "#1f6feb", "#6e7781", "#8957e5"]},
    "dark": {"text": "#e6edf3", "weak": "#9da7b1", "line": "#30363d",
             "dots": ["#f0883e", "#8f5a2b", "#58a6ff", "#8b949e", "#bc8cff"]},
}  # fmt: skip
LEFT, WIDTH, LINE = 200, 780, 15


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "assets")
    options = parser.parse_args(arguments)
    status = 0
    for name, picture in figures(options.results):
        file = options.figures / name
        if file.exists() and file.read_text() == picture:
            continue
        if options.check:
            print(f"{file} differs from its results; run python benchmarks/draw_results.py", file=sys.stderr)
            status = 1
        else:
            file.write_text(picture)
            print(f"{file}: written")
    return status


def figures(results: Path) -> Iterator[tuple[str, str]]:
    """(name, SVG) of each figure in each theme."""
    for name, (groups_of, title) in FIGURES.items():
        found = json.loads((results / f"{name}.json").read_text())
        about = found["about"]
        machine = f"{about['gpu']}, " if "gpu" in about else ""
        machine += f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}"
        for theme, colors in THEMES.items():
            yield f"bench_{name}-{theme}.svg", drawn(title, machine, groups_of(found["cases"]), colors)


# ---- from the cases of results to groups of dots ---------------------------------------------------------------------

_STEPS = {"lookup": "lookup", "row_wise_adagrad": "row-wise Adagrad", "sgd": "SGD", "adagrad": "Adagrad",
          "adam": "Adam"}  # fmt: skip
_SYSTEMS = {
    "oneemb": "oneemb", "oneemb_graph": "oneemb, in a graph", "fbgemm": "FBGEMM, CPU",
    "torch": "nn.EmbeddingBag, sparse", "torchrec": "TorchRec DMP, one rank",
}  # fmt: skip


def _embedding_step(cases: Sequence[Mapping[str, Any]]) -> list[Group]:
    pooled = {True: ", bags", False: ""}
    return [(_STEPS[case["case"]["optimizer"]] + pooled[case["case"]["pooled"]], _medians(case)) for case in cases]


def _batch_sizes(cases: Sequence[Mapping[str, Any]]) -> list[Group]:
    return [(f"batch of {case['case']['batch']:,}", _medians(case)) for case in cases]


def _medians(case: Mapping[str, Any]) -> dict[str, float]:
    return {name: case["median_ms"][system] for system, name in _SYSTEMS.items() if system in case["median_ms"]}


def _gpu(cases: Sequence[Mapping[str, Any]]) -> list[Group]:
    systems = {"oneemb": "oneemb, ms", "nn.EmbeddingBag, sparse": "EmbeddingBag sparse, ms",
               "nn.EmbeddingBag, dense": "EmbeddingBag dense, ms"}  # fmt: skip
    return [
        (f"{case['optimizer']}, {case['store']}", {name: case[key] for name, key in systems.items()})
        for case in cases
        if case["bench"] == "gpu_step"
    ]


FIGURES = {
    "embedding_step": (_embedding_step, "A step of 26 tables on a CPU, milliseconds, logarithmic"),
    "batch_sizes": (_batch_sizes, "A step of 26 tables with row-wise Adagrad, milliseconds, logarithmic"),
    "gpu": (_gpu, "A step of 10 tables on a GPU, milliseconds, logarithmic"),
}
"""Groups of dots of each figure, by the name of its results, and its title."""


COLOR_OF = {"oneemb": 0, "oneemb, in a graph": 1, "FBGEMM, CPU": 2, "nn.EmbeddingBag, sparse": 3,
            "nn.EmbeddingBag, dense": 4, "TorchRec DMP, one rank": 4}  # fmt: skip
"""Systems, with the color of each."""


# ---- drawing ---------------------------------------------------------------------------------------------------------


def drawn(title: str, machine: str, groups: Sequence[Group], colors: Mapping[str, Any]) -> str:
    """SVG of dots on a logarithmic axis, in groups, each dot with its milliseconds."""
    systems = [one for one in COLOR_OF if any(one in of for _, of in groups)]
    fills = {system: colors["dots"][COLOR_OF[system]] for system in systems}
    values = [value for _, of in groups for value in of.values()]
    low, high = 10 ** math.floor(math.log10(min(values))), max(values)
    scale = (WIDTH - LEFT - 60) / math.log10(high / low)
    top = 62
    height = top + sum(len(of) * LINE + 12 for _, of in groups) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' font-family="sans-serif" role="img"><title>{title}</title>',
        _text(10, 20, title, colors["text"], 14, "start", "bold"),
    ]
    x = 10.0
    for system in systems:
        parts.append(f'<circle cx="{x + 6:g}" cy="40" r="5" fill="{fills[system]}"/>')
        parts.append(_text(x + 17, 44, system, colors["text"], 12, "start"))
        x += 41 + sum(8.5 if letter.isupper() else 3.5 if letter in " .,il" else 6.5 for letter in system)
    tick = float(low)
    while tick <= high:
        x = LEFT + math.log10(tick / low) * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{height - 36}" stroke="{colors["line"]}"/>')
        parts.append(_text(x, height - 22, f"{tick:g}", colors["weak"], 11))
        tick *= 10
    y = float(top)
    for name, of in groups:
        parts.append(_text(LEFT - 10, y + len(of) * LINE / 2 + 4, name, colors["text"], 12, "end"))
        for system, value in of.items():
            width = math.log10(value / low) * scale
            parts.append(f'<circle cx="{LEFT + width:.1f}" cy="{y + LINE / 2:g}" r="5" fill="{fills[system]}"/>')
            label = f"{value:.1f}" if value >= 10 else f"{value:.2f}"
            parts.append(_text(LEFT + width + 9, y + LINE - 3, label, colors["weak"], 10, "start"))
            y += LINE
        y += 12
    parts.append(_text(10, height - 4, machine, colors["weak"], 11, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, color: str, size: int, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        f' fill="{color}">{words}</text>'
    )


if __name__ == "__main__":
    sys.exit(main())
