"""Draws the history of a compilation: the lookups as recorded and after each pass, side by side.

An op is a box, top to bottom in the order in which they run; a line runs from what gives a value to what reads it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from oneemb.graph.ops.op import op_of, reads_rows
from oneemb.graph.plan import AfterPass
from oneemb.graph.text import node_label
from oneemb.kernels.extras import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_READS, _PREPARES, _EDGE, _TORCH = "#f9d9b4", "#cfe3f7", "#eeeeee", "#d9ead3"
_BOX_WIDTH, _BOX_HEIGHT, _LETTERS = 4.6, 0.62, 62


def draw_history(history: Sequence[AfterPass], path: str) -> None:
    """Write a picture of graphs to a file; its ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    need("matplotlib", "draw", "draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [[node for node in after.graph.nodes if node.op != "get_attr"] for after in history]
    height = max(len(nodes) for nodes in shown) + 2
    figure = Figure(figsize=(len(history) * (_BOX_WIDTH + 1.4) * 0.85, height * 0.42))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.8, len(history) * (_BOX_WIDTH + 1.4) - 0.6)
    axes.set_ylim(-height, 1)
    axes.axis("off")
    for column, (after, nodes) in enumerate(zip(history, shown, strict=True)):
        left, ops = column * (_BOX_WIDTH + 1.4), sum(node.op not in ("placeholder", "output") for node in nodes)
        axes.text(left, 0.1, f"{after.name}: {ops} ops", fontsize=9, fontweight="bold")
        _draw_graph(axes, nodes, left)
    figure.savefig(path)


def _draw_graph(axes: "Axes", nodes: Sequence[fx.Node], left: float) -> None:
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    row = {node: -1.0 - i for i, node in enumerate(nodes)}
    for node in nodes:
        label = f"input {node.target}" if node.op == "placeholder" else node_label(node)
        if node.users and node.op != "placeholder":
            label = f"{node.name} = {label}"
        label = label if len(label) <= _LETTERS else label[: _LETTERS - 3] + "..."
        box = FancyBboxPatch(
            (left, row[node] - _BOX_HEIGHT / 2), _BOX_WIDTH, _BOX_HEIGHT, boxstyle="round,pad=0.03",
            facecolor=_color(node), edgecolor="#888888", linewidth=0.6,
        )  # fmt: skip
        axes.add_patch(box)
        # A dollar would begin a formula.
        axes.text(left + 0.08, row[node], label.replace("$", r"\$"), fontsize=7, va="center", family="monospace")
        for used in node.all_input_nodes:
            if used in row:
                curve = FancyArrowPatch(
                    (left, row[used]), (left, row[node]), arrowstyle="-|>", mutation_scale=5, linewidth=0.5,
                    color="#777777", connectionstyle=f"arc3,rad={min(0.6, 1.2 / abs(row[used] - row[node]))}",
                )  # fmt: skip
                axes.add_patch(curve)


def _color(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return _EDGE
    if reads_rows(node):
        return _READS
    return _PREPARES if op_of(node) is not None else _TORCH
