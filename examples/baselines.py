"""What the DLRM has to beat: a constant, logistic regression on one-hot ids, and itself on torch.nn.EmbeddingBag.

The last two need what oneemb does not, a vocabulary: all ids of the log, known before training.

Shape letters: B batch, E events, L ids of an event, F fields, D weights of a row, C columns of the one-hot matrix,
V ids of a vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import scipy.sparse
import torch
from dlrm import DLRM, OneEmbLookup
from kuairand import PADDING, ClickLog
from sklearn.linear_model import LogisticRegression

import oneemb

__all__ = ["EmbeddingBagLookup", "constant", "logistic_regression", "on_embedding_bags"]


def constant(log: ClickLog) -> np.ndarray:
    """Probabilities of the validation events: all click as often as the training events did."""
    return np.full(len(log.validation), log.label_E[log.train].mean(dtype=np.float64))


def logistic_regression(log: ClickLog, penalty: float = 10.0) -> np.ndarray:
    """Probabilities of the validation events, from the fields and numbers that the DLRM sees.

    The penalty was chosen on 29 April, with the days before it as training events.
    """
    feature_EC, label_E = _one_hot_matrix(log), log.label_E
    model = LogisticRegression(C=1 / penalty, max_iter=500).fit(feature_EC[log.train], label_E[log.train])
    return model.predict_proba(feature_EC[log.validation])[:, 1]


def _one_hot_matrix(log: ClickLog) -> scipy.sparse.csr_matrix:
    """A column for each id of each field, where multi-hot fields are averaged; then the numbers."""
    blocks = [log.numeric_EX]
    for _, id_RK, row_E in log.each_field():
        id_V, given_RK = _vocabulary(id_RK), id_RK != PADDING
        count_R = given_RK.sum(1)
        column_N = np.searchsorted(id_V, id_RK[given_RK])
        value_N = np.repeat(1 / np.maximum(count_R, 1), count_R)
        matrix_RV = scipy.sparse.csr_matrix((value_N, column_N, np.cumsum([0, *count_R])), (len(id_RK), len(id_V)))
        blocks.append(matrix_RV[row_E])
    return scipy.sparse.hstack(blocks, "csr")


def _vocabulary(id_RK: np.ndarray) -> np.ndarray:
    """The ids there are and PADDING, sorted, each once."""
    return np.union1d(id_RK, PADDING)


class EmbeddingBagLookup(torch.nn.Module):
    """A torch.nn.EmbeddingBag for each field, with sparse gradients.

    Args:
        vocabularies: the sorted ids of each field, PADDING among them.
        widths: ids of an event in each field.
        dim: D.
    """

    def __init__(self, vocabularies: Sequence[torch.Tensor], widths: Sequence[int], dim: int):
        super().__init__()
        self.vocabularies = list(vocabularies)
        self.widths = list(widths)
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(
                len(id_V), dim, mode="mean", sparse=True, padding_idx=int(torch.searchsorted(id_V, PADDING))
            )
            for id_V in vocabularies
        )

    def forward(self, id_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, F, D]"""
        fields = zip(self.bags, self.vocabularies, id_BL.split(self.widths, 1), strict=True)
        return torch.stack([bag(torch.searchsorted(id_V, id_BK.contiguous())) for bag, id_V, id_BK in fields], 1)


def on_embedding_bags(model: DLRM, log: ClickLog) -> DLRM:
    """The same model with the same weights, its rows in torch.nn.EmbeddingBag."""
    assert isinstance(model.lookup, OneEmbLookup)
    embedding = model.lookup.embedding
    assert isinstance(embedding, oneemb.MultiTableEmbedding)
    vocabularies = [torch.from_numpy(_vocabulary(id_RK)) for _, id_RK, _ in log.each_field()]
    lookup = EmbeddingBagLookup(vocabularies, [field.width for field in log.fields], embedding.embedding_dim)
    was_training = embedding.training
    embedding.eval()  # reads rows that are not there yet as they will begin, and inserts none
    with torch.no_grad():
        for f, (bag, id_V) in enumerate(zip(lookup.bags, vocabularies, strict=True)):
            bag.load_state_dict({"weight": embedding(id_V, torch.tensor(f))})
    embedding.train(was_training)
    twin = DLRM(lookup, len(log.fields), log.numeric_EX.shape[1], embedding.embedding_dim)
    twin.bottom.load_state_dict(model.bottom.state_dict())
    twin.top.load_state_dict(model.top.state_dict())
    return twin
