"""The script on the processes of a job: killed, and resumed by other numbers of them, it ends as one does alone."""

import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import kuairand_dlrm
import pytest

from tests.support.forks import run_code

SMALL = ["--generate", "3000", "--batch-size", "64", "--epochs", "3", "--cache-mb", "1"]
STEPS = 40  # of an epoch, about
SCRIPT = kuairand_dlrm.REPOSITORY / "examples/kuairand_dlrm_distributed.py"

RUN = "import kuairand_dlrm_distributed as script\nscript.main()"
KILLED = """
import os, signal
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


def run(processes, code, folder, *arguments):
    """Result of the first process, and the exit codes of all; each has the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    job |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}

    def run_rank(rank):
        own = job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        given = [*SMALL, "--workdir", folder, *arguments]
        return run_code(code, *given, cwd=SCRIPT.parent, environment=own, seconds=300)

    with ThreadPoolExecutor(processes) as ranks:
        ended = list(ranks.map(run_rank, range(processes)))
    return ended[0], [its.returncode for its in ended]


def figures(text):
    found = re.findall(r"epoch (\d)/\d  loss (\S+)  AUC (\S+)  logloss (\S+) .* ([\d,]+) rows", text)
    return {int(epoch): [float(one.replace(",", "")) for one in rest] for epoch, *rest in found}


@pytest.mark.parametrize("resumed_on", [{3: "3"}, pytest.param({3: "2", 1: "3"}, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_other_numbers_of_processes_as_if_one_had_run_alone(tmp_path, capsys, resumed_on):
    alone = kuairand_dlrm.main([*SMALL, "--workdir", str(tmp_path / "alone"), "--store", "device"])
    rows = figures(capsys.readouterr().out)[3][-1]
    folder = tmp_path / "ranks"

    killed, codes = run(2, KILLED.format(call=STEPS + 20), folder)
    assert codes == [1, -signal.SIGKILL]
    printed = figures(killed.stdout)
    assert list(printed) == [1], killed.stdout + killed.stderr
    for processes, epochs in resumed_on.items():
        resumed, codes = run(processes, RUN, folder, "--resume", "--epochs", epochs)
        assert codes == [0] * processes, resumed.stderr
        assert f"resumed after epoch {max(printed)} on {processes} processes" in resumed.stdout
        printed |= figures(resumed.stdout)
    for epoch, expected in enumerate(alone, 1):
        loss, auc, logloss, _ = printed[epoch]
        assert loss == pytest.approx(expected["loss"], abs=2e-5)
        assert (auc, logloss) == pytest.approx((expected["auc"], expected["logloss"]), abs=2e-3)
    assert printed[3][-1] == rows
