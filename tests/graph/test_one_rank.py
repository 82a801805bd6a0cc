"""A process alone is a group of one rank, whose exchanges give back what it sends."""

import inspect

import pytest
import torch

from oneemb.graph.one_rank import ALONE, OneRank
from oneemb.graph.ranks import Ranks, ranks_of

CALLS = {
    "agree": (lambda call: ALONE.agree("agree", call), lambda made: made),
    "all_gather": (lambda call: ALONE.all_gather("gather", call), lambda made: [made]),
    "by_first": (lambda call: ALONE.by_first("first", call), lambda made: made),
    "of_first": (lambda call: ALONE.of_first("first", call), lambda made: made),
}


def methods_of(group):
    return {name: method for name, method in vars(group).items() if inspect.isfunction(method) and name[0] != "_"}


def test_a_group_of_one_is_called_as_the_ranks_of_a_process_group_are():
    several = methods_of(Ranks)
    for name, method in methods_of(OneRank).items():
        assert list(inspect.signature(method).parameters) == list(inspect.signature(several[name]).parameters), name
    assert (OneRank.alone, Ranks.alone) == (True, False)


@pytest.mark.parametrize("name", CALLS)
def test_a_group_of_one_gives_back_what_its_rank_makes(name):
    call, expected = CALLS[name]
    assert call(lambda: b"made") == expected(b"made")

    def fail():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        call(fail)


def test_a_group_of_one_gets_the_blocks_that_it_sends():
    ids, tables = torch.arange(3), torch.tensor([[1.5], [2.5]], dtype=torch.float16)
    (received,) = ALONE.exchange("send", lambda: [[ids, tables]])
    assert received.take(3, torch.int64).equal(ids) and received.take(2, torch.float16).equal(tables.view(-1))
    (nothing,) = ALONE.exchange("send", lambda: [[]])
    assert len(nothing.take(0, torch.int64)) == 0


def test_a_group_of_one_has_the_numbers_of_its_rank():
    assert ALONE.norms([0.1, 0.2], 3.0) == [0.1, 0.2] and ALONE.any(True) and not ALONE.any(False)
    assert (ALONE.rank, ALONE.size, ALONE.first, ALONE.group, ALONE.forked) == (0, 1, True, None, False)


def test_a_group_of_one_refuses_the_arguments_that_ranks_refuse():
    assert ranks_of(None).alone
    with pytest.raises(ValueError, match="gradients_of_ranks"):
        ranks_of(None, "most")
    with pytest.raises(ValueError, match="comm_dtype"):
        ranks_of(None, "sum", torch.int32)
