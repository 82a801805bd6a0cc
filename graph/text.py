"""A graph for people to read: as text with one line for each op, and as a picture.

inputs: ids
keep = keep(ids)
getitem = keep[:, :2]
unique_keys = unique_keys(getitem, None, 2, int64, None)
reserve = reserve(embedding.store, unique_keys)
return (Planned('embedding', Lookup(getitem), reserved=reserve),)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from oneemb.graph.ops.op import op_of, reads_rows
from oneemb.kernels.extras import need

_INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "matmul": "@"}


def graph_text(graph: fx.Graph) -> str:
    """Text of a graph: its inputs, its ops and its result."""
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    lines = [f"inputs: {', '.join(inputs) or 'none'}"]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        label = node_label(node)
        lines.append(label if node.op == "output" or not node.users else f"{node.name} = {label}")
    return "\n".join(lines)


def node_label(node: fx.Node) -> str:
    """Text of a node's operation, without the node's name."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    args = [_argument(arg) for arg in node.args]
    args += [f"{name}={_argument(arg)}" for name, arg in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    if node.op == "call_module":
        return f"{node.target}({', '.join(args)})"
    name = getattr(node.target, "__name__", str(node.target))
    if name == "getitem":
        index = node.args[1]
        parts = index if isinstance(index, tuple) and index else (index,)
        return f"{args[0]}[{', '.join(map(_index, parts))}{',' if parts is index and len(parts) == 1 else ''}]"
    if name == "getattr":
        return f"{args[0]}.{node.args[1]}"
    if name in _INFIX and len(args) == 2:
        return f"{args[0]} {_INFIX[name]} {args[1]}"
    return f"{name}({', '.join(args)})"


def _index(value: object) -> str:
    """Python source of the index of one dimension, as written inside `x[...]`: `3`, `1:5` or `...`."""
    if isinstance(value, slice):
        parts = ["" if part is None else _argument(part) for part in (value.start, value.stop, value.step)]
        return ":".join(parts if parts[2] else parts[:2])
    return "..." if value is Ellipsis else _argument(value)


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if (by_name := getattr(value, "_asdict", None)) is not None:  # of a NamedTuple
        defaults = getattr(value, "_field_defaults", {})
        fields = {name: field for name, field in by_name().items() if name not in defaults or field != defaults[name]}
        shown = [f"{name}=" * (name in defaults) + _argument(field) for name, field in fields.items()]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, list | tuple):
        inside = ", ".join(_argument(element) for element in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(element)}" for key, element in value.items()) + "}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, type) or callable(value):
        return getattr(value, "__name__", str(value))
    return repr(value)


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_READS, _PREPARES, _EDGE, _TORCH = "#f9d9b4", "#cfe3f7", "#eeeeee", "#d9ead3"
_BOX_WIDTH, _BOX_HEIGHT, _LETTERS = 4.6, 0.62, 62


def draw_history(history: Sequence[tuple[str, str, fx.Graph]], path: str) -> None:
    """Write a picture of (name, stage, graph) of each pass to a file, whose suffix chooses the format. An op is a box,
    in the order in which ops run; a line runs from the op that gives a value to the op that reads it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    need("matplotlib", "draw", "draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [[node for node in graph.nodes if node.op != "get_attr"] for *_, graph in history]
    height = max(len(nodes) for nodes in shown) + 2
    figure = Figure(figsize=(len(history) * (_BOX_WIDTH + 1.4) * 0.85, height * 0.42))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.8, len(history) * (_BOX_WIDTH + 1.4) - 0.6)
    axes.set_ylim(-height, 1)
    axes.axis("off")
    for column, ((name, *_), nodes) in enumerate(zip(history, shown, strict=True)):
        left, ops = column * (_BOX_WIDTH + 1.4), sum(node.op not in ("placeholder", "output") for node in nodes)
        axes.text(left, 0.1, f"{name}: {ops} ops", fontsize=9, fontweight="bold")
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
        # A dollar would start a formula.
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
