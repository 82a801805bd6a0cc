"""The parameter of shape [0, D] that stands for the rows of an embedding; the optimizer and the device of the rows.

The parameter holds no row, so an initializer, a copy or an assignment would silently change no row, and a product with
it would have no columns. Each of these is an error, and so is a write into `weight.data`, `weight.detach()` or a view
of these. Other arithmetic on the parameter is allowed, since optimizers do it; it changes nothing.
"""

import copy
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Never, Self

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from oneemb.checkpoints.rank_snapshots import RankSnapshots
from oneemb.embeddings.embedding_arguments import state_width_of
from oneemb.graph import ops
from oneemb.graph.ranks import AnyRanks
from oneemb.graph.row_optimizers import SAME_STATE, RowOptimizer
from oneemb.graph.tracers import hidden_from_modes
from oneemb.options import StoreOptions
from oneemb.storage.embedding_store import EmbeddingStore

unattached: "dict[int, weakref.ref[WeightOfRows]]" = {}
"""Embeddings that no optimizer has trained yet, by their `id()`."""

# Number of steps of other optimizers after which an embedding with gradients warns.
_STEPS_WITHOUT = 5


class WeightOfRows(torch.nn.Module):
    """Part of an embedding: its weight, and the optimizer that trains the rows."""

    name: str
    embedding_dim: int
    dtype: torch.dtype
    store_options: StoreOptions
    ranks: AnyRanks
    store: EmbeddingStore
    rank_snapshots: RankSnapshots
    weight: torch.nn.Parameter
    """Parameter [0, D] that stands for all rows in lists of parameters, and holds no row. Its gradient is a
    `RowGrad`."""
    weights_of_another: tuple[torch.nn.Parameter, ...] | None = None
    """Parameters of another module that stand for the rows in place of `weight`; see `stand_for_rows`."""
    row_optimizer: RowOptimizer | None = None
    """Update of the rows; None until the first step of a torch optimizer, `oneemb.Optimizer` or
    `TrainGraph.add_optimizer` sets it."""
    optimizer_ref: weakref.ref[torch.optim.Optimizer] | None = None
    steps_without = 0
    """Steps of optimizers at which the rows had gradients, and no optimizer had trained them."""

    def begin_weight(self) -> None:
        """Make `weight`."""
        self.weight = _Dispatching(torch.empty(0, self.embedding_dim, dtype=torch.float32, device="cpu"))
        _stand_for(self, self.weight)
        vars(self.weight)["__torch_dispatch__"] = functools.partial(_refuse_reads, vars(self.weight)["embedding"])
        key = id(self)
        unattached[key] = weakref.ref(self, lambda _: unattached.pop(key, None))

    @property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that stand for the rows: `weight`, or the parameters given to `stand_for_rows`."""
        if self.weights_of_another is not None:
            return self.weights_of_another
        # Read anew each time: torch's tools, such as fully_shard, replace the parameters of a module.
        weight = self._parameters.get("weight")
        return (self.weight if weight is None else weight,)

    @property
    def is_trained(self) -> bool:
        """Whether rows of any table get a gradient."""
        for weight in self.weights:  # a loop, which is faster than `any`, since every lookup runs this
            if weight.requires_grad:
                return True
        return False

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter, as torch does. A parameter with values is refused as `weight`."""
        if name == "weight" and param is not None and param.dim() and len(param):
            refuse_values(self.name, f"weight = a parameter of shape {list(param.shape)}")
        super().register_parameter(name, param)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer that trains the rows; None = no optimizer, or it no longer exists."""
        return None if self.optimizer_ref is None else self.optimizer_ref()

    def detach_optimizer(self, state: str = "keep") -> None:
        """Detach the optimizer from the rows, so that another optimizer, also of another graph, can train them.

        Args:
            state: use of the optimizer state in the rows. "keep": an optimizer of the same class continues with it;
                "drop": rows lose it, and any optimizer starts anew, at step 0; "adam", "adamw" or "sparse_adam": for
                rows of one of these three, the named optimizer continues with the moments.

        Raises:
            ValueError: `state` is not as above.
            StorageError: the disk has no room to rewrite the rows; they have not changed.
        """
        name = self.store.format.optimizer
        if state not in ("keep", "drop") and not (state in SAME_STATE and (name is None or name in SAME_STATE)):
            raise ValueError(
                f"state must be 'keep', 'drop' or, for rows of {', '.join(SAME_STATE)}, one of these, got {state!r} for"
                f" rows of {name!r}"
            )
        self.store.form.detach(state)
        self.row_optimizer = self.optimizer_ref = None

    def check_apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The weight that a conversion of the module, such as `to` or `half`, would make. Changes nothing.

        Args:
            fn: the conversion of a tensor.

        Raises:
            RuntimeError, NotImplementedError: rows cannot be moved to the device of the converted weight.
        """
        moved = torch.empty(0, self.embedding_dim, dtype=torch.float32, device=self.store.backend.device)
        failure = None
        try:
            moved = fn(moved)
        except (AssertionError, RuntimeError) as error:  # This build of torch lacks the device.
            failure = error
        if failure is not None:
            raise RuntimeError(f"embedding {self.name!r} cannot move: {_why_no_gpu(failure)}") from failure
        if moved.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"embedding {self.name!r} must be on the CPU or on a GPU of NVIDIA, got a move to {moved.device}; keep"
                " it on the CPU and move its output: embedding(ids).to(device)"
            )
        if moved.device != self.store.backend.device and any(weight.grad is not None for weight in self.weights):
            raise RuntimeError(
                f"embedding {self.name!r} cannot move while its lookups wait for an update; step the optimizer, then"
                " move the embedding"
            )
        return moved

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        try:
            moved = self.check_apply(fn)
        except RuntimeError as error:  # NotImplementedError is one too.
            # torch converts a model module by module, without checking all modules first, as a graph does.
            raise type(error)(
                f"{error}. Modules before this embedding in the model are converted already; if they were converted to"
                " the meta device, load their values again"
            ) from error.__cause__
        if moved.dtype not in (torch.float32, self.dtype):
            warnings.warn(
                f"embedding {self.name!r} keeps its {self.dtype} rows though the model becomes {moved.dtype}: cast its"
                f" output, embedding(ids).to({moved.dtype}), or make the embedding with this dtype",
                stacklevel=2,
            )
        if moved.device != self.store.backend.device:
            self.store.form.move_to(moved.device)
        # The weight keeps its dtype, since the rows keep theirs.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)


