"""A copy of a module tree in which other modules stand for embeddings. It has the memory of the tree's parameters.

Invariant: nothing of the tree that is copied is written to, so that nothing need be put back, whatever interrupts.
"""

import types
from collections.abc import Mapping

import torch

from oneemb.graph.modules import is_embedding, say_not_registered, unregistered_modules

__all__ = ["frozen_copy"]

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Of torch, and what they wrap: what they add has no place in a program."""


def frozen_copy(
    root: torch.nn.Module, stands_for: Mapping[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:  # fmt: skip
    """The module as it is in eval mode, with others in place of embeddings, buffers of its own, and parameters without
    gradient that share the memory of its.

    Raises:
        ValueError: an embedding is kept where torch does not know of it, or a module cannot be part of a program.
    """
    for where, module in unregistered_modules(root):
        if any(is_embedding(one) for one in module.modules()):
            raise ValueError(f"{where}: {say_not_registered(root, module)}")
    copies: dict[torch.nn.Module, torch.nn.Module] = {**stands_for}
    copy = _copied(root, copies, {})
    for one in copies.values():
        _bind(one, copies)
    return copy


_Weights = dict[torch.nn.Parameter, torch.nn.Parameter]


def _copied(
    module: torch.nn.Module, copies: dict[torch.nn.Module, torch.nn.Module], weights: _Weights
) -> torch.nn.Module:  # fmt: skip
    if module in copies:
        return copies[module]
    wrapped = _WRAPPERS.get(type(module).__name__)
    if wrapped is not None and wrapped in module._modules:
        copies[module] = _copied(getattr(module, wrapped), copies, weights)
        return copies[module]
    if isinstance(module, torch.jit.ScriptModule):
        if any(one.training for one in module.modules()):
            raise ValueError("a scripted module is in training mode, which a program would keep; call its eval()")
        copies[module] = module
        return module
    _check(module)
    copy = module.__class__.__new__(module.__class__)
    copies[module] = copy
    state = dict(vars(module))
    state["training"] = False
    state["_parameters"] = {
        name: None if one is None else _weight(one, weights) for name, one in module._parameters.items()
    }
    if isinstance(module, torch.nn.RNNBase):  # It has a list of its parameters as well.
        state["_flat_weights"] = [state["_parameters"].get(name) for name in module._flat_weights_names]
    state["_buffers"] = {name: None if one is None else one.detach().clone() for name, one in module._buffers.items()}
    state["_modules"] = {
        name: None if child is None else _copied(child, copies, weights) for name, child in module._modules.items()
    }
    state["_compiled_call_impl"] = None
    copy.__dict__.update(state)
    return copy


def _weight(parameter: torch.nn.Parameter, weights: _Weights) -> torch.nn.Parameter:
    """A parameter that several modules have stays one."""
    if parameter not in weights:
        weights[parameter] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
    return weights[parameter]


def _check(module: torch.nn.Module) -> None:
    kind, package = type(module).__name__, type(module).__module__
    if kind == "InferenceEmbedding":
        raise ValueError(
            "an InferenceEmbedding maps a file that a program cannot hold; export the graph with the embedding that was"
            " trained, and snapshot= for its rows"
        )
    if hasattr(module, "lookups_of"):
        raise ValueError(
            f"{package}.{kind} takes KeyedJaggedTensors, which a program of tensors cannot; quantize the model as"
            " TorchRec has it, or look up in MultiTableEmbedding with offsets"
        )


def _bind(copy: torch.nn.Module, copies: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
    """Let what the copy has of others, methods and modules that are no children, be of their copies."""
    for name, value in list(vars(copy).items()):
        if isinstance(value, torch.nn.Module) and value in copies:
            vars(copy)[name] = copies[value]
        elif isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            vars(copy)[name] = types.MethodType(value.__func__, copies.get(value.__self__, value.__self__))
