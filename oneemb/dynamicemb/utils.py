"""Small helpers that dynamicemb's users import."""

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from oneemb.dynamicemb.dynamicemb_config import torch_to_dyn_emb

__all__ = ["TORCHREC_TYPES", "assert_tensors_equal", "tabulate", "torch_to_dyn_emb"]

TORCHREC_TYPES = {EmbeddingBagCollection, EmbeddingCollection}
"""Classes of TorchRec whose modules are sharded."""


def tabulate(
    table: Sequence[Sequence[str | int]], headers: Sequence[str] | None = None, sub_headers: bool = False
) -> str:  # fmt: skip
    """A table as text, with aligned columns and a line below the headers.

    Args:
        table: rows of the table, all of one length.
        headers: headers of the columns; None = the first row.
        sub_headers: whether the first row below the headers has a line below it, too.

    Raises:
        ValueError: rows or headers differ in length.

    Example:
        >>> print(tabulate([["user", 3], ["item", 12]], ["table", "rows"]))
        table | rows
        ------+-----
        user  | 3
        item  | 12
    """
    rows = [[str(cell) for cell in row] for row in (table if headers is None else [headers, *table])]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"each row must have as many cells as headers or the first row, got rows of"
            f" {sorted({len(row) for row in rows})} cells"
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    rule = "-+-".join("-" * width for width in widths)
    heads = 2 if sub_headers else 1
    return "\n".join(line for n, text in enumerate(lines) for line in ([text, rule] if n < heads else [text]))


def assert_tensors_equal(
    tensor1: torch.Tensor,
    tensor2: torch.Tensor,
    atol: float = 1e-8,
    rtol: float = 1e-5,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Compare two tensors, each in `dtype` and on `device`; None = those of `tensor1`.

    Raises:
        AssertionError: shapes differ, or two values differ by more than atol + rtol * |value of `tensor2`|.
    """
    kind, where = dtype or tensor1.dtype, device or tensor1.device
    one, other = (tensor.detach().to(device=where, dtype=kind) for tensor in (tensor1, tensor2))
    torch.testing.assert_close(one, other, atol=atol, rtol=rtol)
