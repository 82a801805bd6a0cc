"""Entry of a state dict for an embedding's rows: name and identity of a snapshot, as a tensor.

It is a tensor because tools that save and map state dicts (safetensors, trainers, `{k: v.clone() ...}`) take tensors
only. All such tensors have one length, so that one fits into the place of another.
"""

import json
from typing import Any, NotRequired, TypedDict, cast

import torch

# A snapshot's name is at most 200 bytes, percent-encoded; quoted in JSON, with its identity, it is below this.
_BYTES = 1024


class SnapshotName(TypedDict):
    """Snapshot that has the rows."""

    oneemb_snapshot: str | None
    """None = there are no rows."""
    oneemb_identity: NotRequired[str | None]
    """Identity of this very snapshot; names repeat from folder to folder and from run to run."""
    oneemb_table: NotRequired[list[Any]]
    """Number and name of a table, where a state dict has an entry for each table of an embedding."""


def encode(snapshot: SnapshotName) -> torch.Tensor:
    """The name as JSON, padded with spaces: uint8 [1024]."""
    return torch.frombuffer(bytearray(json.dumps(snapshot).encode().ljust(_BYTES)), dtype=torch.uint8)


def decode(state: torch.Tensor) -> SnapshotName:
    """Decode a tensor of `encode`; ValueError if it is no such tensor, or its values have been changed."""
    try:
        # A copy of the model in another dtype may hold the same bytes as floats.
        snapshot = json.loads(bytes(state.to("cpu", torch.uint8).tolist()))
        if isinstance(snapshot["oneemb_snapshot"], str | None):
            return cast(SnapshotName, snapshot)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise ValueError(
        "an embedding's entry of a state dict, `..._extra_state`, names a snapshot in uint8 [1024], this one does not:"
        f" {state!r:.100}. Copy it as it is: rows are not in state dicts, and their averages cannot be taken there"
    )


def snapshot_name(state: torch.Tensor) -> str | None:
    """Name of the snapshot in an embedding's entry of a state dict; None = there were no rows.

    Args:
        state: `model.state_dict()[f"{name}._extra_state"]`, uint8 [1024].

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
    return decode(state)["oneemb_snapshot"]
