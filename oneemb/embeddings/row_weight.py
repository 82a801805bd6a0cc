"""Parameter that stands for the rows of an embedding, [0, D]; a write of values to it is an error.

The parameter holds no row: an initializer, a copy or an assignment would change none, silently. So would a write into
`weight.data`, `weight.detach()` or a view of these. Arithmetic on the parameter itself is allowed, since optimizers do
it, with gradients of zeros too; it changes nothing.
"""

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Never

import torch
from torch.compiler import is_dynamo_compiling

_TENSOR: Any = torch.Tensor  # Any: its properties are declared as attributes.

_GIVE_VALUES = (
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "set_", "uniform_", "zero_", "__setitem__",
)  # fmt: skip
"""Methods that give a tensor values which do not depend on those it has."""

_CHANGE_VALUES = (
    "add_", "addcdiv_", "addcmul_", "clamp_", "clamp_max_", "clamp_min_", "div_", "index_add_", "index_copy_",
    "index_fill_", "index_put_", "lerp_", "masked_fill_", "masked_scatter_", "mul_", "neg_", "put_", "renorm_",
    "scatter_", "scatter_add_", "sub_", "__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__",
)  # fmt: skip
"""Methods that change the values which a tensor has."""


def refuse_values(name: str, what: str) -> Never:
    """Raise RuntimeError with the text of `changes_no_row`."""
    raise RuntimeError(changes_no_row(name, what))


def changes_no_row(name: str, what: str) -> str:
    """Text of the error for a write of values to the weight of an embedding.

    Args:
        name: name of the embedding.
        what: the write, as the error names it.
    """
    return (
        f"{what} would change no row of embedding {name!r}, whose weight has shape [0, D]: it stands for the rows and"
        " holds none. For new rows give an initializer, oneemb.make_table(oneemb.make_normal_initializer(...)), or"
        " init_fn of a TorchRec config; bring rows such as pretrained vectors in by"
        " oneemb.import_rows(embedding, (ids, vectors)) or load_state_dict of what state_dict of an embedding gave"
    )


def _refusing(method: str) -> Callable[..., Any]:
    what = "weight[...] = values" if method == "__setitem__" else f"weight.{method}"

    def refuse(self: "_HoldsNone", *args: Any, **kwargs: Any) -> Any:
        if method == "copy_" and args and isinstance(args[0], torch.Tensor) and args[0].nelement() == 0:
            return torch.Tensor.copy_(self, *args, **kwargs)  # load_state_dict does.
        refuse_values(self.name, what)

    return refuse


class _HoldsNone(torch.Tensor):
    """A tensor that stands for rows."""

    embedding: Callable[[], Any] = staticmethod(lambda: None)
    """Returns the embedding whose rows the tensor stands for; None = it is gone, or the tensor is a copy."""

    @property
    def name(self) -> str:
        """Name of the embedding."""
        embedding = self.embedding()
        return "" if embedding is None else embedding.name

    # torch's compiler traces the methods below as Python code. It cannot trace `sys._getframe`, and it would take
    # `_TENSOR.shape` for this class's own property again: while it traces, other methods answer.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the tensor."""
        if is_dynamo_compiling():
            return self.size()
        self._refuse_initializer(sys._getframe(1))
        return _TENSOR.shape.__get__(self)

    def numel(self) -> int:
        """Number of elements."""
        if is_dynamo_compiling():
            return self.size().numel()
        self._refuse_initializer(sys._getframe(1))
        return torch.Tensor.numel(self)

    def _refuse_initializer(self, caller: FrameType) -> None:
        # Some of torch's initializers read shape or numel first, and skip a tensor without elements.
        if caller.f_globals.get("__name__") == "torch.nn.init":
            refuse_values(self.name, f"torch.nn.init.{caller.f_code.co_name}(weight)")


class RowWeight(torch.nn.Parameter, _HoldsNone):
    """A parameter that stands for rows, and refuses values."""

    @property
    def data(self) -> torch.Tensor:
        """The tensor without gradient; writes to it in place are refused too."""
        if is_dynamo_compiling():
            return torch.Tensor.detach(self)
        return _data_of(_TENSOR.data.__get__(self), self)

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if data.numel():
            refuse_values(self.name, f"weight.data = a tensor of shape {list(data.shape)}")
        _TENSOR.data.__set__(self, data)

    def detach(self) -> torch.Tensor:
        """The tensor without gradient; writes to it in place are refused too."""
        if is_dynamo_compiling():
            return torch.Tensor.detach(self)
        return _data_of(torch.Tensor.detach(self), self)


class _Data(_HoldsNone):
    """Tensor that `weight.data`, `weight.detach()` and views of these give. Copies, and other results, are ordinary
    tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        written = kwargs.get("out")
        if name in _ALL and name != "copy_":  # of which the method has decided
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
        """The tensor, detached, of the same class: torch makes no parameter of a tensor that loses its class."""
        return _data_of(torch.Tensor.detach(self), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))


def _data_of(tensor: torch.Tensor, holder: _HoldsNone) -> _Data:
    """A tensor of the holder's memory that refuses values."""
    data = tensor.as_subclass(_Data)
    data.embedding = holder.embedding
    return data


def _view_of(found: Any, source: _Data) -> Any:
    """Result of a function; a view of `source` refuses values."""
    if not isinstance(found, torch.Tensor):
        return found
    tensor = found
    return _data_of(tensor, source) if tensor._is_view() else tensor


_ALL = {*_GIVE_VALUES, *_CHANGE_VALUES}


for _method in _GIVE_VALUES:
    setattr(_HoldsNone, _method, _refusing(_method))
for _method in _CHANGE_VALUES:
    setattr(_Data, _method, _refusing(_method))
