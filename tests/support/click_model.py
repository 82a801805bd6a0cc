"""One click model with rows of oneemb or with tables of torch: any loop over either has to give equal numbers."""

import torch

from oneemb.embeddings.embedding import TableEmbedding
from tests.support.models import make_embedding, rows_of

ITEMS, WORDS, BAG, DIM, BATCH, BATCHES = 20, 15, 3, 4, 8, 7


class ClickModel(torch.nn.Module):
    """An item and a bag of words a sample; their rows, side by side, go through a linear layer."""

    def __init__(self, items, words):
        super().__init__()
        self.items, self.words = items, words
        torch.manual_seed(0)
        self.head = torch.nn.Linear(2 * DIM, 1)

    def forward(self, item_B, word_BK):
        offset_P1 = torch.arange(0, word_BK.numel() + 1, word_BK.shape[1])
        pooled = self.words(word_BK.flatten(), offsets=offset_P1)
        return self.head(torch.cat([self.items(item_B), pooled], dim=1)).squeeze(1)

    def loss(self, item_B, word_BK, click_B):
        logit_B = self(item_B, word_BK)
        return torch.nn.functional.binary_cross_entropy_with_logits(logit_B.float(), click_B)

    def numbers(self):
        """Every weight of the model: rows, then dense ones."""
        tables = [
            rows_of(table, range(size)) if isinstance(table, TableEmbedding) else table.weight.detach().clone()
            for table, size in ((self.items, ITEMS), (self.words, WORDS))
        ]
        return [*tables, *(parameter.detach().clone() for parameter in self.head.parameters())]


def with_rows(path, store="device"):
    """The model with rows of oneemb."""
    return ClickModel(
        make_embedding(path / "items", dim=DIM, store=store, name="items"),
        make_embedding(path / "words", dim=DIM, store=store, name="words", seed=1),
    )


def with_tables(path):
    """The same model with tables of torch, of the same initial rows."""
    rows = with_rows(path / "initial")
    items = torch.nn.Embedding(ITEMS, DIM)
    words = torch.nn.EmbeddingBag(WORDS, DIM, mode="sum", include_last_offset=True)
    model = ClickModel(items, words)
    with torch.no_grad():
        for table, row_ND in zip((items, words), rows.numbers(), strict=False):
            table.weight.copy_(row_ND)
    rows.items.close()
    rows.words.close()
    return model


def clicks(batches=BATCHES):
    """A loader of as many batches, the same ones in the same order."""
    generator = torch.Generator().manual_seed(1)
    samples = BATCH * batches
    item_N = torch.randint(0, ITEMS, (samples,), generator=generator)
    word_NK = torch.randint(0, WORDS, (samples, BAG), generator=generator)
    click_N = torch.randint(0, 2, (samples,), generator=generator).float()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(item_N, word_NK, click_N), batch_size=BATCH)


def assert_equal_to_rounding(mine, its, *, rtol=1e-5, atol=1e-6):
    for value, expected in zip(mine, its, strict=True):
        torch.testing.assert_close(value, expected, rtol=rtol, atol=atol)


def assert_equal_bits(mine, its):
    for value, expected in zip(mine, its, strict=True):
        assert torch.equal(value, expected)
