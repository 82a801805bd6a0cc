"""Entry of a state dict for an embedding's rows: name and identity of a snapshot, as a tensor.

The entry is a tensor because tools that save and map state dicts (safetensors, trainers, `{k: v.clone() ...}`) take
only tensors. All entries have the same length, so that any entry can be copied into any other.
"""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast

import torch

# Bytes of an entry. A snapshot's name has at most 200 bytes, percent-encoded, so its JSON with the identity is shorter.
_BYTES = 1024


class SnapshotName(TypedDict):
    """Name and identity of the snapshot that holds the rows."""

    oneemb_snapshot: str | None
    """Name of the snapshot; None = there are no rows."""
    oneemb_identity: NotRequired[str | None]
    """Identity of the snapshot, since names repeat between folders and runs."""
    oneemb_since: NotRequired[str]
    """Name of the parent, in a checkpoint whose snapshot is a delta."""
    oneemb_table: NotRequired[list[Any]]
    """[number, name] of a table, in a state dict with one entry for each table of an embedding."""


def encode(snapshot: SnapshotName) -> torch.Tensor:
    """The name as JSON, padded with spaces: uint8 [1024]."""
    return torch.frombuffer(bytearray(json.dumps(snapshot).encode().ljust(_BYTES)), dtype=torch.uint8)


def decode(state: torch.Tensor) -> SnapshotName:
    """Name and identity in a result of `encode`; ValueError if `state` is no such tensor, or its values were
    changed."""
    try:
        # A copy of the model in another dtype may hold the same bytes as floats.
        snapshot = json.loads(bytes(state.to("cpu", torch.uint8).tolist()))
        if isinstance(snapshot["oneemb_snapshot"], str | None):
            return cast(SnapshotName, snapshot)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # RuntimeError: deep JSON, sparse tensors.
        pass
    raise ValueError(
        "an embedding's entry of a state dict, `..._extra_state`, must be uint8 [1024] with the name of a snapshot, got"
        f" {state!r:.100}; copy entries unchanged: state dicts hold no rows, so entries cannot be averaged"
    )


def snapshot_name(state: torch.Tensor | Mapping[str, Any]) -> str | None:
    """Name of the snapshot in an embedding's entry of a state dict or checkpoint; None = the embedding had no rows.

    Args:
        state: `model.state_dict()[f"{name}._extra_state"]`, uint8 [1024]; or, of a file of `TrainGraph.save`,
            `torch.load(path)["embeddings"][name]`.

    Raises:
        ValueError: the entry names no snapshot.

    Example:
        >>> import tempfile, torch, oneemb
        >>> embedding = oneemb.MultiTableEmbedding(
        ...     "words", 8, torch.float32, torch.int64, [oneemb.make_table()],
        ...     oneemb.make_device_mem_store_options(tempfile.mkdtemp()))
        >>> rows = embedding(torch.tensor([3, 5]))
        >>> embedding.save_snapshot("two words")
        >>> oneemb.snapshot_name(embedding.state_dict()["_extra_state"])
        'two words'
    """
    if isinstance(state, Mapping) and isinstance(state.get("oneemb_snapshot", state), str | None):
        return cast(SnapshotName, state)["oneemb_snapshot"]
    return decode(cast(torch.Tensor, state))["oneemb_snapshot"]