def warn_of_untrained(warn: Callable[[str], object]) -> None:
    """Call `warn`, once for each embedding, if its rows have had gradients in several steps of optimizers, none of
    which has trained rows of the embedding so far. Every step calls this at its end while `unattached` has an
    embedding."""
    for key, reference in list(unattached.items()):
        embedding = reference()
        if embedding is None or all(weight.grad is None for weight in embedding.weights):
            continue
        embedding.steps_without += 1
        if embedding.steps_without == _STEPS_WITHOUT:
            unattached.pop(key, None)
            warn(
                f"embedding {embedding.name!r} has had gradients in {_STEPS_WITHOUT} steps of optimizers, none of which"
                " has trained it so far, so its rows have not changed: if none will, give its parameters to an"
                " optimizer, as in torch.optim.Adam(model.parameters()), or freeze it by"
                " embedding.requires_grad_(False)"
            )


def attach_rows(embedding: WeightOfRows, row_optimizer: RowOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Give every row the state of an optimizer. Users call `oneemb.Optimizer` or `TrainGraph.add_optimizer`.

    Raises:
        ValueError: `size_factor` or `storage_dim` of the store options is too small for the state.
        StorageError: the rows already hold another optimizer's state, or the path is in use.
    """
    needed = row_optimizer.state_width(embedding.embedding_dim)
    state = np.zeros(
        state_width_of(embedding.store_options, embedding.embedding_dim, row_optimizer.name, needed), np.float32
    )
    state[:needed] = row_optimizer.initial_state(embedding.embedding_dim)
    embedding.store.form.attach(row_optimizer.name, state)
    embedding.row_optimizer, embedding.optimizer_ref = row_optimizer, weakref.ref(optimizer)
    unattached.pop(id(embedding), None)


def stand_for_rows(embedding: WeightOfRows, weights: Sequence[torch.nn.Parameter], *, is_kept: bool = True) -> None:
    """Let parameters of another module stand for the rows, in place of `weight`. With one parameter for each table,
    tables can be frozen, or trained with options of their own, by param groups of one optimizer. Call it before the
    first lookup.

    The embedding is then in no list of parameters and no state dict; the other module is.

    Args:
        weights: parameters of shape [0, D], one for each table, or one for all tables.
        is_kept: whether `persistent_path` stays when the other module is gone. If False, no snapshot can be saved.
    """
    assert embedding.ranks.alone or len(weights) == 1, "between ranks all rows have one gradient"
    embedding.rank_snapshots.are_kept = is_kept
    vars(embedding)["_parameters"].pop("weight", None)
    embedding.weights_of_another = tuple(weights)
    for weight in embedding.weights:
        _stand_for(embedding, weight)


def _stand_for(embedding: WeightOfRows, weight: torch.nn.Parameter) -> None:
    weight.__class__ = RowWeight  # another module or torch's tools may have made it
    weight.embedding = _RowsOf(embedding)  # type: ignore[attr-defined]
    weight.register_hook(ops.refuse_dense)


def drop_grads(embedding: WeightOfRows) -> None:
    """Drop the gradients of rows."""
    for weight in embedding.weights:
        weight.grad = None


class _RowsOf(weakref.ref):
    """Weak reference of a weight to its embedding, which refuses to be pickled."""

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(
            "the weight of an embedding, or an optimizer or list that holds the weight, cannot be pickled: save"
            " state_dict() of the model and of the optimizer"
        )


def _why_no_gpu(failure: BaseException) -> str:
    """Text of the reason why no GPU can be used, with the package to install if it is known."""
    from oneemb.kernels.launch import Gpu

    try:
        Gpu()
    except (ImportError, RuntimeError) as reason:
        return str(reason)
    return str(failure)


# ---- uses of the weight that are errors ------------------------------------------------------------------------------

_TENSOR: Any = torch.Tensor  # Any: torch declares the properties of this class as attributes.

_GIVE_VALUES = (
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "set_", "uniform_", "zero_", "__setitem__",
)  # fmt: skip
"""Methods that overwrite the values of a tensor."""

_CHANGE_VALUES = (
    "add_", "addcdiv_", "addcmul_", "clamp_", "clamp_max_", "clamp_min_", "div_", "index_add_", "index_copy_",
    "index_fill_", "index_put_", "lerp_", "masked_fill_", "masked_scatter_", "mul_", "neg_", "put_", "renorm_",
    "scatter_", "scatter_add_", "sub_", "__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__",
)  # fmt: skip
"""Methods that change the values of a tensor, depending on its old values."""

_READ_VALUES = frozenset(
    "_cdist_forward _embedding_bag _euclidean_dist addbmm addmm addmv adjoint baddbmm bmm cdist cosine_similarity dist"
    " dot einsum embedding embedding_bag expand gather index index_select inner linalg_matrix_norm linalg_norm"
    " linalg_vector_norm linear mH mT matmul matrix_H mm moveaxis movedim mv norm numpy_T permute select swapaxes"
    " swapdims t take take_along_dim tensordot transpose unbind unsqueeze".split()
)
"""Names of aten ops that read rows of a matrix. Optimizers and trainers call none of them on all parameters."""

_PRODUCTS = frozenset(
    "__matmul__ __rmatmul__ addmm bmm cdist einsum embedding embedding_bag linear matmul mm mv".split()
)
"""Names of torch functions that read rows of a matrix. No tool calls them on the data of all parameters."""


def refuse_values(name: str, what: str) -> Never:
    """Raise RuntimeError with the text of `changes_no_row`."""
    raise RuntimeError(changes_no_row(name, what))


def changes_no_row(name: str, what: str) -> str:
    """Text of the error for a write of values to the weight of embedding `name`. `what` names the write."""
    return (
        f"{what} would change no row of embedding {name!r}, whose weight has shape [0, D]: it stands for the rows and"
        " holds none. To initialize new rows, give an initializer, oneemb.make_table(oneemb.make_normal_initializer("
        "...)), or init_fn of a TorchRec config; to import rows such as pretrained vectors, call"
        " oneemb.import_rows(embedding, (ids, vectors)), or load the state_dict() of an embedding"
    )


def _refuse_reads(
    embedding: Callable[[], Any], op: Any, types: object, args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Result of `op`, an aten op on the weight of an embedding; RuntimeError if the op is one of `_READ_VALUES`."""
    name = op._schema.name.partition("::")[2]
    if name in _READ_VALUES:
        refuse_reads(getattr(embedding(), "name", ""), f"{name} of the weight")
    with hidden_from_modes():
        return op(*args, **(kwargs or {}))


def refuse_reads(name: str, what: str) -> Never:
    """Raise RuntimeError for a use of the weight of embedding `name` as a matrix of rows. `what` names the use."""
    raise RuntimeError(
        f"{what} would use no row of embedding {name!r}, whose weight has shape [0, D]: it stands for the rows and"
        " holds none. Look rows up: embedding(ids), or embedding.read(ids) without a gradient. embedding.ids() gives"
        " all ids of a table, so scores of all rows are hidden @ embedding.read(embedding.ids()).T; a loop over norms"
        " of all parameters leaves out parameters whose numel() is 0"
    )


def _refusing(method: str) -> Callable[..., Any]:
    what = "weight[...] = values" if method == "__setitem__" else f"weight.{method}"

    def refuse(self: "_HoldsNone", *args: Any, **kwargs: Any) -> Any:
        if method == "copy_" and args and isinstance(args[0], torch.Tensor) and args[0].nelement() == 0:
            return torch.Tensor.copy_(self, *args, **kwargs)  # load_state_dict copies an empty tensor
        refuse_values(self.name, what)

    return refuse


class _HoldsNone(torch.Tensor):
    """Base class of tensors that stand for rows and hold no values."""

    embedding: Callable[[], Any] = staticmethod(lambda: None)
    """Returns the embedding whose rows the tensor stands for; None = it no longer exists, or the tensor is a copy."""

    @property
    def name(self) -> str:
        """Name of the embedding."""
        embedding = self.embedding()
        return "" if embedding is None else embedding.name

    # torch's compiler traces the methods below as Python code. It cannot trace `sys._getframe`, and would take
    # `_TENSOR.shape` for the property of this class, so the methods answer differently while it traces.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the tensor; an error if an initializer of torch reads it."""
        if is_dynamo_compiling():
            return self.size()
        self._refuse_initializer(sys._getframe(1))
        return _TENSOR.shape.__get__(self)

    def numel(self) -> int:
        """Number of elements, 0; an error if an initializer of torch reads it."""
        if is_dynamo_compiling():
            return self.size().numel()
        self._refuse_initializer(sys._getframe(1))
        return torch.Tensor.numel(self)

    def _refuse_initializer(self, caller: FrameType) -> None:
        # Some of torch's initializers read shape or numel first, and skip a tensor without elements.
        if caller.f_globals.get("__name__") == "torch.nn.init":
            refuse_values(self.name, f"torch.nn.init.{caller.f_code.co_name}(weight)")


class _Dispatching(torch.nn.Parameter):
    """Class with which a weight is made. Torch marks an object of a class that has `__torch_dispatch__`, and from then
    on calls the object's `__torch_dispatch__` for each aten op; an attribute such as `grad` is no op. `begin_weight`
    then gives the object another class and a function of its own, since torch.compile takes no object of a class with
    this method for a tensor."""

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> Never:
        raise AssertionError("the weight has another class when an op sees it")


class RowWeight(torch.nn.Parameter, _HoldsNone):
    """Parameter that stands for rows: a write of values, or a use as a matrix of rows, is an error."""

    def __getitem__(self, index: object) -> Never:
        refuse_reads(self.name, "weight[...]")

    # Torch's own methods refuse an object with a dispatch function.

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Array of shape [0, D]."""
        return self._plain().numpy(force=force)

    def tolist(self) -> Any:
        """Empty list."""
        return self._plain().tolist()

    def _plain(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.detach().as_subclass(torch.Tensor), self.requires_grad)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without gradient, which refuses writes in place, too."""
        if is_dynamo_compiling():
            return torch.Tensor.detach(self)
        return _data_of(_TENSOR.data.__get__(self), self)

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if data.numel():
            refuse_values(self.name, f"weight.data = a tensor of shape {list(data.shape)}")
        _TENSOR.data.__set__(self, data)

    def detach(self) -> torch.Tensor:
        """The tensor without gradient, which refuses writes in place, too."""
        if is_dynamo_compiling():
            return torch.Tensor.detach(self)
        return _data_of(torch.Tensor.detach(self), self)


class _Data(_HoldsNone):
    """Class of `weight.data`, `weight.detach()` and views of these. Copies and other results are ordinary tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _PRODUCTS:
            refuse_reads(next((one.name for one in args if isinstance(one, _Data)), ""), f"{name} of the weight")
        written = kwargs.get("out")
        if name in _ALL and name != "copy_":  # the first argument is written; the method copy_ checks itself
            written = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if isinstance(written, _Data):
            refuse_values(written.name, f"torch.{name} into the weight")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            source = args[0] if args and isinstance(args[0], _Data) else None
            if source is None or name == "as_subclass":
                return found
            if isinstance(found, tuple | list):
                return type(found)(_view_of(one, source) for one in found) if type(found) in (tuple, list) else found
            return _view_of(found, source)

    def detach(self) -> torch.Tensor:
        """The detached tensor, of the same class: torch makes a parameter only of a tensor that keeps its class."""
        return _data_of(torch.Tensor.detach(self), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))


def _data_of(tensor: torch.Tensor, holder: _HoldsNone) -> _Data:
    """`tensor`, which has the memory of `holder`, as a tensor that refuses values."""
    data = tensor.as_subclass(_Data)
    data.embedding = holder.embedding
    return data


def _view_of(found: Any, source: _Data) -> Any:
    """`found`, the result of a function of `source`; if it is a view, as a tensor that refuses values."""
    if not isinstance(found, torch.Tensor):
        return found
    tensor = found
    return _data_of(tensor, source) if tensor._is_view() else tensor


_ALL = {*_GIVE_VALUES, *_CHANGE_VALUES}


for _method in _GIVE_VALUES:
    setattr(_HoldsNone, _method, _refusing(_method))
for _method in _CHANGE_VALUES:
    setattr(_Data, _method, _refusing(_method))
