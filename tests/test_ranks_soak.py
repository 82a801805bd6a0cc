"""Ranks that train in every way, with everything that may happen to them, on a random plan that they share: none waits
for what will not come, all raise where one does, nothing leaks, and rows are those of a plain eager loop.

A rank that makes no progress for `SILENCE_S` writes the stacks of all its threads and ends, which fails the test.
"""

import faulthandler
import os
import pathlib
import random
import threading
import time

import numpy as np
import pytest
import torch

import oneemb
from tests.support.rank_pool import FailedOnRank
from tests.support.resources import open_files, resident_bytes

RANKS, DIM, IDS = 3, 4, 60
SILENCE_S = 45

WAYS = ["call", "run 0", "run 1", "run 2", "run 3", "eager", "eval", "eval run", "snapshot"]

# What a rank does otherwise in `build`. In the steps of the first all raise; of the second all make the step.
FAILS = {
    "raises before lookups": "Odd",
    "raises between lookups": "Odd",
    "raises after lookups": "Odd",
    "raises after backward": "Odd",
    "floats": "TypeError",
    "not finite": "NonFiniteGradientError",
    "looks up once more": "RankError",
}
WORDS = {"floats": "ids must be torch.int64"}
GUESSED_WRONG = ["flips", "shifts", "flips and shifts"]
OF_LOOPS = ["loader ends", "loader raises", "leaves", "forgets"]


class Odd(Exception):
    """What `build`, or a loader, raises."""


def make_embedding(name, path, tables, store, group, replicate=False):
    options = {
        "device": lambda: oneemb.make_device_mem_store_options(path),
        "ssd": lambda: oneemb.make_cached_ssd_store_options(1, path),
    }[store]()
    return oneemb.MultiTableEmbedding(
        name, DIM, torch.float32, torch.int64, [oneemb.make_table(replicate=replicate)] * tables, options,
        num_threads=1, process_group=group, gradients_of_ranks="sum",
    )  # fmt: skip


class Model(torch.nn.Module):
    """Three embeddings, of which two are looked up together."""

    def __init__(self, path, group):
        super().__init__()
        self.users = make_embedding("users", f"{path}/users", 2, "device", group)
        self.items = make_embedding("items", f"{path}/items", 1, "ssd", group)
        self.tags = make_embedding("tags", f"{path}/tags", 1, "device", group, replicate=True)

    def both(self, ids, label, odd=""):
        if odd == "raises before lookups":
            raise Odd(odd)
        users = ids.float() if odd == "floats" else ids.flip(0) if "flips" in odd else ids
        users = self.users(users)
        if odd == "raises between lookups":
            raise Odd(odd)
        items = self.items(ids[:, 0] + ("shifts" in odd))
        return self._loss(users.sum((1, 2)) + items.sum(1), label, odd, lambda: self.users(ids))

    def alone(self, ids, label, odd=""):
        if odd in ("raises before lookups", "raises between lookups"):
            raise Odd(odd)
        tags = self.tags(ids[:, :1].float() if odd == "floats" else ids[:, :1] + ("shifts" in odd))
        return self._loss(tags.sum((1, 2)), label, odd, lambda: self.tags(ids[:, :1]))

    def _loss(self, sums, label, odd, look_up):
        if odd == "raises after lookups":
            raise Odd(odd)
        loss = (sums - label).square().sum()
        if odd == "looks up once more":
            loss = loss + look_up().sum()
        if odd == "not finite":
            loss = loss * float("inf") + sums.sum() * float("inf")
        return loss

    def embeddings(self):
        return [self.users, self.items, self.tags]


class Both(oneemb.TrainGraph):
    def __init__(self, model):
        super().__init__()
        self.users, self.items = model.users, model.items
        self.model = [model]  # not registered: `tags` is none of it
        self.adagrad = torch.optim.Adagrad(self.parameters(), lr=0.05)
        self.add_optimizer(self.adagrad)

    def loss(self, *batch):
        return self.model[0].both(*batch)

    def build(self, ids, label, odd):
        loss = self.loss(ids, label, odd)
        loss.backward()
        if odd == "raises after backward":
            raise Odd(odd)
        return loss.detach()


