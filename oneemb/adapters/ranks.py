"""The ranks of a job, for adapters whose tables are another library's."""

from torch import distributed

from oneemb.graph.one_rank import ALONE
from oneemb.graph.ranks import AnyRanks, Ranks


def ranks_of_job() -> AnyRanks:
    """The ranks of the default process group, with connections of their own; without a group this process alone. Every
    rank calls it."""
    started = distributed.is_available() and distributed.is_initialized()
    group = distributed.group.WORLD if started else None
    return ALONE if group is None or group.size() == 1 else Ranks(group).again()
