"""Draw overview-light.svg and overview-dark.svg, the picture of README.md and of the site, from the data below.

python docs/assets/draw_overview.py              writes both files beside this one
"""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 910, 290

# name: (left, top, width, height, title, lines below it)
BOXES = {
    "ids": (10, 50, 130, 80, "ids", ["any int64,", "hash_ids(strings)"]),
    "index": (180, 50, 130, 80, "index", ["(table, id) -> row,", "grows as ids come"]),
    "cache": (350, 50, 150, 80, "hot cache", ["rows of this step,", "on a CPU or GPU"]),
    "model": (350, 200, 150, 80, "your model", ["gradients of rows,", "torch's optimizers"]),
    "store": (565, 8, 270, 178, "", []),
    "memory": (575, 18, 250, 42, "memory", ["all rows of the host"]),
    "ssd": (575, 74, 250, 42, "SSD", ["a persistent table"]),
    "server": (575, 130, 250, 42, "server", ["Redis, or a plugin"]),
    "snapshots": (635, 222, 130, 60, "snapshots", ["whole or absent"]),
    "serving": (800, 222, 100, 60, "servers", ["int8, mapped"]),
}
# from, side, to, side, arrow at both ends, pixels by which it begins lower than in the middle
ARROWS = [
    ("ids", "right", "index", "left", False, 0),
    ("index", "right", "cache", "left", False, 0),
    ("cache", "bottom", "model", "top", True, 0),
    ("cache", "right", "memory", "left", True, -24),
    ("cache", "right", "ssd", "left", True, 0),
    ("cache", "right", "server", "left", True, 24),
    ("store", "bottom", "snapshots", "top", False, 0),
    ("snapshots", "right", "serving", "left", False, 0),
]
COLORS = {
    "light": {"line": "#57606a", "fill": "#f6f8fa", "hot": "#ffe8cc", "text": "#1f2328", "weak": "#57606a"},
    "dark": {"line": "#8b949e", "fill": "#161b22", "hot": "#5a3a12", "text": "#e6edf3", "weak": "#9da7b1"},
}


def picture(colors: dict[str, str]) -> str:
    """The picture as SVG, without a background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" role="img">'
        "<title>The index finds the rows of ids; a hot cache holds those of a step, above memory, SSD or server;"
        " snapshots of the store are served.</title>"
    )
    marker = (
        '<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
        f' orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{colors["line"]}"/></marker>'
    )
    arrows = [_arrow(*arrow, colors["line"]) for arrow in ARROWS]
    boxes = [_box(name, colors) for name in BOXES]
    return "\n".join([head, f"<defs>{marker}</defs>", *boxes, *arrows, "</svg>"]) + "\n"


def _box(name: str, colors: dict[str, str]) -> str:
    left, top, width, height, title, lines = BOXES[name]
    fill = colors["hot" if name == "cache" else "fill"]
    middle, first = left + width / 2, top + height / 2 - 8 * len(lines) + 4
    texts = [f'<text x="{middle}" y="{first}" font-size="15" font-weight="bold" fill="{colors["text"]}">{title}</text>']
    for number, line in enumerate(lines, 1):
        y = first + 17 * number
        texts.append(f'<text x="{middle}" y="{y}" font-size="12" fill="{colors["weak"]}">{escape(line)}</text>')
    rectangle = f'x="{left}" y="{top}" width="{width}" height="{height}" rx="6"'
    return (
        f'<g text-anchor="middle"><rect {rectangle} fill="{fill}" stroke="{colors["line"]}"/>' + "".join(texts) + "</g>"
    )


def _arrow(begin: str, begin_side: str, end: str, end_side: str, both: bool, lower: int, color: str) -> str:
    x1, y1 = _edge(begin, begin_side)
    y1 += lower
    x2, y2 = _edge(end, end_side)
    start = ' marker-start="url(#end)"' if both else ""
    line = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {line} stroke="{color}" stroke-width="1.5" marker-end="url(#end)"{start}/>'


def _edge(name: str, side: str) -> tuple[float, float]:
    """Middle of one side of a box."""
    left, top, width, height, *_ = BOXES[name]
    return {
        "left": (left, top + height / 2),
        "right": (left + width, top + height / 2),
        "top": (left + width / 2, top),
        "bottom": (left + width / 2, top + height),
    }[side]


if __name__ == "__main__":
    for theme, colors in COLORS.items():
        (Path(__file__).parent / f"overview-{theme}.svg").write_text(picture(colors))
