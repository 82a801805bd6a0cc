"""Growth of a tier's slot arrays in a GPU's memory."""

from collections.abc import Callable

import torch

from oneemb.storage.errors import StoreFullError
from oneemb.storage.tiers.limits import Limits

Arrays = list[torch.Tensor]
"""Arrays of S slots, all of one device."""


def enlarge(
    arrays: Callable[[], Arrays], hold: Callable[[Arrays], None], size: int, need: int, limits: Limits,
    device: torch.device,
) -> None:  # fmt: skip
    """Let arrays have memory for `size` slots, or at least for `need`.

    A slab is copied, for which the device needs room for both. Where there is no such room it goes by way of the host's
    memory, twice over the bus; so a store comes to use all of its budget, and not two thirds.

    Args:
        arrays: returns the arrays as they are. Nobody else refers to them.
        hold: is given those that take their place.
        limits: of the tier.
        device: where the arrays are.

    Raises:
        StoreFullError: there is no memory for `need` slots; the arrays are as they were.
    """
    before = arrays()
    have = len(before[0])
    try:
        hold([_enlarged(array, size, device) for array in before])
        return
    except torch.OutOfMemoryError:
        kept = [array.cpu() if array.is_cuda else array.clone() for array in before]
    del before
    hold([_enlarged(array[:0], 0, device) for array in kept])
    failure: BaseException | None = None
    for trial in (size, need):
        try:
            hold([_enlarged(array, trial, device) for array in kept])
            return
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # whose frames hold what there was memory for
    hold([_enlarged(array, have, device) for array in kept])
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    fits = have + free // limits.slot_bytes
    raise StoreFullError(
        f"the {limits.name} tier needs memory for {need} rows ({limits.mebibytes(need)} MiB) of its"
        f" {limits.mebibytes(limits.slots)} MiB, and the device has {free // 2**20} MiB left, enough for about"
        f" {fits} rows; give the store a cache_budget_mb, or a smaller one, or free memory on the device"
    ) from failure


def _enlarged(array: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """A copy on the device with room for `size` slots, those beyond the old ones zero."""
    grown = torch.zeros((size, *array.shape[1:]), dtype=array.dtype, device=device)
    grown[: len(array)] = array
    return grown
