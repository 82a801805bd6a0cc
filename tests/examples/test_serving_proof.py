"""A job that trains and saves, two servers of its model and a follower of its rows, as processes: each is killed at any
moment and begun again. Every answer is wholly that of the version it announces, versions go forward alone, and nobody
is disturbed by another's end.

The oracle is the job: it notes what each version must answer before the version is there (tests/support/served_job.py).
A version that a resumed job saves again must be noted alike.
"""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import kuairand_dlrm as script
import pytest
import torch

from tests.support.served_job import EXAMPLES, Client, body_of, first_examples
from tests.support.serving_follower import digest

SUPPORT = EXAMPLES.parent / "tests" / "support"
GROWTH_KB_MAX = 64 * 1024  # of a process beside the map, from when it has served some versions on


class Part:
    """A process that is begun again when it was killed."""

    def __init__(self, name, command, out):
        self.name, self.command, self.out = name, command, out
        self.kills = 0
        self.has_answered = lambda: False  # whether this life has, as far as is known
        self.private_kb = []  # of each life, what there was at each look
        self.begin()

    def begin(self):
        self.private_kb.append([])
        with open(self.out, "ab") as file:
            self.written_before = file.tell()
            self.process = subprocess.Popen(self.command, stdout=file, stderr=subprocess.STDOUT)

    def kill(self):
        self.kills += 1  # first: a client that is cut off then knows why
        self.process.kill()
        self.process.wait()

    def look(self):
        """Note what it has for itself, written and not shared, once it answers."""
        if not self.has_answered():
            return
        with open(f"/proc/{self.process.pid}/smaps_rollup") as file:
            lines = [line.split() for line in file if line.startswith(("Private_Dirty:", "Swap:"))]
        self.private_kb[-1].append(sum(int(line[1]) for line in lines))

    def growth_kb(self):
        """The most that a life has come to have beside what it had at its first answers."""
        return max((max(life) - life[0] for life in self.private_kb if life), default=0)


class Asker(threading.Thread):
    """A client of one server that asks without end, and keeps each answer that none was equal to."""

    def __init__(self, part, port, bodies):
        super().__init__(daemon=True)
        self.part, self.port, self.bodies = part, port, bodies
        part.has_answered = lambda: self.answered is part.process
        self.ends = threading.Event()
        self.answers, self.wrong, self.count, self.sequence = {}, [], 0, 0
        self.last = self.answered = None

    def run(self):
        while not self.ends.is_set():
            # An answer may be read when who gave it is dead and another begins, which has given none.
            kills, process = self.part.kills, self.part.process
            client = Client(self.port)
            answered = False
            try:
                while not self.ends.is_set():
                    self.ask(client)
                    answered = True
                    self.answered = process
                    self.ends.wait(0.004)  # Others are at work on this machine.
            except (OSError, http.client.HTTPException) as error:  # The latter in the middle of an answer.
                if answered and self.part.kills == kills:
                    self.wrong.append(f"cut off though nobody was killed: {error!r}")
                self.ends.wait(0.02)  # It is being begun again.
            finally:
                client.close()

    def ask(self, client):
        probe = self.count % len(self.bodies)
        status, answer = client.score(self.bodies[probe])
        if status != 200:
            self.wrong.append((status, answer))
            return
        self.count += 1
        version = answer["version"]
        if version["sequence"] < self.sequence:
            self.wrong.append(f"back from {self.sequence} to {version}")
        self.sequence, self.last = version["sequence"], version["name"]
        self.answers[(version["name"], version["identity"], probe, tuple(answer["scores"]))] = self.count


