"""Small things that dynamicemb's users import from here."""

from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from oneemb.dynamicemb.dynamicemb_config import torch_to_dyn_emb

__all__ = ["TORCHREC_TYPES", "torch_to_dyn_emb"]

TORCHREC_TYPES = {EmbeddingBagCollection, EmbeddingCollection}
"""The classes whose modules are sharded."""
