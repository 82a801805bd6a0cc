"""Room for the rows of a lookup: gradients of backward passes that have failed hold rows no longer."""

import torch

from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.errors import StoreFullError


def make_room(store: EmbeddingStore, error: StoreFullError) -> None:
    """Unpin the rows that only failed backward passes hold: see `free_failed_passes`.

    Args:
        error: says that there was no room.

    Raises:
        StoreFullError: `error`, if there is no more room now.
    """
    if not error.pinned or not free_failed_passes(store):
        raise error


def free_failed_passes(store: EmbeddingStore) -> bool:
    """Drop gradients of failed backward passes of this thread. torch keeps them in the thread's queue until its next
    backward pass, and so long their rows stay pinned.

    Returns:
        Whether pinned rows of the store have lost their owner.
    """
    if torch._C._current_graph_task_id() >= 0:
        return False
    # Hidden from torch's modes: a tape would record it, and a graph would take it for a backward pass of `build`.
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        nothing = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        torch.autograd.backward([nothing.clone()])
    return bool(store.pins.abandoned)
