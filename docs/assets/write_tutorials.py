"""Write the pages of docs/tutorials/ from scripts in examples/: their text, their code, and what the code prints.

    python docs/assets/write_tutorials.py             # run all scripts, and write their pages
    python docs/assets/write_tutorials.py deepfm      # one page

A script has cells, as notebooks in percent format: `# %% [markdown]` begins text in comments, `# %%` code.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"two-tower": "two_tower_faiss.py", "deepfm": "deepfm_flights.py", "sasrec": "sasrec_flights.py"}
"""{page: its script}."""


def page_of(name: str) -> Path:
    return ROOT / "docs" / "tutorials" / f"{name}.md"


def cells(name: str) -> Iterator[tuple[bool, str]]:
    """(whether it is code, its lines) of each cell of a page's script; text without its comment signs."""
    script = (ROOT / "examples" / SCRIPTS[name]).read_text()
    for cell in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        is_code = "[markdown]" not in head
        yield is_code, (body if is_code else re.sub(r"^# ?", "", body, flags=re.MULTILINE)).strip()


def written(name: str, outputs: Iterator[str]) -> str:
    """Page of a script, whose code cells print these outputs."""
    parts = []
    for is_code, text in cells(name):
        parts.append(f"```python\n{text}\n```" if is_code else text)
        if is_code and (printed := next(outputs).strip()):
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def outputs_of(name: str) -> Iterator[str]:
    """Run a script in the working directory; what each code cell prints."""
    names: dict[str, object] = {"__name__": "tutorial"}
    for number, text in enumerate(text for is_code, text in cells(name) if is_code):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, f"{SCRIPTS[name]}, cell {number}", "exec"), names)
        yield printed.getvalue()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    for chosen in sys.argv[1:] or SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            page = written(chosen, outputs_of(chosen))
            os.chdir(ROOT)
        page_of(chosen).write_text(page)
        print(page_of(chosen).relative_to(ROOT))
