"""The script under torchrun: killed, and resumed by other numbers of processes, it ends as one process does alone."""

import re
import subprocess
import sys

import kuairand_dlrm
import pytest

SMALL = ["--generate", "3000", "--batch-size", "64", "--epochs", "3", "--cache-mb", "1"]
STEPS = 40  # of an epoch, about
SCRIPT = kuairand_dlrm.REPOSITORY / "examples/kuairand_dlrm_distributed.py"

KILLED = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import kuairand_dlrm_distributed as script

batch, calls = script.ClickLog.batch, 0

def batch_or_death(*args):
    global calls
    calls += 1
    if calls == {call} and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(*args)

script.ClickLog.batch = batch_or_death
script.main()
"""


def torchrun(processes, script, folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(script), *SMALL, "--workdir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def figures(text):
    found = re.findall(r"epoch (\d)/\d  loss (\S+)  AUC (\S+)  logloss (\S+) .* ([\d,]+) rows", text)
    return {int(epoch): [float(one.replace(",", "")) for one in rest] for epoch, *rest in found}


@pytest.mark.parametrize("resumed_on", [{3: "3"}, pytest.param({3: "2", 1: "3"}, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_other_numbers_of_processes_as_if_one_had_run_alone(tmp_path, capsys, resumed_on):
    alone = kuairand_dlrm.main([*SMALL, "--workdir", str(tmp_path / "alone"), "--store", "device"])
    rows = figures(capsys.readouterr().out)[3][-1]
    folder, killed_script = tmp_path / "ranks", tmp_path / "killed.py"
    killed_script.write_text(KILLED.format(examples=str(SCRIPT.parent), call=STEPS + 20))

    killed = torchrun(2, killed_script, folder)
    assert killed.returncode != 0
    printed = figures(killed.stdout)
    assert list(printed) == [1], killed.stdout + killed.stderr
    for processes, epochs in resumed_on.items():
        resumed = torchrun(processes, SCRIPT, folder, "--resume", "--epochs", epochs)
        assert resumed.returncode == 0, resumed.stderr
        assert f"resumed after epoch {max(printed)} on {processes} processes" in resumed.stdout
        printed |= figures(resumed.stdout)
    for epoch, expected in enumerate(alone, 1):
        loss, auc, logloss, _ = printed[epoch]
        assert loss == pytest.approx(expected["loss"], abs=2e-5)
        assert (auc, logloss) == pytest.approx((expected["auc"], expected["logloss"]), abs=2e-3)
    assert printed[3][-1] == rows
