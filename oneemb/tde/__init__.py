"""TorchRec's dynamic embedding, by its own names: static tables, with rows beyond memory on a parameter server.

    import oneemb.tde as tde

    loader, model = tde.wrap("redis://127.0.0.1:6379/?prefix=model", loader, model, {"ebc": configs})

A script that imports upstream's package runs unchanged after `oneemb.compat.install("torchrec_dynamic_embedding")`.
docs/tde.md lists what is the same as upstream and what differs.
"""

from oneemb.kernels.extras import not_loaded

try:
    import fbgemm_gpu as _fbgemm_gpu
    import torchrec as _torchrec
except (ImportError, OSError) as error:
    raise not_loaded("oneemb.tde", error, "torchrec") from error

from oneemb.tde.dataloader import DataLoader, close, save, wrap
from oneemb.tde.id_transformer import IDTransformer
from oneemb.tde.id_transformer_collection import IDTransformerCollection
from oneemb.tde.id_transformer_group import IDTransformerGroup
from oneemb.tde.ps import PS, PSCollection
from oneemb.tde.row_adam import RowAdam
from oneemb.tde.steps import NoRoomError
from oneemb.tde.tensor_list import TensorList
from oneemb.tde.utils import register_io

__all__ = [
    "PS", "DataLoader", "IDTransformer", "IDTransformerCollection", "IDTransformerGroup", "NoRoomError", "PSCollection",
    "RowAdam", "TensorList", "close", "register_io", "save", "wrap",
]  # fmt: skip

del _fbgemm_gpu, _torchrec
