"""What fails on one rank of two."""

import logging

import numpy as np

from oneemb import tde
from oneemb.storage.remote.parameter_server import ServerError
from oneemb.tde import ps as ps_module
from tests.support.rank_jobs import RankJob
from tests.tde.models import PATH, ROWS, VOCABULARY, Samples, begin_as_tde, configs_of, dlrm, sharded
from tests.tde.shared_server import SharedServer


def runs(group, report, function, args):
    logging.disable(logging.WARNING)
    report(function(group, *args))


def on_two_ranks(function, *args):
    job = RankJob(2, runs, function, args, timeout_s=60)
    ended = job.end(200)
    assert all(code == 0 for code, _ in ended), job.texts()
    return [reports[0] for _, reports in ended]


class Failing(SharedServer):
    fail = False

    def push(self, *arguments):
        if self.fail:
            raise ServerError("refused on this rank")
        super().push(*arguments)


def wrapped(group, folder, loader, depth, name):
    server = Failing(f"{folder}/{name}-{depth}")
    ps_module.open_server = lambda url: server
    model = sharded(dlrm(ROWS), group, "row_wise")
    return tde.wrap("shared://", loader, model, {PATH: configs_of(ROWS)}, num_prefetch=depth), server


def steps_of(model, loader, found, before=lambda step: None):
    """Train, and note after how many steps what was raised."""
    try:
        for step, batch in enumerate(loader):
            loss, _ = model(batch)
            loss.backward()
            found.append(step)
            before(step)
    except Exception as error:
        return len(found), type(error).__name__, str(error)
    return len(found), None, ""


class Ends(Samples):
    def __iter__(self):
        for step, batch in enumerate(super().__iter__()):
            if step == 7 and self.group.rank() == 1:
                if self.raises:
                    raise OSError("a bad file")
                return
            yield batch


def failures(group, folder):
    found = {}
    for depth in (0, 2):
        for raises in (True, False):
            samples = Ends(12, group)
            samples.raises = raises
            (loader, model), _ = wrapped(group, folder, samples, depth, f"ends-{raises}")
            found[depth, "raises" if raises else "ends"] = steps_of(model, loader, [])
        (loader, model), server = wrapped(group, folder, Samples(16, group), depth, "server")

        def refuse(step, server=server):
            server.fail = step > 5 and group.rank() == 1

        first = steps_of(model, loader, [], refuse)
        server.fail = False
        found[depth, "server"] = first, steps_of(model, loader, [])[:2]
        server.fail = group.rank() == 1
        try:
            tde.save(model)
        except Exception as error:
            found[depth, "save"] = type(error).__name__
        server.fail = False
        tde.save(model)
    return found


def test_what_fails_on_one_rank_is_raised_on_both_at_the_same_batch(tmp_path):
    first, second = on_two_ranks(failures, str(tmp_path))
    for depth in (0, 2):
        assert first[depth, "raises"][:2] == (7, "RuntimeError") and second[depth, "raises"][:2] == (7, "OSError")
        assert "rank 1 failed instead of this batch" in first[depth, "raises"][2]
        assert "a bad file" in first[depth, "raises"][2]
        assert first[depth, "ends"][:2] == (7, "RuntimeError") and second[depth, "ends"] == (7, None, "")
        assert "loader of rank 1 has ended" in first[depth, "ends"][2]
        (steps, kind, text), again = first[depth, "server"]
        assert (steps, kind) == (second[depth, "server"][0][0], "RankError") and steps > 5
        assert "rank 1 has failed" in text and "refused on this rank" in text
        assert second[depth, "server"][0][1] == "ServerError"
        assert again == second[depth, "server"][1] == (16, None)
        assert (first[depth, "save"], second[depth, "save"]) == ("RankError", "ServerError")


def leaves(group, folder):
    """The losses of passes that both ranks leave early, and of the same batches with full tables."""
    (loader, cached), _ = wrapped(group, folder, Samples(20, group), 3, "leaves")
    full = sharded(dlrm(VOCABULARY), group, "row_wise")
    begin_as_tde(full)
    losses = []
    for model, batches in ((cached, loader), (full, Samples(20, group, ids=False))):
        losses.append([])
        for stop in (4, 9, 20):
            for step, batch in enumerate(batches, 1):
                loss, _ = model(batch)
                loss.backward()
                losses[-1].append(loss.item())
                if step == stop:
                    break
    return losses


def test_both_ranks_may_leave_a_pass_early(tmp_path):
    for cached, full in on_two_ranks(leaves, str(tmp_path)):
        assert len(cached) == 33
        np.testing.assert_allclose(cached, full, rtol=0, atol=1e-6)
