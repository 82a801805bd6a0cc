"""No call needs a deeper stack for more embeddings: Python's has room for a thousand calls."""

import sys
from collections import Counter

import pytest
import torch

import oneemb
from tests.support.interrupts import PACKAGE
from tests.support.models import make_embedding

IDS = torch.tensor([[1], [2]])


def total(embeddings):
    return sum(embedding(IDS).sum() for embedding in embeddings)


class Graph(oneemb.TrainGraph):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(embeddings)
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self):
        loss = total(self.embeddings)
        loss.backward()
        return loss


class Score(oneemb.EvalGraph):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(embeddings)

    def build(self):
        return total(self.embeddings)


def graph_job(folder, embeddings):
    graph = Graph(embeddings)
    for _ in range(3):
        graph()
    for _ in graph.run([()] * 3):
        pass
    graph.save(folder / "checkpoint")
    graph.load(folder / "checkpoint")
    graph.load_state_dict(graph.state_dict())
    score = Score(embeddings)
    for _ in range(3):
        score()
    return str(graph), graph.compiled().code


def eager_job(folder, embeddings):
    model = torch.nn.ModuleList(embeddings)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        total(embeddings).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def joined_job(folder, embeddings):
    optimizer = oneemb.Optimizer(torch.optim.Adam([e.weight for e in embeddings]), embeddings)
    for _ in range(2):
        total(embeddings).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(folder, number):
    return [make_embedding(folder / f"{number}-{i}", store="device", dim=4) for i in range(number)]


def nested_calls(job, folder, number):
    """How often each function of oneemb is under way at once, at most, while a job runs on so many embeddings."""
    embeddings, now, most = made(folder, number), Counter(), Counter()

    def watch(frame, event, argument):
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(PACKAGE):
            now[code] += 1 if event == "call" else -1
            most[code] = max(most[code], now[code])

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        job(folder, embeddings)
    finally:
        sys.setprofile(before)
    return most


@pytest.mark.parametrize("job", [graph_job, eager_job, joined_job])
def test_calls_nest_no_deeper_for_many_embeddings_than_for_two(tmp_path, job):
    job(tmp_path, made(tmp_path, 1))  # which imports: slow where it is watched
    two, many = (nested_calls(job, tmp_path, number) for number in (2, 6))
    assert not [code for code, most in many.items() if most > max(2, two[code])]
