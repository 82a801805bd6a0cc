"""A list of tensors, which a call of an `IDTransformer` takes."""

from collections.abc import Iterator, Sequence

import torch

__all__ = ["TensorList"]


class TensorList:
    """A list of detached tensors, which share their memory with the given ones."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.tensor_list = [tensor.detach() for tensor in tensors]

    def __len__(self) -> int:
        return len(self.tensor_list)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.tensor_list[i]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensor_list)
