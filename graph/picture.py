"""Pictures of a graph: the model, from ids to the loss, and the lookups after each pass.

Colors are readable on light and on dark pages: boxes have a color and dark text, and all else is gray on no background.
Equal graphs give equal bytes of SVG.
"""

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx  # type: ignore[import-untyped]
from torch import fx

from oneemb.graph.model_trace import Box
from oneemb.graph.ops.op import op_of, reads_rows
from oneemb.graph.shown import printable
from oneemb.graph.text import node_label
from oneemb.kernels.extras import need
from oneemb.storage.fs import AnyPath, file_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_READS, _PREPARES, _EDGE, _TORCH = "#f9d9b4", "#cfe3f7", "#eeeeee", "#d9ead3"
_BOX_WIDTH, _BOX_HEIGHT, _LETTERS = 4.6, 0.62, 62
_GRAY, _INK = "#7f7f7f", "#1f1f1f"
_COLORS = {
    "input": _EDGE, "table": _READS, "pooling": "#fcefdc", "op": _EDGE, "module": _TORCH, "loss": "#f4c7c3",
    "result": "#f4c7c3",
}  # fmt: skip
_PART_COLORS = {"lookup": "#f9d9b4", "dense": "#d9ead3", "update": "#cfe3f7", "wait": "#d8d8d8"}
_WIDE, _HIGH, _ACROSS, _DOWN = 2.3, 0.72, 2.6, 1.1
"""Inches: width and height of a box of a model, and distances of boxes."""


class Picture:
    """A picture of a graph, which notebooks show. `boxes`: the boxes of a model, each after those that it reads."""

    def __init__(self, figure: "Figure", boxes: Sequence[Box] = ()):
        self._figure, self.boxes = figure, boxes

    def save(self, path: AnyPath) -> None:
        """Write the picture to a file, whose suffix chooses the format.

        Raises:
            TypeError, ValueError: `path` is no path, or its suffix names no format.
            FileNotFoundError: the folder of `path` does not exist.
        """
        path = os.fsdecode(file_path(path, "the picture to write"))
        suffix = os.path.splitext(path)[1]
        others = sorted({f".{kind}" for kind in self._figure.canvas.get_supported_filetypes()} - set(_SUFFIXES))
        if suffix.lower() not in (*_SUFFIXES, *others):
            raise ValueError(
                f"path must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} (matplotlib also writes"
                f" {', '.join(others)}), got {path!r}"
            )
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise FileNotFoundError(
                f"the folder of path must exist, got {path!r}; make {os.path.dirname(path)!r} first"
            )
        self._write(path, suffix[1:].lower())

    @property
    def svg(self) -> str:
        """Text of the picture as SVG."""
        found = io.StringIO()
        self._write(found, "svg")
        text = found.getvalue()
        return text[text.index("<svg") :]

    def _repr_svg_(self) -> str:
        return self.svg

    def _write(self, file: Any, kind: str) -> None:
        import matplotlib

        dates = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
        # Text stays text. Without a fixed salt, names within SVG files would be random.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oneemb"}):
            opaque = kind in ("jpg", "jpeg")  # These formats have no transparent background.
            self._figure.savefig(file, format=kind, transparent=not opaque, metadata=dates.get(kind))


_SUFFIXES = (".svg", ".png", ".pdf")


