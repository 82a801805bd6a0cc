"""Arguments for lookups in dynamicemb's tables of scores, such as `MultiTableKVCounter.lookup`, which ignores them."""

import enum
from dataclasses import dataclass

import torch

__all__ = ["ScoreArg", "ScorePolicy"]


class ScorePolicy(enum.Enum):
    """Treatment of the score of a looked up or inserted id."""

    CONST = 0
    ASSIGN = 1
    ACCUMULATE = 2
    GLOBAL_TIMER = 3


@dataclass
class ScoreArg:
    """Scores of the ids of a lookup. Lookups that only read ignore it."""

    name: str
    value: torch.Tensor | None = None
    policy: ScorePolicy = ScorePolicy.CONST
