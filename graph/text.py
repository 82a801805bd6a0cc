"""A graph for people to read: as text with one line for each op.

inputs: ids
keep = keep(ids)
getitem = keep[:, :2]
unique_keys = unique_keys(getitem, None, 2, int64, None)
reserve = reserve(embedding.store, unique_keys)
return (Planned('embedding', Lookup(getitem), reserved=reserve),)
"""

import torch
from torch import fx

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