def _new_axes(width: float, height: float, across: tuple[float, float], down: tuple[float, float]) -> "Axes":
    """Axes that fill a new figure of so many inches. Their limits are fixed, so shapes are added by `add_artist`:
    `add_patch` would compute limits, which takes longer than all else."""
    need("matplotlib", "draw", "draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(*across)
    axes.set_ylim(*down)
    axes.axis("off")
    return axes


def _escaped(text: str) -> str:
    """Text for matplotlib, in which a dollar would start a formula. SVG has no control characters."""
    return printable(text).replace("$", r"\$")


# ---- the model -------------------------------------------------------------------------------------------------------


def model_picture(boxes: Sequence[Box], tables: Mapping[str, str], parts: Mapping[str, int]) -> Picture:
    """Picture of a model: its inputs at the top, its loss at the bottom, and below it the shares of the steps' time.

    Args:
        boxes: the boxes, each after the boxes that it reads.
        tables: {name of an embedding: text of its number of rows and their size}.
        parts: {part of the steps: nanoseconds}.

    Raises:
        ImportError: matplotlib is not installed.
    """
    place = _places(boxes)
    across = [x for x, _ in place.values()]
    left, right = min(across) - _WIDE / 2 - 0.2, max(across) + _WIDE / 2 + 0.2
    if right - left < 6.4:  # room for the names of the parts
        left, right = (left + right) / 2 - 3.2, (left + right) / 2 + 3.2
    bottom = min(y for _, y in place.values()) - _HIGH / 2 - 1.1
    axes = _new_axes(right - left, _HIGH / 2 + 0.2 - bottom, (left, right), (bottom, _HIGH / 2 + 0.2))
    for (above, below), points in _lines(boxes, place).items():
        _draw_line(axes, points, place[above], place[below])
    for i, box in enumerate(boxes):
        _draw_box(axes, box, place[i], tables.get(box.label, "") if box.kind == "table" else "")
    _draw_parts(axes, parts, left + 0.2, right - 0.2, bottom + 0.55)
    return Picture(axes.figure, boxes)  # type: ignore[arg-type]  # a Figure: see `_new_axes`


Place = dict[Any, tuple[float, float]]
"""{position of a box, or (above, below, layer) where a line passes a layer: x and y of its center}."""


def _places(boxes: Sequence[Box]) -> Place:
    """Centers of boxes, and of the points where lines pass between boxes of a layer."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(boxes)))
    graph.add_edges_from((used, i) for i, box in enumerate(boxes) for used in box.inputs)
    layer = {i: n for n, layer in enumerate(networkx.topological_generations(graph)) for i in layer}
    for i in reversed(range(len(boxes))):  # A box is right above the first box that reads it.
        if not boxes[i].inputs and list(graph.successors(i)):
            layer[i] = min(layer[user] for user in graph.successors(i)) - 1
    for used, i in list(graph.edges):
        passed = [used, *((used, i, n) for n in range(layer[used] + 1, layer[i])), i]
        if len(passed) > 2:
            graph.remove_edge(used, i)
            networkx.add_path(graph, passed)
            layer |= {point: point[2] for point in passed[1:-1]}
    rows: list[list[Any]] = [[] for _ in range(max(layer.values()) + 1)]
    for node in graph.nodes:
        rows[layer[node]].append(node)
    for _ in range(4):  # Nodes stand in the order of the means of their neighbors, first above, then below.
        for neighbors, order in ((graph.predecessors, rows[1:]), (graph.successors, rows[-2::-1])):
            at = {node: n - (len(row) - 1) / 2 for row in rows for n, node in enumerate(row)}
            for row in order:
                means = {}
                for node in row:
                    near = [at[one] for one in neighbors(node)]
                    means[node] = sum(near) / len(near) if near else at[node]
                row.sort(key=means.__getitem__)
                at.update({node: n - (len(row) - 1) / 2 for n, node in enumerate(row)})
    return {
        node: ((n - (len(row) - 1) / 2) * _ACROSS, -number * _DOWN)
        for number, row in enumerate(rows)
        for n, node in enumerate(row)
    }


def _lines(boxes: Sequence[Box], place: Place) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """{(box that gives, box that reads): points between them that the line passes}."""
    passed: dict[tuple[int, int], list[tuple[float, float]]] = {
        (used, i): [] for i, box in enumerate(boxes) for used in box.inputs
    }
    for node, point in place.items():
        if isinstance(node, tuple):
            passed[node[:2]].append(point)
    return {line: sorted(points, key=lambda point: -point[1]) for line, points in passed.items()}


def _draw_line(
    axes: "Axes", points: Sequence[tuple[float, float]], above: tuple[float, float], below: tuple[float, float]
) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    way = [(above[0], above[1] - _HIGH / 2 - 0.04)]
    for x, y in points:
        way += [(x, y + _HIGH / 2), (x, y - _HIGH / 2)]
    way.append((below[0], below[1] + _HIGH / 2 + 0.04))
    vertices, codes = [way[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in zip(way, way[1:], strict=False):
        half = (y0 - y1) / 2
        vertices += [(x0, y0 - half), (x1, y1 + half), (x1, y1)]
        codes += [Path.CURVE4] * 3
    curve = FancyArrowPatch(path=Path(vertices, codes), arrowstyle="-|>", mutation_scale=9, linewidth=1.1, color=_GRAY)
    axes.add_artist(curve)


def _draw_box(axes: "Axes", box: Box, center: tuple[float, float], more: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    (x, y), is_input = center, box.kind == "input"
    axes.add_artist(
        FancyBboxPatch(
            (x - _WIDE / 2 + 0.06, y - _HIGH / 2 + 0.06), _WIDE - 0.12, _HIGH - 0.12, facecolor=_COLORS[box.kind],
            boxstyle=f"round,pad=0.06,rounding_size={0.3 if is_input else 0.1}", edgecolor=_GRAY, linewidth=0.8,
        )
    )  # fmt: skip
    label = f"{box.count} x {box.label}" if box.count > 1 else box.label
    if box.kind == "loss":
        label = f"loss: {box.label}"
    below = [line for line in (more, "scalar" if box.shape == "[]" else box.shape) if line]
    most = 1 if len(below) > 1 else 2
    label = "\n".join(textwrap.wrap(label.replace("_", " "), 26, max_lines=most, placeholder="...")) or label[:24]
    lines = [*label.split("\n"), *below]
    step = min(0.2, (_HIGH - 0.1) / len(lines))
    for n, line in enumerate(lines):
        is_label = n < len(lines) - len(below)
        axes.text(
            x, y + ((len(lines) - 1) / 2 - n) * step, _escaped(line), ha="center", va="center", color=_INK,
            fontsize=9 if is_label else 8, fontweight="bold" if is_label and not is_input else "normal",
        )  # fmt: skip


def _draw_parts(axes: "Axes", parts: Mapping[str, int], left: float, right: float, top: float) -> None:
    """Draw a bar with the share of each part of the steps' time."""
    from matplotlib.patches import Rectangle

    whole = sum(parts.values())
    if not whole:
        return
    begin, seconds = left, whole / 1e9
    for (part, ns), x in zip(
        parts.items(), (left + i * (right - left) / len(parts) for i in range(len(parts))), strict=True
    ):
        width = (right - left) * ns / whole
        axes.add_artist(
            Rectangle((begin, top - 0.14), width, 0.2, facecolor=_PART_COLORS[part], edgecolor=_GRAY, lw=0.5)
        )
        axes.add_artist(Rectangle((x, top - 0.43), 0.14, 0.14, facecolor=_PART_COLORS[part], edgecolor=_GRAY, lw=0.5))
        axes.text(x + 0.22, top - 0.36, f"{part} {ns / whole:.0%}", color=_GRAY, fontsize=9, va="center")
        begin += width
    axes.text(left, top + 0.19, f"share of {seconds:,.2f} s in steps", color=_GRAY, fontsize=8, va="center")


# ---- passes ----------------------------------------------------------------------------------------------------------


def passes_picture(history: Sequence[tuple[str, str, fx.Graph]]) -> Picture:
    """Picture of (name, stage, graph) of each pass. An op is a box, in the order in which ops run; a line runs from the
    op that gives a value to the op that reads it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = [[node for node in graph.nodes if node.op != "get_attr"] for *_, graph in history]
    height = max(len(nodes) for nodes in shown) + 2
    width = len(history) * (_BOX_WIDTH + 1.4)
    axes = _new_axes(width * 0.85, height * 0.42, (-0.8, width - 0.6), (-height, 1))
    for column, ((name, *_), nodes) in enumerate(zip(history, shown, strict=True)):
        left, ops = column * (_BOX_WIDTH + 1.4), sum(node.op not in ("placeholder", "output") for node in nodes)
        axes.text(left, 0.1, f"{name}: {ops} op{'s' * (ops != 1)}", fontsize=9, fontweight="bold", color=_GRAY)
        _draw_graph(axes, nodes, left)
    return Picture(axes.figure)  # type: ignore[arg-type]  # a Figure: see `_new_axes`


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
            facecolor=_color(node), edgecolor=_GRAY, linewidth=0.6,
        )  # fmt: skip
        axes.add_artist(box)
        axes.text(
            left + 0.08, row[node], _escaped(label), fontsize=7, va="center", family="monospace", color=_INK,
        )  # fmt: skip
        for used in node.all_input_nodes:
            if used in row:
                curve = FancyArrowPatch(
                    (left, row[used]), (left, row[node]), arrowstyle="-|>", mutation_scale=5, linewidth=0.5,
                    color=_GRAY, connectionstyle=f"arc3,rad={min(0.6, 1.2 / abs(row[used] - row[node]))}",
                )  # fmt: skip
                axes.add_artist(curve)


def _color(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return _EDGE
    if reads_rows(node):
        return _READS
    return _PREPARES if op_of(node) is not None else _TORCH
