"""Writes resources.json: what each CUDA loop takes of sm_80 and sm_90, by the ptxas installed."""

import json
from pathlib import Path

from tests.cuda_compile.ptx import TARGETS, measure, ptxas
from tests.cuda_compile.signatures import CASES

if __name__ == "__main__":
    assert ptxas() is not None, "needs ptxas; run: pip install nvidia-cuda-nvcc"
    table = {
        f"sm_{target[0]}{target[1]}": {name: measure(*case, target)[1] for name, case in CASES.items()}
        for target in TARGETS
    }
    lines = [
        f' "{target}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in rows.items()) + "\n }"
        for target, rows in table.items()
    ]
    (Path(__file__).parent / "resources.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
