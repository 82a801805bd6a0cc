"""Arguments of lookups in dynamicemb's tables of scores; see `MultiTableKVCounter.lookup`."""

import enum
from dataclasses import dataclass

import torch

__all__ = ["ScoreArg", "ScorePolicy"]


class ScorePolicy(enum.Enum):
    """Treatment of a score that is looked up or inserted."""

    CONST = 0
    ASSIGN = 1
    ACCUMULATE = 2
    GLOBAL_TIMER = 3


@dataclass
class ScoreArg:
    """Scores for a lookup. Reading has no use for them."""

    name: str
    value: torch.Tensor | None = None
    policy: ScorePolicy = ScorePolicy.CONST