class Alone(Both):
    def __init__(self, model):
        super(Both, self).__init__()
        self.tags = model.tags
        self.model = [model]
        self.adagrad = torch.optim.Adagrad(self.parameters(), lr=0.05)
        self.add_optimizer(self.adagrad)

    def loss(self, *batch):
        return self.model[0].alone(*batch)


class Evaluates(oneemb.EvalGraph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, ids, label, odd):
        return torch.stack([self.model.both(ids, label, odd), self.model.alone(ids, label)])


class Segment:
    """Some batches, the way in which they are trained, and what one rank does otherwise: the same on all ranks."""

    def __init__(self, choose):
        self.way = choose.choice(WAYS)
        self.alone = choose.random() < 0.3
        self.rank, self.size = choose.randrange(RANKS), choose.randint(1, 8)
        self.at = choose.randrange(self.size)
        self.seed = choose.randrange(2**60)
        events = ["", *FAILS, *GUESSED_WRONG]
        if self.way == "eager":
            events = ["", "floats", "not finite", *GUESSED_WRONG]
        elif self.way.startswith("run"):
            events += OF_LOOPS
        elif self.way.startswith("eval"):
            events = ["", "raises between lookups", "floats", *GUESSED_WRONG]
        if self.alone:  # `tags` are replicated: each rank looks them up by itself, as often as it likes.
            # Outside of a graph the others do not hear of a lookup that fails, and wait for that rank in their step.
            odd = ["looks up once more"] + ["floats"] * (self.way == "eager")
            events = [event for event in events if event not in odd]
        self.event = choose.choice(events) if self.way != "snapshot" and choose.random() < 0.7 else ""

    def __repr__(self):
        graph = "alone" if self.alone else "both"
        return f"{self.way} ({graph}) of {self.size}, rank {self.rank} {self.event or 'as usual'} at {self.at}"

    def batches(self, rank):
        """This rank's, of any size; what it does otherwise in each is part of it."""
        rng = np.random.default_rng([self.seed, rank])
        for n in range(self.size):
            size = int(rng.integers(0, 6))
            odd = self.event if rank == self.rank and n == self.at and self.event not in OF_LOOPS else ""
            size = max(size, int(odd in ("not finite", "floats")))
            ids = torch.from_numpy(rng.integers(-IDS // 2, IDS // 2, (size, 2))) * 2**50
            yield ids, torch.from_numpy(rng.random(size, np.float32)), odd

    def loader(self, rank):
        """Its batches as a loader gives them."""
        for n, batch in enumerate(self.batches(rank)):
            if rank == self.rank and n == self.at and self.event == "loader ends":
                return
            if rank == self.rank and n == self.at and self.event == "loader raises":
                raise Odd(self.event)
            yield batch

    @property
    def steps(self):
        """How many of its batches are trained."""
        if self.event in FAILS or self.event in ("loader ends", "loader raises"):
            return self.at
        return self.at + 1 if self.event in ("leaves", "forgets") else self.size

    def raises(self, rank):
        """What the class of the error on a rank is called; None = there is none."""
        own = {**FAILS, "loader raises": "Odd"}.get(self.event)
        together = self.event in ("not finite", "looks up once more")
        return own if own is None or together or rank == self.rank else "RankError"


class Soak:
    """One model sees every way and event, the other the same steps in a plain eager loop."""

    def __init__(self, group, path, watchdog):
        self.rank, self.watchdog = group.rank(), watchdog
        self.model, self.plain = Model(f"{path}/model", group), Model(f"{path}/plain", group)
        self.graphs = Both(self.model), Alone(self.model)
        self.evaluation = Evaluates(self.model)
        self.optimizers = [
            torch.optim.Adagrad([self.plain.users.weight, self.plain.items.weight], lr=0.05),
            torch.optim.Adagrad([self.plain.tags.weight], lr=0.05),
        ]
        self.trained = []
        """The batches of all steps, with the number of the graph."""
        self.saved = None

    def steps_of(self, segment):
        """Train in the way of a segment; how many steps have been made."""
        graph, steps = self.graphs[segment.alone], 0
        if segment.way == "call":
            for batch in segment.batches(self.rank):
                graph(*batch)
                steps += 1
                self.watchdog.alive()
        elif segment.way == "eager":
            try:
                for batch in segment.batches(self.rank):
                    graph.loss(*batch).backward()
                    graph.adagrad.step()
                    graph.adagrad.zero_grad()
                    steps += 1
                    self.watchdog.alive()
            finally:
                self.steps = steps
                graph.adagrad.zero_grad()
        else:
            loop = graph.run(segment.loader(self.rank), prefetch_depth=int(segment.way[-1]))
            for _ in loop:
                steps += 1
                self.steps = steps
                self.watchdog.alive()
                if segment.event in ("leaves", "forgets") and steps == segment.at + 1:
                    if segment.event == "forgets":
                        break
                    loop.close()
            del loop
        return steps

    def play(self, segment):
        self.steps = 0
        raised = None
        before = [graph.steps for graph in self.graphs]
        try:
            if segment.way == "snapshot":
                return self.snapshot(segment)
            if segment.way.startswith("eval"):
                return self.evaluate(segment)
            self.steps = self.steps_of(segment)
        except Exception as error:
            raised = error
            if segment.way == "call":
                self.steps = self.graphs[segment.alone].steps - before[segment.alone]
        name = None if raised is None else type(raised).__name__
        assert name == segment.raises(self.rank), f"{name}: {raised}"
        if name == "RankError" and segment.event != "looks up once more":
            why = f"rank {segment.rank} has failed ({FAILS.get(segment.event, 'Odd')}: {WORDS.get(segment.event, '')}"
            assert why in str(raised), raised
        del raised
        assert self.steps == segment.steps, (self.steps, segment.steps)
        for batch in list(segment.batches(self.rank))[: segment.steps]:
            self.trained.append((segment.alone, batch))
            (self.plain.alone if segment.alone else self.plain.both)(*batch).backward()
            self.optimizers[segment.alone].step()
            self.optimizers[segment.alone].zero_grad()
            self.watchdog.alive()

    def evaluate(self, segment):
        """Evaluate with rows as they are now; nothing is changed by it."""
        raised, values = None, []
        try:
            if segment.way == "eval":
                values = [self.evaluation(*batch) for batch in segment.batches(self.rank)]
            else:
                values = list(self.evaluation.run(segment.batches(self.rank)))
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        name = segment.raises(self.rank)
        assert (raised is None) == (name is None) and (name is None or raised.startswith(name)), raised
        if raised is None:
            self.plain.eval()
            with torch.no_grad():
                expected = [
                    torch.stack([self.plain.both(ids, label, odd), self.plain.alone(ids, label)])
                    for ids, label, odd in segment.batches(self.rank)
                ]
            self.plain.train()
            assert all(torch.equal(value, its) for value, its in zip(values, expected, strict=True))

    def snapshot(self, segment):
        """Save both models, or go back to what was saved."""
        pairs = list(zip(self.model.embeddings(), self.plain.embeddings(), strict=True))
        if self.saved is None or segment.alone:
            for embedding in (embedding for pair in pairs for embedding in pair):
                embedding.save_snapshot("last", overwrite=True)
            self.saved = len(self.trained)
        else:
            for embedding in (embedding for pair in pairs for embedding in pair):
                embedding.load_snapshot("last")
            del self.trained[self.saved :]
        self.watchdog.alive()

    def check(self):
        """Both have the same bits, and hold nothing."""
        found, expected = ([weights_of(one) for one in model.embeddings()] for model in (self.model, self.plain))
        assert found == expected
        for embedding in self.model.embeddings():
            stats = embedding.stats()
            held = stats["device"]["pinned"], len(embedding.store.pins.prefetched)
            assert held == (0, 0), (embedding.name, held)
        self.watchdog.alive()

    def close(self):
        for embedding in self.model.embeddings() + self.plain.embeddings():
            embedding.close()


def weights_of(embedding):
    ids = torch.arange(-IDS // 2, IDS // 2) * 2**50
    ids = torch.cat([ids, ids + 1])[:, None].expand(-1, embedding.num_tables).contiguous()
    embedding.eval()
    rows = embedding(ids).detach().numpy().tobytes()
    embedding.train()
    return rows


class Watchdog:
    """Ends this process, with the stacks of all its threads in a file, when nothing was `alive` for so many seconds."""

    def __init__(self, path, seconds):
        self.file, self.seconds = open(path, "w"), seconds

    def alive(self):
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.file)

    def __enter__(self):
        self.alive()
        return self

    def __exit__(self, *error):
        faulthandler.cancel_dump_traceback_later()
        self.file.close()


def resources():
    """Open files but those of tables, threads of Python, and all threads."""
    return len(open_files("/rank-")), threading.active_count(), len(os.listdir("/proc/self/task"))


def soaks(group, path, seed, seconds, steps):
    """Play segments until the time is over or so many steps are made.

    Returns:
        The steps, memory and resources along the way, the batches that count, and the weights of all rows.
    """
    choose, made, end = random.Random(seed), 0, time.monotonic() + seconds
    memory, held = [], []
    with Watchdog(f"{path}/stacks-{group.rank()}", SILENCE_S) as watchdog:
        soak = Soak(group, path, watchdog)
        number = 0
        while made < steps:
            # The ranks end together: the first one says when.
            if soak.model.users.ranks.gather_number("go on", lambda: int(time.monotonic() > end))[0]:
                break
            segment = Segment(choose)
            print(f"{time.monotonic() - end:7.1f} {number} {segment}", file=watchdog.file, flush=True)
            try:
                soak.play(segment)
                soak.check()
            except BaseException as error:
                error.add_note(f"in segment {number} of seed {seed}: {segment}")
                raise
            made += soak.steps
            number += 1
            if number % 10 == 0:
                memory.append(resident_bytes())
                held.append(resources())
        weights = [weights_of(embedding) for embedding in soak.model.embeddings()]
        soak.close()
    return made, memory, held, soak.trained, weights


def run_soak(rank_pool, path, seed, seconds, steps):
    try:
        results = rank_pool(RANKS, soaks, str(path), seed, seconds, steps, seconds=seconds + 4 * SILENCE_S)
    except FailedOnRank as error:
        for file in sorted(pathlib.Path(path).glob("stacks-*")):
            error.add_note(f"---- {file.name}\n{file.read_text()[-6000:]}")
        raise
    assert len({made for made, *_ in results}) == 1
    assert all(weights == results[0][4] for *_, weights in results)
    for _, _, held, _, _ in results:
        print("files, threads of Python, threads:", held[:: max(1, len(held) // 8)])
    check_against_one_process(path, [trained for *_, trained, _ in results], results[0][4])
    return results


def check_against_one_process(path, trained_R, weights):
    """The batches of all ranks, one after another, give the same rows on one process."""
    model = Model(f"{path}/one", None)
    optimizers = [
        torch.optim.Adagrad([model.users.weight, model.items.weight], lr=0.05),
        torch.optim.Adagrad([model.tags.weight], lr=0.05),
    ]
    for step in zip(*trained_R, strict=True):
        alone = step[0][0]
        losses = [(model.alone if alone else model.both)(*batch) for _, batch in step]
        sum(losses).backward()
        optimizers[alone].step()
        optimizers[alone].zero_grad()
    for embedding, its in zip(model.embeddings(), weights, strict=True):
        expected = np.frombuffer(weights_of(embedding), np.float32)
        np.testing.assert_allclose(np.frombuffer(its, np.float32), expected, rtol=1e-3, atol=1e-3)
        embedding.close()


def test_a_short_soak_of_ranks(tmp_path, rank_pool, seed):
    run_soak(rank_pool, tmp_path, seed, seconds=100, steps=40)


@pytest.mark.slow
def test_a_soak_of_ranks_keeps_its_memory(tmp_path, rank_pool, seed):
    results = run_soak(rank_pool, tmp_path, seed, seconds=600, steps=20_000)
    for rank, (made, memory, held, *_) in enumerate(results):
        assert held[-1] <= max(held[: len(held) // 2 + 1]), held
        print(f"rank {rank}: {made} steps, MiB over time: {[size >> 20 for size in memory]}")
        # A batch of another size asks for other arrays: what is left of a quarter's largest is in its least reading.
        quarter = len(memory) // 4
        assert min(memory[-quarter:]) < min(memory[quarter : 2 * quarter]) + 16 * 2**20
