"""Initializers that fill rows of a tensor, for users. Rows of tables are initialized by `initializer_args` instead.

fill = create_initializer_from_args(DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL, std_dev=0.1))
fill(buffer, torch.tensor([3, 5]), None)            fills rows 3 and 5 anew, by torch's generator
"""

import abc

import torch

from oneemb.dynamicemb.dynamicemb_config import complete_initializer_args
from oneemb.dynamicemb.types import DEBUG_MODULUS, DynamicEmbInitializerArgs, DynamicEmbInitializerMode, bounds_of

__all__ = [
    "BaseDynamicEmbInitializer", "ConstantInitializer", "DebugInitializer", "NormalInitializer",
    "TruncatedNormalInitializer", "UniformInitializer", "create_initializer_from_args",
]  # fmt: skip


class BaseDynamicEmbInitializer(abc.ABC):
    """Base of functions that fill rows of a tensor.

    Args:
        args: the distribution and its parameters; bounds that are None are 0 and 1.
    """

    def __init__(self, args: DynamicEmbInitializerArgs):
        self._args = complete_initializer_args(args)

    def __call__(self, buffer: torch.Tensor, indices: torch.Tensor, keys: torch.Tensor | None) -> None:
        """Fill rows of a tensor.

        Args:
            buffer: the tensor, [rows, D].
            indices: numbers of the rows to fill, integers [N].
            keys: ids of these rows, integers [N]; required by DEBUG.
        """
        with torch.no_grad():
            row_ND = torch.empty(len(indices), buffer.shape[1], dtype=torch.float32, device=buffer.device)
            buffer[indices.long()] = self._filled(row_ND, keys).to(buffer.dtype)

    @abc.abstractmethod
    def _filled(self, row_ND: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        """Fill `row_ND` and return it."""


class NormalInitializer(BaseDynamicEmbInitializer):
    """Draws from a normal distribution."""

    def _filled(self, row_ND: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        return row_ND.normal_(self._args.mean, self._args.std_dev)


class TruncatedNormalInitializer(BaseDynamicEmbInitializer):
    """Draws from a normal distribution between the bounds."""

    def _filled(self, row_ND: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        low, high = bounds_of(self._args, None)
        return torch.nn.init.trunc_normal_(row_ND, self._args.mean, self._args.std_dev, low, high)


class UniformInitializer(BaseDynamicEmbInitializer):
    """Draws uniformly between the bounds."""

    def _filled(self, row_ND: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        return row_ND.uniform_(*bounds_of(self._args, None))


class ConstantInitializer(BaseDynamicEmbInitializer):
    """Fills with one value."""

    def _filled(self, row_ND: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        return row_ND.fill_(self._args.value)


class DebugInitializer(BaseDynamicEmbInitializer):
    """Fills a row with its id modulo `DEBUG_MODULUS`."""

    def _filled(self, row_ND: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
        if keys is None or len(keys) != len(row_ND):
            raise ValueError(
                f"keys must be given for each of {len(row_ND)} rows, since mode DEBUG computes rows from keys, got"
                f" {None if keys is None else len(keys)}"
            )
        return (keys.long() % DEBUG_MODULUS).to(row_ND)[:, None].expand_as(row_ND)


_KINDS: dict[DynamicEmbInitializerMode, type[BaseDynamicEmbInitializer]] = {
    DynamicEmbInitializerMode.NORMAL: NormalInitializer,
    DynamicEmbInitializerMode.TRUNCATED_NORMAL: TruncatedNormalInitializer,
    DynamicEmbInitializerMode.UNIFORM: UniformInitializer,
    DynamicEmbInitializerMode.CONSTANT: ConstantInitializer,
    DynamicEmbInitializerMode.DEBUG: DebugInitializer,
}


def create_initializer_from_args(initializer_args: DynamicEmbInitializerArgs) -> BaseDynamicEmbInitializer:
    """Initializer for the arguments' mode; ValueError if `mode` is no DynamicEmbInitializerMode."""
    kind = _KINDS.get(initializer_args.mode)
    if kind is None:
        raise ValueError(f"mode must be a DynamicEmbInitializerMode, got {initializer_args.mode!r}")
    return kind(initializer_args)
