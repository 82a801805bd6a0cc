"""The ranks of a job, for adapters whose tables are another library's."""

from torch import distributed

from oneemb.embeddings.rank_calls import RankCalls
from oneemb.graph.ranks import Ranks

__all__ = ["ranks_of_job"]


def ranks_of_job() -> RankCalls:
    """Calls that the ranks of the default process group make together, with connections of their own; without a group
    this process makes them alone. Every rank calls it."""
    started = distributed.is_available() and distributed.is_initialized()
    group = distributed.group.WORLD if started else None
    return RankCalls(None if group is None or group.size() == 1 else Ranks(group).again(), [])
