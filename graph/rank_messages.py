"""Messages between ranks: tensors of any dtype and shape as bytes, one after another."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Blocks = Sequence[Sequence[torch.Tensor]]
"""Tensors to send to each rank, of any shape, one after another."""


@dataclass
class Traffic:
    """Messages and bytes that a rank has sent to others, and the time that it has spent in exchanges."""

    messages: int = 0
    """Exchanges of one tensor each."""
    sent_bytes: int = 0
    seconds: float = 0.0
    """From the begin of each to its end: the time that others are waited for is in it."""

    def add(self, sent: torch.Tensor, rows_to_others: int, begin: float) -> None:
        """Count an exchange of rows that has begun at this reading of time.perf_counter."""
        self.messages += 1
        self.sent_bytes += rows_to_others * (sent.numel() // max(1, len(sent))) * sent.element_size()
        self.seconds += time.perf_counter() - begin


class Received:
    """Tensors that a rank has sent, taken one after another."""

    def __init__(self, sent_N: torch.Tensor):
        self._sent_N = sent_N
        self._begin = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, of so many elements: [count]."""
        size = count * dtype.itemsize
        part = self._sent_N[self._begin : self._begin + size]
        self._begin += padded(size)
        return part.view(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, and zeros up to a multiple of 8, so that the next tensor is aligned."""
    if tensor.numel() == 0:  # whose strides may be any
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    more = padded(len(flat)) - len(flat)
    return torch.cat([flat, flat.new_zeros(more)]) if more else flat


def padded(size: int) -> int:
    return -(-size // 8) * 8
