"""The ranks of a job, for adapters whose tables are another library's."""

from torch import distributed

from oneemb.embeddings.rank_calls import RankCalls
from oneemb.graph.ranks import Ranks

__all__ = ["ranks_of_job"]


def ranks_of_job() -> RankCalls:
    """Calls that the ranks of the default process group make together, with connections of their own; without a group
    this process makes them alone. Every rank calls it."""
    started = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return RankCalls(Ranks(distributed.group.WORLD).again() if started else None, [])
