"""What ranks exchange, and that all raise where one does."""

import pytest
import torch

from oneemb.graph.ranks import RankError, Ranks


def exchanges(group):
    ranks = Ranks(group)
    received = []
    for round in range(3):
        blocks = [
            [torch.tensor([to + 0.5]), torch.full((ranks.rank + to + round,), ranks.rank, dtype=torch.int64)]
            for to in range(ranks.size)
        ]
        got = ranks.exchange(f"round {round}", lambda blocks=blocks: blocks)
        received.append(
            [
                (one.take(1, torch.float32).tolist(), one.take(sender + ranks.rank + round, torch.int64).tolist())
                for sender, one in enumerate(got)
            ]
        )
    return received


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_gets_what_each_has_sent_it(rank_pool, size):
    results = rank_pool(size, exchanges)
    for to, received in enumerate(results):
        for round, blocks in enumerate(received):
            for sender, got in enumerate(blocks):
                assert got == ([to + 0.5], [sender] * (sender + to + round))


def answers(group):
    ranks = Ranks(group)
    found = []
    for like in (torch.empty(0, 3), torch.empty(0, 1, dtype=torch.bfloat16), torch.empty(0, 9, dtype=torch.int64)):
        sent_R = [2 * ranks.rank + to for to in range(ranks.size)]
        received_R = [2 * sender + ranks.rank for sender in range(ranks.size)]
        heads = ranks.heads(like)
        rows = [torch.full((count + heads, like.shape[1]), to).to(like) for to, count in enumerate(sent_R)]
        got = ranks.answer("it", lambda rows=rows: torch.cat(rows), like, sent_R, received_R)
        found.append([row for its in ranks.behind_heads(received_R, heads) for row in got[its].tolist()])
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_answers_of_known_sizes(rank_pool, size):
    for to, received in enumerate(rank_pool(size, answers)):
        rows = sum(2 * sender + to for sender in range(size))
        assert received == [[[to] * width] * rows for width in (3, 1, 9)]


def fails_on_one(group, failing):
    ranks = Ranks(group)

    def make():
        if ranks.rank == failing:
            raise KeyError("no such thing")
        return [[torch.zeros(3)]] * ranks.size

    caught = []
    for call in (
        lambda: ranks.exchange("it", make), lambda: ranks.agree("it", make), lambda: ranks.all_gather("it", make),
        lambda: ranks.answer("it", lambda: torch.zeros(len(make()) * 3, 2), torch.zeros(0, 2), *[[1] * ranks.size] * 2),
    ):  # fmt: skip
        try:
            call()
        except Exception as error:
            caught.append((type(error).__name__, str(error)))
    return caught, ranks.all_gather("afterwards", lambda: ranks.rank)


@pytest.mark.parametrize("failing", [0, 2])
def test_where_one_fails_all_raise_and_can_go_on(rank_pool, failing):
    for rank, (caught, afterwards) in enumerate(rank_pool(3, fails_on_one, failing)):
        assert afterwards == [0, 1, 2]
        assert len(caught) == 4
        for kind, text in caught:
            if rank == failing:
                assert (kind, text) == ("KeyError", "'no such thing'")
            else:
                assert kind == "RankError"
                assert f"rank {failing} has failed (KeyError: 'no such thing')" in text


def do_different_things(group):
    ranks = Ranks(group)
    with pytest.raises(RankError, match=r"rank 0: save 'a'; rank 1: step\): .*in the same order"):
        ranks.agree("save 'a'" if ranks.rank == 0 else "step")
    ranks.agree("both the same again")


def test_ranks_that_do_different_things_say_so_and_can_go_on(rank_pool):
    rank_pool(2, do_different_things)


