"""Copies a module tree with other modules in place of embeddings. The copy has its own parameters, which training steps
of the tree do not change.

Invariant: nothing of the tree is written to, not even tensors and containers in plain attributes, so an interrupted
copy leaves nothing to restore. The copy of a GradScaler scales and never changes its state. Objects of unknown classes
are shared.
"""

import copy
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from oneemb.graph.modules import is_embedding, not_registered, unregistered_modules
from oneemb.training.scaling import idle_copy, scalers_in

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""{torch's wrapper class: attribute with the wrapped module}. A program contains the wrapped module only."""
_COPIED = {"_parameters", "_buffers", "_modules", "_flat_weights"}


def frozen_copy(
    root: torch.nn.Module, stands_for: Mapping[torch.nn.Module, torch.nn.Module], *, fills: bool = False
) -> torch.nn.Module:
    """Copy of a module in eval mode, without gradients, with other modules in place of embeddings. ValueError if an
    embedding is kept where torch does not find it, or a module cannot be part of a program.

    Args:
        root: the module.
        stands_for: {embedding: module in its place}.
        fills: whether the caller sets all parameters and persistent buffers of the copy. Those on the meta device are
            then on the CPU in the copy.
    """
    for module in root.modules():
        if type(module).__name__ == "AveragedEmbedding":
            raise ValueError(
                "an AveragedEmbedding cannot be exported, since averages of rows are brought up to date by lookups;"
                " export a graph with averaged.copy_to(path) in its place"
            )
    for where, module in unregistered_modules(root):
        if any(is_embedding(one) for one in module.modules()):
            raise ValueError(f"{where}: {not_registered(root, module)}")
    copying = _Copying(stands_for, fills)
    made = copying.module(root)
    copying.finish()
    return made


class _Copying:
    """State of a copy that is being made; `stands_for` and `fills` are those of `frozen_copy`."""

    def __init__(self, stands_for: Mapping[torch.nn.Module, torch.nn.Module], fills: bool):
        self._fills = fills
        self._copies: dict[torch.nn.Module, torch.nn.Module] = {**stands_for}
        self._weights: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._unbound: list[torch.nn.Module] = []
        self._values: dict[int, tuple[object, Any]] = {}  # {id: (original, copy)}; keeping originals keeps ids unique

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The copy of a module; `finish` copies its attributes later."""
        if module in self._copies:
            return self._copies[module]
        wrapped = _WRAPPERS.get(type(module).__name__)
        if wrapped is not None and wrapped in module._modules:
            self._copies[module] = self.module(getattr(module, wrapped))
            return self._copies[module]
        if isinstance(module, torch.jit.ScriptModule):
            if any(one.training for one in module.modules()):
                raise ValueError(
                    "a scripted module must be in eval mode, since a program would keep its training mode; call its"
                    " eval()"
                )
            self._copies[module] = module
            return module
        _check(module)
        made = module.__class__.__new__(module.__class__)
        self._copies[module] = made
        self._unbound.append(made)
        state = dict(vars(module))
        state["training"] = False
        state["_parameters"] = {
            name: None if one is None else self._weight(one) for name, one in module._parameters.items()
        }
        if isinstance(module, torch.nn.RNNBase):  # An RNN also has a list of its parameters.
            state["_flat_weights"] = [state["_parameters"].get(name) for name in module._flat_weights_names]
        state["_buffers"] = {
            name: None if one is None else self._buffer(one, name not in module._non_persistent_buffers_set)
            for name, one in module._buffers.items()
        }
        state["_modules"] = {
            name: None if child is None else self.module(child) for name, child in module._modules.items()
        }
        state["_compiled_call_impl"] = None
        made.__dict__.update(state)
        return made

    def _weight(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Copy of a parameter, the same one for all modules that share the parameter."""
        if parameter not in self._weights:
            self._weights[parameter] = torch.nn.Parameter(self._values_of(parameter), requires_grad=False)
        return self._weights[parameter]

    def _buffer(self, buffer: torch.Tensor, persistent: bool) -> torch.Tensor:
        """Copy of a buffer, the same one wherever the buffer is."""
        if persistent and id(buffer) not in self._values:
            self._kept(buffer, self._values_of(buffer))
        found: torch.Tensor = self._value(buffer)
        return found

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor of the module's state."""
        if self._fills and tensor.is_meta:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        return tensor.detach().clone()

    def finish(self) -> None:
        """Replace attributes of copied modules that refer to modules, methods and tensors of the tree by their
        copies."""
        while self._unbound:  # Modules in plain lists are found here, and appended.
            made = self._unbound.pop()
            for name, value in list(vars(made).items()):
                if name not in _COPIED:
                    vars(made)[name] = self._value(value)

    def _value(self, value: Any) -> Any:
        """Copy of an attribute's value; objects of unknown classes are shared."""
        if isinstance(value, torch.nn.Module):
            return self.module(value)
        if isinstance(value, torch.nn.Parameter):
            return self._weight(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            return _bound(value, self._copies.get(value.__self__, value.__self__))
        if id(value) in self._values:
            return self._values[id(value)][1]
        if scalers_in([value]):
            return self._kept(value, idle_copy(value))
        if isinstance(value, torch.Tensor):
            return self._kept(value, value.detach().clone())
        kind = type(value)
        if kind is tuple:
            return self._kept(value, tuple(self._value(one) for one in value))
        if kind in (list, set, deque):
            found = copy.copy(value)
            self._kept(value, found).clear()
            (found.update if kind is set else found.extend)([self._value(one) for one in value])
            return found
        if kind in (dict, OrderedDict, defaultdict):
            found = self._kept(value, copy.copy(value))
            found.update({key: self._value(one) for key, one in value.items()})
            return found
        return value

    def _kept(self, value: object, found: Any) -> Any:
        self._values[id(value)] = value, found
        return found


def _bound(method: types.MethodType, module: torch.nn.Module) -> Callable[..., Any]:
    """`method` bound to the copy `module`. If the copy is of another class, its own method of that name is used, if it
    has one."""
    bound: Callable[..., Any] = types.MethodType(method.__func__, module)
    return bound if isinstance(module, type(method.__self__)) else getattr(module, method.__name__, bound)


def _check(module: torch.nn.Module) -> None:
    kind, package = type(module).__name__, type(module).__module__
    if kind == "InferenceEmbedding":
        raise ValueError(
            "an InferenceEmbedding cannot be exported, since it maps a file that a program cannot hold; export the"
            " graph with the embedding that was trained, and pass snapshot= for its rows"
        )
    if hasattr(module, "lookups_of"):
        raise ValueError(
            f"{package}.{kind} cannot be exported, since it takes KeyedJaggedTensors, which a program of tensors cannot"
            " take; quantize the model by TorchRec's functions, or look up in MultiTableEmbedding with offsets"
        )
