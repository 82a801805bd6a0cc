"""TorchRec's introduction runs with oneemb's collections."""

import re
from pathlib import Path

from tests.support.forks import run_code

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_torchrec_tutorial():
    script = str(EXAMPLES / "torchrec_tutorial.py")
    ran = run_code(f"import runpy; runpy.run_path({script!r}, run_name='__main__')", seconds=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "rows before and after two ids that no table of 4096 rows has: 8192 8194" in ran.stdout
    assert "the same numbers: True" in ran.stdout
    assert "rates: 0.01 of the first sharded module, 0.02 with fused_params" in ran.stdout
    assert "no optimizer steps in the backward pass: []" in ran.stdout
    (losses,) = re.findall(r"losses: \[(.*)\]", ran.stdout)
    first, second, third = map(float, losses.split(","))
    assert first > second > third
    assert "ebc_.embedding_bags.product_table.weight (4098, 68) torch.uint8" in ran.stdout
    assert float(re.findall(r"largest error of a sum: (.*)", ran.stdout)[0]) < 0.001
    assert "sharded, the same bits: True" in ran.stdout
    assert "also of ids that no table of 4096 rows has: True" in ran.stdout
    assert "scripted, saved and loaded, the same bits: True" in ran.stdout
