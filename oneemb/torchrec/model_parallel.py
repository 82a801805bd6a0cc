"""TorchRec's DistributedModelParallel, which shards oneemb's collections too where it is given no sharders."""

from typing import Any

import torch
from torchrec.distributed import model_parallel
from torchrec.distributed.types import ModuleSharder

from oneemb.torchrec.sharder import get_default_sharders


class DistributedModelParallel(model_parallel.DistributedModelParallel):
    """TorchRec's class, with other default sharders: those of `get_default_sharders`, which spread the rows of oneemb's
    and of TorchRec's collections over all ranks by key.

    Args:
        module: the model.
        sharders: None = `get_default_sharders()`.
        arguments: TorchRec's other arguments, such as `env`, `device` and `plan`.

    Reference: torchrec.distributed.model_parallel.DistributedModelParallel.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *positional: Any,
        sharders: list[ModuleSharder[torch.nn.Module]] | None = None,
        **arguments: Any,
    ):
        by_position = positional[3:4]  # after env, device and plan
        if by_position == (None,):
            positional = (*positional[:3], get_default_sharders() if sharders is None else sharders, *positional[4:])
        elif sharders is not None or not by_position:
            arguments["sharders"] = get_default_sharders() if sharders is None else sharders
        super().__init__(module, *positional, **arguments)