class Proof:
    """The processes, and what has been noted of them."""

    def __init__(self, folder, arguments):
        self.folder, self.notes = folder, folder / "notes"
        job = ["--workdir", folder / "job", "--store", "ssd", "--cache-mb", "2", *arguments]
        its = script.parse([str(one) for one in job])
        log = script.load(its)
        probes = first_examples(log, its, 3, 8)
        self.last = f"epoch-{its.epochs}"
        table_L = torch.repeat_interleave(torch.arange(len(log.fields)), torch.tensor([f.width for f in log.fields]))
        torch.save(([id_BL for _, id_BL in probes], table_L), folder / "probes")
        python = sys.executable
        self.job = Part("job", [python, SUPPORT / "served_job.py", self.notes, *job, "--resume"], folder / "job.out")
        self.wait_until(self.noted)
        self.askers, bodies = [], [body_of(probe) for probe in probes]
        command = [python, EXAMPLES / "serve.py", "--workdir", folder / "job", "--follow", "0.02"]
        ports = {}
        for dtype in ("float32", "int8"):
            out = folder / f"{dtype}.out"
            server = Part(dtype, [*command, "--dtype", dtype, "--port", "0"], out)
            ports[dtype] = self.wait_until(lambda out=out: out.exists() and self.port_in(out))
            server.command[-1] = str(ports[dtype])
            self.askers.append(Asker(server, ports[dtype], bodies))
        follower = [python, SUPPORT / "serving_follower.py", folder / "job" / script.TABLES, folder / "probes"]
        self.wait_until(lambda: (folder / "job/checkpoint.pt").exists())
        self.follower = Part("follower", follower, folder / "follower.out")
        self.follower.has_answered = lambda: self.follower.out.stat().st_size > self.follower.written_before
        self.readers = [*(asker.part for asker in self.askers), self.follower]
        for asker in self.askers:
            asker.start()
        self.wait_until(lambda: all(asker.count for asker in self.askers) and self.followed())
        (folder / "notes.go").touch()
        self.made_by_killed = 0

    @staticmethod
    def port_in(out):
        first = out.read_text().partition("\n")
        return int(first[0].rsplit(":", 1)[1]) if first[1] else None

    def wait_until(self, said, seconds=120):
        end = time.monotonic() + seconds
        while not (found := said()):
            assert time.monotonic() < end and self.job.process.poll() in (None, 0), self.job.out.read_text()[-3000:]
            time.sleep(0.005)
        return found

    def noted(self):
        """How many versions have been noted."""
        return self.notes.read_bytes().count(b"\n") if self.notes.exists() else 0

    def followed(self):
        """What the follower has written, whole lines alone."""
        text = self.follower.out.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def look(self):
        """Nobody has ended of itself; and what memory they have."""
        for part in self.readers:
            assert part.process.poll() is None, (part.name, part.out.read_text()[-3000:])
            part.look()
        for asker in self.askers:
            assert not asker.wrong, (asker.part.name, asker.wrong[:3], asker.part.out.read_text()[-3000:])

    def kill(self, part):
        if part is self.job and part.process.poll() is not None:
            return  # It is done.
        part.kill()
        part.begin()

    def kill_who_makes_a_file(self):
        """Kill whichever process is in the middle of making a served file, if one is caught at it."""
        made, end = self.folder / "job" / script.TABLES / "serving", time.monotonic() + 20
        while time.monotonic() < end and self.job.process.poll() is None:
            for name in [name for name in os.listdir(made) if name.endswith(".tmp")]:
                for part in self.readers:
                    if self.has_open(part.process.pid, str(made / name)):
                        part.kill()
                        self.made_by_killed += (made / name).exists()
                        part.begin()
                        return

    @staticmethod
    def has_open(pid, path):
        try:
            return any(os.readlink(f"/proc/{pid}/fd/{fd}") == path for fd in os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return False

    def end(self):
        """Wait until all serve the last version, and end them."""
        self.wait_until(lambda: self.job.process.poll() is not None, 600)
        self.wait_until(lambda: all(asker.last == self.last for asker in self.askers))
        self.wait_until(lambda: any(self.last == its[1][0] for its in self.followed() if "error" not in its))
        self.look()
        for asker in self.askers:
            asker.ends.set()
            asker.join()
            asker.part.process.send_signal(signal.SIGTERM)
            assert asker.part.process.wait(30) == 0
        self.follower.process.kill()

    def close(self):
        for part in (self.job, *getattr(self, "readers", [])):
            part.process.kill()
            part.process.wait()

    # ---- what they have answered ------------------------------------------------------------------------------------

    def check(self):
        """Compare all answers with the notes. Returns figures."""
        want = {}
        for line in self.notes.read_text().splitlines():
            name, answers = json.loads(line)
            assert want.setdefault(name, answers) == answers, f"{name} was saved again with other bits"
        figures = {"versions": len(want)}
        for asker in self.askers:
            identities = {}
            for name, identity, probe, scores in asker.answers:
                expected = want[name][probe][asker.part.name]
                if asker.part.name == "float32":
                    assert list(scores) == expected, (name, probe)
                else:
                    assert list(scores) == pytest.approx(expected, abs=1e-6), (name, probe)
                identities[identity] = name
            assert not asker.wrong, asker.wrong
            figures[asker.part.name] = (asker.count, len(identities))
        figures["follower"] = self.check_follower(want)
        figures["kills"] = {part.name: part.kills for part in (self.job, *self.readers)}
        figures["killed while making a file"] = self.made_by_killed
        figures["private MiB, growth"] = {
            part.name: (
                max(map(max, filter(None, part.private_kb)), default=0) // 1024,
                round(part.growth_kb() / 1024, 1),
            )
            for part in self.readers
        }
        assert all(part.growth_kb() < GROWTH_KB_MAX for part in self.readers), figures
        return figures

    def check_follower(self, want):
        """Each lookup reads one of the versions that were there just before, just after or between."""
        rows = {name: [digest(bytes.fromhex(its["rows"])) for its in answers] for name, answers in want.items()}
        lines, sequence, read, errors = self.followed(), 0, Counter(), 0
        names = list(want)  # in the order in which they were saved first
        for its in lines:
            if "error" in its:
                errors += 1
                continue
            before, after, probe, got = its
            assert sequence <= before[2] <= after[2]
            sequence = after[2]
            between = names[names.index(before[0]) : names.index(after[0]) + 1]
            assert got in {rows[name][probe] for name in between}, (before, after, probe)
            read[after[0]] += 1
        assert set(read) <= set(want)
        return len(lines), len(read), errors


def run(folder, arguments, kills, seed):
    """Figures of a run in which `kills(versions so far, random)` says whom to kill: "" for nobody."""
    rng, proof, begin = random.Random(seed), None, time.monotonic()
    try:
        proof = Proof(folder, arguments)
        parts = {part.name: part for part in (proof.job, *proof.readers)}
        seen = 0
        while proof.job.process.poll() is None:
            time.sleep(0.02)
            proof.look()
            for version in range(seen + 1, (seen := proof.noted()) + 1):
                whom = kills(version, rng)
                if whom == "maker":
                    proof.kill_who_makes_a_file()
                elif whom:
                    proof.kill(parts[whom])
        assert proof.job.process.returncode == 0, proof.job.out.read_text()[-3000:]
        proof.end()
        figures = {"seconds": round(time.monotonic() - begin), **proof.check()}
        print(figures)
        return figures
    finally:
        if proof is not None:
            proof.close()


SHORT = ["--generate", "2000", "--batch-size", "64", "--epochs", "2", "--save-every", "5"]
LONG = ["--generate", "120000", "--batch-size", "64", "--epochs", "7", "--save-every", "25"]


@pytest.mark.slow
def test_training_and_serving_processes_that_are_killed_disturb_no_other_and_answer_from_whole_versions(tmp_path):
    plan = {3: "job", 6: "maker"}
    figures = run(tmp_path, SHORT, lambda version, rng: plan.get(version, ""), 0)
    assert figures["kills"]["job"] == 1
    assert figures["float32"][1] > 1 and figures["int8"][1] > 1 and figures["follower"][1] > 1


@pytest.mark.slow
def test_ten_thousand_steps_of_training_and_serving_with_kills(tmp_path, seed):
    whom = ["job", "float32", "int8", "follower", "maker", "maker"]
    figures = run(
        tmp_path, LONG, lambda version, rng: "" if version % 20 else whom[version // 20 % len(whom)],
        seed,
    )  # fmt: skip
    assert figures["versions"] > 400 and figures["killed while making a file"] > 0
    assert all(count > 0 for count in figures["kills"].values())
