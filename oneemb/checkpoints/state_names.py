"""Parts of a graph by their names in states, which leave out the `.module` of DistributedDataParallel."""

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from oneemb.embeddings.embedding import TableEmbedding, embeddings_of
from oneemb.training.eager import Optimizer
from oneemb.training.row_step import embedding_of


def named_embeddings(graph: torch.nn.Module) -> dict[str, TableEmbedding]:
    """{name in states: embedding} of a graph."""
    plain = _plain_names(graph)
    return {plain(name): embedding for name, embedding in embeddings_of(graph).items()}


def _plain_names(graph: torch.nn.Module) -> Callable[[str], str]:
    """Function that removes the `.module` of DistributedDataParallel from names."""
    wrapped = [name for name, module in graph.named_modules() if isinstance(module, DistributedDataParallel)]
    wrapped.sort(key=len, reverse=True)  # Inner modules come first: their names begin with those of the outer ones.

    def plain(name: str) -> str:
        for outer in wrapped:
            inner = f"{outer}.module"
            if name == inner or name.startswith(f"{inner}."):
                name = outer + name[len(inner) :]
        return name

    return plain


def tensors_of(graph: torch.nn.Module) -> dict[str, torch.Tensor]:
    """{name in states: tensor} of parameters and persistent buffers, without the weights that stand for rows."""
    plain = _plain_names(graph)
    found: dict[str, torch.Tensor] = {
        plain(name): parameter for name, parameter in graph.named_parameters() if embedding_of(parameter) is None
    }
    return found | buffers_of(graph)


def buffers_of(graph: torch.nn.Module) -> dict[str, torch.Tensor]:
    """{name in states: buffer} of persistent buffers."""
    plain = _plain_names(graph)
    return {
        plain(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in graph.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def param_names_of(graph: torch.nn.Module, optimizer: Optimizer) -> list[list[str | None]]:
    """For each param group of an optimizer, the names of its parameters; None = a parameter is not in the graph."""
    plain = _plain_names(graph)
    names = {id(parameter): plain(name) for name, parameter in graph.named_parameters()}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def own_scalers_of(graph: torch.nn.Module) -> dict[str, torch.amp.GradScaler]:
    """{attribute: GradScaler} of the scalers that are attributes of the graph, for use in its `build`."""
    return {name: value for name, value in vars(graph).items() if isinstance(value, torch.amp.GradScaler)}


def with_extra_state(graph: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """{name in states: module} of the modules with extra state, without embeddings."""
    plain = _plain_names(graph)
    of_modules = torch.nn.Module.get_extra_state
    return {
        plain(name): module
        for name, module in graph.named_modules()
        if type(module).get_extra_state is not of_modules and not isinstance(module, TableEmbedding)
    }