def have_made_it_differently(group):
    """What is said where ranks do the same, or not, with one thing, or with two, that was made otherwise."""
    rank, said = group.rank(), []
    for name, others, doing in [("'a'", "'a'", "it"), ("'a'", "'a'", "that"), ("'a'", "'b'", "that")]:
        ranks = Ranks(group, name=others if rank else name, made=f"seed={rank}")
        with pytest.raises(RankError) as raised:
            ranks.agree(doing if rank else "it")
        said.append(str(raised.value))
    one, other = Ranks(group, name="'a'", made="seed=3"), Ranks(group, name="'b'", made=f"seed={rank}")
    with pytest.raises(RankError) as raised:
        Ranks.joined([one, other]).agree("step")
    Ranks.joined([one]).agree("step")
    return [*said, str(raised.value)]


def test_ranks_that_have_made_something_differently_are_told_how(rank_pool):
    for same, differ, of_two, joined in rank_pool(2, have_made_it_differently):
        made = "have made the embedding differently (rank 0: seed=0; rank 1: seed=1): each rank must make the same"
        assert same.startswith(f"the ranks it, and {made}")
        assert differ.startswith(f"the ranks do different things (rank 0: it; rank 1: that), and {made}")
        assert "do different things" in of_two and "differently" not in of_two
        assert "(rank 0: 'a': seed=3; 'b': seed=0; rank 1: 'a': seed=3; 'b': seed=1)" in joined


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


def fails_at_what_it_sends(group):
    """Rank 1 has what cannot be pickled, or an error that has no words."""
    ranks, said = Ranks(group), []

    def wordless():
        raise Wordless

    odd = [lambda: lambda: 0, wordless] if group.rank() else [lambda: 1, lambda: 1]
    for make in odd:
        for call in (ranks.agree, ranks.all_gather):
            with pytest.raises(Exception) as raised:
                call("it", make)
            said.append(raised.type.__name__ if group.rank() else str(raised.value))
    return said, ranks.all_gather("afterwards", lambda: 7)


def test_what_cannot_be_sent_is_an_error_on_all_ranks(rank_pool):
    (first, after), (second, _) = rank_pool(2, fails_at_what_it_sends)
    assert after == [7, 7]
    assert second[2:] == ["Wordless"] * 2 and all("pickle" in one or "Attribute" in one for one in second[:2]), second
    assert all("rank 1 has failed (" in one and ("pickle" in one or "local object" in one) for one in first[:2]), first
    assert first[2:] == ["rank 1 has failed (Wordless); nothing was done here"] * 2


def sums(group):
    ranks = Ranks(group)
    found = [ranks.agree("it", lambda one=one: one) for one in (None, ranks.rank or None)]
    return ranks.sum([0.1 * (ranks.rank + 1), 1.0]), ranks.any(ranks.rank == 1), ranks.any(False), found


def test_sums_and_what_is_found_are_the_same_on_each_rank(rank_pool):
    results = rank_pool(3, sums)
    assert results == [([0.1 + 0.1 * 2 + 0.1 * 3, 3.0], True, False, [None, 1])] * 3


def leaves_while_another_fails(group, fails):
    """Rank 0 leaves an exchange of numbers; rank 1 fails in it, or does not."""
    ranks = Ranks(group)

    def number():
        if fails and ranks.rank == 1:
            raise KeyError("here")
        return 0

    try:
        said = ranks.leave("go on") if ranks.rank == 0 else ranks.gather_number("go on", number)
    except (KeyError, RankError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, ranks.all_gather("go on together", lambda: ranks.rank)


def test_a_rank_that_leaves_an_exchange_is_not_waited_for_where_another_fails(rank_pool):
    results = rank_pool(3, leaves_while_another_fails, True)
    assert all(together == [0, 1, 2] for _, together in results)
    assert results[0][0] is None and results[1][0] == "KeyError: 'here'"
    assert "but rank 0 has left, and another rank has failed (see the error of rank 1)" in results[2][0]
    for said, together in rank_pool(3, leaves_while_another_fails, False)[1:]:
        assert said[0] != 0 and said[1:] == [0, 0] and together == [0, 1, 2]
