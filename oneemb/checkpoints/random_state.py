"""States of the random generators of torch, Python and NumPy, of one process or of each rank."""

import random
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from oneemb.checkpoints.state_bytes import hash_of
from oneemb.graph.ranks import AnyRanks

_SEED_DIGITS = 8  # NumPy takes 32 bits


class RandomState(TypedDict):
    """States of the random generators."""

    torch: Tensor
    cuda: list[Tensor]
    """States of the generators of all GPUs; on a rank, of its own GPU."""
    python: tuple[Any, ...]
    numpy: list[Any]


def random_now(*, of_rank: bool) -> RandomState:
    """States as they are now; `of_rank` = of GPUs, that of this rank alone."""
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available():
        # A rank that asked for those of all GPUs would take memory on each.
        cuda = [torch.cuda.get_rng_state()] if of_rank else torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": _of_numpy(np.random.get_state()),
    }


def _of_numpy(state: Any) -> list[Any]:
    """The state of a generator of NumPy, its keys in an array, as a file can hold it."""
    name, keys, *rest = state
    return [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]


def restore_random(saved: Sequence[RandomState], ranks: AnyRanks) -> None:
    """Set the generators, with those that were saved of each rank."""
    mine = saved[ranks.rank] if ranks.rank < len(saved) else _random_of_further(saved, ranks.rank)
    torch.set_rng_state(mine["torch"])
    if ranks.alone and torch.cuda.is_available() and len(mine["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(mine["cuda"])
    elif torch.cuda.is_available() and mine["cuda"]:
        torch.cuda.set_rng_state(mine["cuda"][0])
    random.setstate(mine["python"])
    name, keys, *rest = mine["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _random_of_further(saved: Sequence[RandomState], rank: int) -> RandomState:
    """For a rank that was not there: generators that were the same on all ranks are the same here, since what they draw
    is meant to be; others follow from those of the first and this rank's number."""

    def state(kind: Literal["torch", "cuda", "python", "numpy"]) -> Any:
        hashes = [hash_of(its[kind]) for its in saved]
        if len(hashes) > 1 and len(set(hashes)) == 1:
            return saved[0][kind]
        seed = int(hash_of([hashes[0], rank])[:_SEED_DIGITS], 16)
        match kind:
            case "torch":
                return torch.Generator().manual_seed(seed).get_state()
            case "cuda":
                cuda = torch.cuda.is_available()
                return [torch.Generator("cuda").manual_seed(seed).get_state()] if cuda else []
            case "python":
                return random.Random(seed).getstate()
        return _of_numpy(np.random.RandomState(seed).get_state())

    return {"torch": state("torch"), "cuda": state("cuda"), "python": state("python"), "numpy": state("numpy")}
