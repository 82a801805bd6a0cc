"""Draw the figures of docs/concepts.md, in light and dark, from embeddings that this script makes and trains.

python docs/assets/draw_concepts.py              writes lookup-*.svg and snapshots-*.svg beside this file
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import oneemb

COLORS = {
    "light": {
        "line": "#57606a", "text": "#1f2328", "weak": "#57606a", "tables": ["#cfe8ff", "#ffe0c2"], "bar": "#8ab4f8",
        "new": "#d9730d", "snapshot": "#1f6feb", "low": (255, 255, 255), "high": (31, 111, 235),
    },
    "dark": {
        "line": "#8b949e", "text": "#e6edf3", "weak": "#9da7b1", "tables": ["#123a5e", "#5a3a12"], "bar": "#35598f",
        "new": "#f0883e", "snapshot": "#79b8ff", "low": (22, 27, 34), "high": (121, 184, 255),
    },
}  # fmt: skip
IDS = [[7, 12], [8, 12], [7, 5], [12, 5]]
WIDTH, STEPS = 8, 60
SAVES = {30: ("monday", None), 40: ("noon", "monday"), 50: ("night", "noon")}


def make(path, tables):
    options = oneemb.make_cached_ssd_store_options(16, path)
    return oneemb.MultiTableEmbedding(
        "figures", WIDTH, torch.float32, torch.int64, [oneemb.make_table() for _ in range(tables)], options
    )


def text(x, y, words, color, size=13, anchor="middle", weight="normal"):
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        f' fill="{color}">{words}</text>'
    )


def box(x, y, width, height, fill, line):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"/>'


def svg(width, height, title, parts):
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" role="img"><title>{title}</title>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


# ---- one lookup ------------------------------------------------------------------------------------------------------


def looked_up(folder):
    """Weights [B, T, D] of the ids above in a new embedding of two tables."""
    with make(folder, 2) as embedding:
        return embedding(torch.tensor(IDS)).detach()


def draw_lookup(rows_BTD, colors):
    cell, top, line = 34, 50, colors["line"]
    keys = list(dict.fromkeys((table, id) for sample in IDS for table, id in enumerate(sample)))
    parts = [
        text(10 + cell * 1.5, 22, f"ids [{len(IDS)}, 2]", colors["text"], weight="bold"),
        text(255, 22, f"{len(keys)} keys (table, id)", colors["text"], weight="bold"),
        text(446, 22, "rows", colors["text"], weight="bold"),
        text(690, 22, f"result [{len(IDS)}, 2, {WIDTH}]", colors["text"], weight="bold"),
        text(10 + cell / 2 + 17, 42, "table 0", colors["weak"], 10),
        text(10 + cell * 1.5 + 27, 42, "table 1", colors["weak"], 10),
    ]
    for b, sample in enumerate(IDS):
        for table, id in enumerate(sample):
            x, y = 18 + table * (cell + 12), top + b * cell
            parts.append(box(x, y, cell + 8, cell - 4, colors["tables"][table], line))
            parts.append(text(x + cell / 2 + 4, y + 20, id, colors["text"]))
    weights = {key: rows_BTD[IDS.index(next(s for s in IDS if s[key[0]] == key[1])), key[0]] for key in keys}
    for u, (table, id) in enumerate(keys):
        y = top + u * 28
        parts.append(box(215, y, 80, 23, colors["tables"][table], line))
        parts.append(text(255, y + 16, f"({table}, {id})", colors["text"], 12))
        parts.append(f'<line x1="297" y1="{y + 11.5}" x2="383" y2="{y + 11.5}" stroke="{line}"/>')
        parts += shades(386, y + 4, weights[table, id], colors, 15)
    for b in range(len(IDS)):
        for table in range(2):
            parts += shades(560 + table * 134, top + 8 + b * cell, rows_BTD[b, table], colors, 15)
    parts += [
        text(160, top + 76, "find unique", colors["weak"], 11),
        text(340, top - 8, "index", colors["weak"], 11),
        text(532, top + 76, "copy", colors["weak"], 11),
        text(10, 228, "Equal ids of one table share a row; 12 of table 0 and 12 of table 1 have two rows.",
             colors["weak"], 12, "start"),
    ]  # fmt: skip
    return svg(840, 240, "Ids of a batch, their unique keys, the rows of these, and the result", parts)


def shades(x, y, row_D, colors, size):
    """A row, each weight as a shade between -0.1 and 0.1."""
    for d, weight in enumerate(row_D.tolist()):
        share = min(1.0, max(0.0, (weight + 0.1) / 0.2))
        red, green, blue = (
            round(low + share * (high - low)) for low, high in zip(colors["low"], colors["high"], strict=True)
        )
        yield box(x + d * size, y, size, size, f"#{red:02x}{green:02x}{blue:02x}", colors["line"])


# ---- snapshots and deltas --------------------------------------------------------------------------------------------


def trained(folder):
    """Rows after each step of a job, and what `oneemb inspect` says of its snapshots."""
    generator, rows = torch.Generator().manual_seed(0), []
    with make(folder, 1) as embedding:
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for step in range(1, STEPS + 1):
            ids = (1 / torch.rand(64, 1, generator=generator)).clamp(max=1e9).long()  # a few popular, a long tail
            embedding(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(len(embedding))
            if step in SAVES:
                name, since = SAVES[step]
                embedding.save_delta(name, since=since) if since else embedding.save_snapshot(name)
    command = [sys.executable, "-m", "oneemb", "inspect", "--json", folder]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return rows, found["snapshots"]


def draw_snapshots(rows, snapshots, colors):
    left, bottom, wide, high = 60, 200, 11.5, 140 / max(rows)
    parts = [text(10, 20, "rows of the table, step by step", colors["text"], anchor="start", weight="bold")]
    for step, count in enumerate(rows, 1):
        x, new = left + (step - 1) * wide, count - (rows[step - 2] if step > 1 else 0)
        y = bottom - count * high
        parts.append(f'<rect x="{x:g}" y="{y:.1f}" width="{wide - 2:g}" height="{count * high:.1f}"'
                     f' fill="{colors["bar"]}"/>')  # fmt: skip
        if new:
            parts.append(f'<rect x="{x:g}" y="{y:.1f}" width="{wide - 2:g}" height="{new * high:.1f}"'
                         f' fill="{colors["new"]}"/>')  # fmt: skip
    for count in (0, 50, 100):
        parts.append(text(left - 8, bottom - count * high + 4, count, colors["weak"], 11, "end"))
    for step in (1, 10, 20, 30, 40, 50, 60):
        parts.append(text(left + (step - 0.5) * wide, bottom + 16, step, colors["weak"], 11))
    for one in snapshots:
        x = left + (one["step"] - 0.5) * wide
        parts.append(f'<line x1="{x:g}" y1="30" x2="{x:g}" y2="{bottom}" stroke="{colors["snapshot"]}"'
                     ' stroke-dasharray="4 3"/>')  # fmt: skip
        what = f"delta: {one['changed_rows']} changed rows" if one["since"] else f"snapshot: {one['rows']} rows"
        parts.append(
            text(x - 4, 40 if one["since"] is None else 52, one["name"], colors["snapshot"], 12, "end", "bold")
        )
        parts.append(text(x, bottom + 38 + 15 * snapshots.index(one), what, colors["weak"], 11))
    parts.append(text(left + 62 * wide, 40, "new rows", colors["new"], 12, "end"))
    return svg(780, 275, "Rows of a table over 60 steps, with a snapshot and two deltas", parts)


def draw(folder):
    with tempfile.TemporaryDirectory() as rows:
        looked = looked_up(f"{rows}/lookup")
        job = trained(f"{rows}/job")
    for theme, colors in COLORS.items():
        (folder / f"lookup-{theme}.svg").write_text(draw_lookup(looked, colors))
        (folder / f"snapshots-{theme}.svg").write_text(draw_snapshots(*job, colors))


if __name__ == "__main__":
    draw(Path(__file__).parent)
