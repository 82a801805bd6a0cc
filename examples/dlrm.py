"""DLRM: numbers through a bottom MLP, ids through embeddings, the dot products of all pairs, a top MLP.

Reference: Naumov et al. Deep Learning Recommendation Model for Personalization and Recommendation Systems.
arXiv:1906.00091.

Shape letters: B batch, L ids of an example, F fields, P pairs of vectors, X numbers of an example, D weights of a row.
"""

from collections.abc import Sequence

import torch
from kuairand import PADDING, Field

import oneemb

__all__ = ["DLRM", "TABLES", "OneEmbLookup"]

TABLES = "kuairand_tables"
"""The folder of the rows, beside the checkpoint."""


class DLRM(torch.nn.Module):
    """The click's logit.

    Args:
        lookup: a module that makes [B, F, D] of ids [B, L].
        fields: F of them.
        numbers: X.
        dim: D.
    """

    def __init__(self, lookup: torch.nn.Module, fields: int, numbers: int, dim: int):
        super().__init__()
        vectors = fields + 1
        self.lookup = lookup
        self.bottom: torch.nn.Module = oneemb.nn.FusedMLP(numbers, [32], dim, skip_final_activation=True)
        self.interact = Interaction(vectors)
        self.top: torch.nn.Module = oneemb.nn.FusedMLP(
            vectors * dim + vectors * (vectors - 1) // 2, [64, 32], 1, skip_final_activation=True
        )

    def forward(self, numeric_BX: torch.Tensor, id_BL: torch.Tensor) -> torch.Tensor:
        vector_BFD = torch.cat([self.bottom(numeric_BX).unsqueeze(1), self.lookup(id_BL)], 1)
        return self.top(self.interact(vector_BFD)).squeeze(1)


class Interaction(torch.nn.Module):
    """The vectors themselves, and the dot product of each pair of them."""

    pair_P: torch.Tensor

    def __init__(self, vectors: int):
        super().__init__()
        first, second = torch.triu_indices(vectors, vectors, 1)
        self.register_buffer("pair_P", first * vectors + second, persistent=False)

    def forward(self, vector_BFD: torch.Tensor) -> torch.Tensor:
        dot_BFF = torch.bmm(vector_BFD, vector_BFD.transpose(1, 2))
        return torch.cat([vector_BFD.flatten(1), dot_BFF.flatten(1).index_select(1, self.pair_P)], 1)


class OneEmbLookup(torch.nn.Module):
    """All fields in one lookup of one oneemb embedding, a table each. Multi-hot fields are averaged.

    Args:
        embedding: has a table for each field and reads PADDING as zeros; it may be one that only reads.
        fields: one-hot ones first.
    """

    table_L: torch.Tensor

    def __init__(self, embedding: oneemb.MultiTableEmbedding | oneemb.InferenceEmbedding, fields: Sequence[Field]):
        super().__init__()
        self.embedding = embedding
        multi_hot_widths = [field.width for field in fields if field.width > 1]
        self.widths = [len(fields) - len(multi_hot_widths), *multi_hot_widths]
        table_L = torch.repeat_interleave(torch.arange(len(fields)), torch.tensor([field.width for field in fields]))
        self.register_buffer("table_L", table_L, persistent=False)

    def forward(self, id_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, F, D]"""
        row_BLD = self.embedding(id_BL, self.table_L)
        rows, ids = row_BLD.split(self.widths, 1), id_BL.split(self.widths, 1)
        vectors = [rows[0]]
        for i in range(1, len(self.widths)):
            count_B1 = (ids[i] != PADDING).sum(1, keepdim=True).clamp(min=1)
            vectors.append((rows[i].sum(1) / count_B1).unsqueeze(1))
        return torch.cat(vectors, 1)
