"""Lookups of collections as registered ops, which torch.fx, TorchScript and torch.export keep in their graphs.

    torch.ops.oneemb.embedding_bags(values, offsets, per_sample_weights, weights, features, dim)     [B, dim]
    torch.ops.oneemb.embeddings(values, offsets, weights, features, dim)                             [N, dim]

`weights` are the parameters of the tables. Each refers to its collection, since an op has no state. In a model that was
saved and loaded in another process the parameters refer to no collection; a lookup there is an error.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import library


class LooksUpJagged(Protocol):
    """Interface of a collection that the ops use."""

    def look_up(
        self, values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Result of the op: pooled embeddings, or rows, of bags that lie column by column."""


def register_collection(weight: torch.Tensor, collection: LooksUpJagged) -> None:
    """Make the parameter refer to its collection."""
    weight.collection = weakref.ref(collection)  # type: ignore[attr-defined]


def _collection_or_none(weights: list[torch.Tensor]) -> LooksUpJagged | None:
    reference = getattr(weights[0], "collection", None)
    return None if reference is None else reference()


def _collection_of(weights: list[torch.Tensor]) -> LooksUpJagged:
    found = _collection_or_none(weights)
    if found is None:
        raise RuntimeError(
            "the parameters of these tables refer to no collection: a traced, scripted or exported model can look up"
            " only in the process of its collection of oneemb.torchrec, and as long as that exists"
        )
    return found


def _check_meta(values: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Raise RuntimeError if `values` has ids and the tables are on the meta device."""
    if type(values) is torch.Tensor and values.device.type != "meta" and weights[0].device.type == "meta":
        raise RuntimeError(ON_META)


ON_META = (
    "the tables are on the meta device and have no rows; move the module by module.to_empty(device='cpu'), or shard it"
    " by DistributedModelParallel of oneemb.torchrec, or by TorchRec's with"
    " sharders=oneemb.torchrec.get_default_sharders()"
)
"""Text of the error for a lookup in tables on the meta device."""

_library = library.Library("oneemb", "FRAGMENT")
_library.define(
    "embedding_bags(Tensor values, Tensor offsets, Tensor? per_sample_weights, Tensor[] weights, SymInt features,"
    " SymInt dim) -> Tensor"
)
_library.define("embeddings(Tensor values, Tensor offsets, Tensor[] weights, SymInt features, SymInt dim) -> Tensor")


def _embedding_bags(
    values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None, weights: list[torch.Tensor],
    features: int, dim: int,
) -> torch.Tensor:  # fmt: skip
    return _collection_of(weights).look_up(values, offsets, per_sample_weights)


def _embeddings(
    values: torch.Tensor, offsets: torch.Tensor, weights: list[torch.Tensor], features: int, dim: int
) -> torch.Tensor:
    return _collection_of(weights).look_up(values, offsets, None)


def _with_autograd(op: Any, function: Callable[..., torch.Tensor], weights_at: int) -> Callable[..., torch.Tensor]:
    """The op's function under autograd. Parameters that refer to no collection are stand-ins that an exporter made: for
    them the call goes to the op below autograd."""

    def call(*args: Any) -> torch.Tensor:
        if _collection_or_none(args[weights_at]) is not None:
            return function(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


for _place in ("CPU", "CUDA"):
    _library.impl("embedding_bags", _embedding_bags, _place)
    _library.impl("embeddings", _embeddings, _place)
    _ops = torch.ops.oneemb
    _library.impl("embedding_bags", _with_autograd(_ops.embedding_bags, _embedding_bags, 3), f"Autograd{_place}")
    _library.impl("embeddings", _with_autograd(_ops.embeddings, _embeddings, 2), f"Autograd{_place}")


@library.register_fake("oneemb::embedding_bags", lib=_library)
def _(
    values: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None, weights: list[torch.Tensor],
    features: int, dim: int,
) -> torch.Tensor:  # fmt: skip
    _check_meta(values, weights)
    return offsets.new_empty(((offsets.shape[0] - 1) // features, dim), dtype=torch.float32)


@library.register_fake("oneemb::embeddings", lib=_library)
def _(
    values: torch.Tensor, offsets: torch.Tensor, weights: list[torch.Tensor], features: int, dim: int
) -> torch.Tensor:
    _check_meta(values, weights)
    return values.new_empty((values.shape[0], dim), dtype=torch.float32)
