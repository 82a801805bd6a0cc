"""The program of the tutorial on several ranks, and the same model on workers of Ray Train."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "several_ranks.py"
PAGE = SCRIPT.parents[1] / "docs" / "tutorials" / "several-ranks.md"
LINE = re.compile(r"epoch (\d+)  loss (\S+)  ranks (\d+)")


def losses_of(text):
    """{epoch: loss} of what the program or the page shows."""
    return {int(epoch): float(loss) for epoch, loss, _ in LINE.findall(text)}


SHOWN = losses_of(PAGE.read_text())


def run(folder, epochs, ranks):
    starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *starter, str(SCRIPT), "--folder", str(folder), "--epochs", str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    assert {int(found) for *_, found in LINE.findall(done.stdout)} == {ranks}
    return losses_of(done.stdout)


def test_two_ranks_print_what_the_page_shows(tmp_path):
    assert run(tmp_path, 1, 2)[0] == pytest.approx(SHOWN[0], abs=2e-6)


@pytest.mark.slow
def test_one_process_and_ranks_that_become_more_print_what_the_page_shows(tmp_path):
    alone = run(tmp_path / "one", 4, 1)
    ranks = run(tmp_path / "two", 2, 2) | run(tmp_path / "two", 4, 3)
    assert alone == pytest.approx(SHOWN, abs=2e-6) and ranks == pytest.approx(SHOWN, abs=2e-6)


def run_ray(folder, workers, epochs, kill_after=-1):
    script = SCRIPT.with_name("ray_train.py")
    command = [sys.executable, str(script), "--folder", str(folder), "--workers", str(workers)]
    command += ["--epochs", str(epochs), "--kill-after", str(kill_after)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.slow
def test_workers_of_ray_train_that_die_and_change_in_number_train_as_one_process(tmp_path):
    pytest.importorskip("ray", reason="needs oneemb[ray]")
    alone = run(tmp_path / "one", 5, 1)
    folder = tmp_path / "ray"
    run_ray(folder, 4, 2, kill_after=0)
    run_ray(folder, 3, 3)
    run_ray(folder, 5, 5)
    found = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    assert (folder / "killed").exists()
    assert {(one["epoch"], one["ranks"]) for one in found} == {(0, 4), (1, 4), (2, 3), (3, 5), (4, 5)}
    assert {one["epoch"]: one["loss"] for one in found} == pytest.approx(alone, abs=2e-6)
