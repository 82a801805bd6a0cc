"""Tensors that hold the rows of a sharded module's tables: the weights, and the optimizer state of each row."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from oneemb.tde.row_adam import RowAdam


def table_tensors(
    path: str, module: torch.nn.Module, params_plan: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, list[torch.Tensor]]:
    """{table: [weights, parts of the optimizer state]}: tensors that share memory with the module and its optimizer.

    Args:
        path: path of the module, for messages.
        module: TorchRec's sharded collection.
        params_plan: {table: its ParameterSharding}.
        optimizers: the user's optimizers of data-parallel tables; the module's own optimizer steps the other tables.

    Raises:
        ValueError: the module is not TorchRec's, or has other tables than its plan.
    """
    if type(module).__module__.startswith("oneemb."):
        raise ValueError(
            f"module {path!r} must be TorchRec's, got {type(module).__name__} of oneemb, whose tables grow by"
            " themselves and take any id; train it on the loader as it is"
        )
    states = module.fused_optimizer.state_dict()["state"]  # type: ignore[union-attr]
    parameters = dict(module.named_parameters())
    found: dict[str, list[torch.Tensor]] = {}
    for key, tensor in module.state_dict().items():
        # embeddings.NAME.weight or embedding_bags.NAME.weight
        words = key.split(".")
        table = ".".join(words[1:-1])
        if len(words) < 3 or table not in params_plan or words[-1] != "weight":
            continue
        if not isinstance(tensor, ShardedTensor) and hasattr(tensor, "placements"):
            raise ValueError(
                f"table {table} of module {path!r} must be a ShardedTensor or, where all ranks have it, a tensor, got"
                f" {type(tensor).__name__}; make the sharding environment without output_dtensor"
            )
        state = {name.removeprefix(f"{table}."): part for name, part in states.get(key, {}).items()}
        if isinstance(tensor, ShardedTensor):
            names = [name for name, part in state.items() if isinstance(part, ShardedTensor)]
        else:
            state = _dense_state(parameters.get(key), optimizers)
            names = [
                name for name, part in state.items() if torch.is_tensor(part) and part.shape[:1] == tensor.shape[:1]
            ]
        found[table] = [tensor, *(state[name] for name in sorted(names))]
    if set(found) != set(params_plan):
        raise ValueError(
            f"module {path!r} must have the tables of its plan, {sorted(params_plan)}, got {sorted(found)}"
        )
    return found


def check_optimizers(
    path: str, module: torch.nn.Module, params_plan: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Raise ValueError unless the optimizer state of every row is known: the user's optimizer of each data-parallel
    table must be given, and must not change rows without a gradient."""
    parameters = dict(module.named_parameters())
    for key, tensor in module.state_dict().items():
        table = ".".join(key.split(".")[1:-1])
        if isinstance(tensor, ShardedTensor) or table not in params_plan:
            continue
        holding = [optimizer for optimizer in optimizers if _group_of(parameters.get(key), optimizer) is not None]
        if not holding:
            raise ValueError(
                f"table {table} of module {path!r} is data-parallel, so the optimizer that trains it must be given, got"
                f" none; pass it, as ps_config={{'optimizers': [optimizer]}}, so that its state travels with rows, or"
                " shard the table otherwise"
            )
        for optimizer in holding:
            _check_rests(table, optimizer, _group_of(parameters.get(key), optimizer) or {})


def new_states(module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """{table: value that fills the optimizer state of a new row}. Tables that the dict lacks, such as those that
    FBGEMM's optimizers step, have 0."""
    adagrads = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Adagrad)]
    return {
        ".".join(key.split(".")[1:-1]): float(adagrad.defaults["initial_accumulator_value"])
        for key, parameter in module.named_parameters()
        for adagrad in adagrads
        if _group_of(parameter, adagrad) is not None
    }


def _check_rests(table: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise ValueError if the optimizer changes rows without a gradient, since rows on a server cannot change."""
    rests = (
        isinstance(optimizer, RowAdam)
        or isinstance(optimizer, torch.optim.SGD) and not group["momentum"] and not group["weight_decay"]
        or isinstance(optimizer, torch.optim.Adagrad) and not group["weight_decay"]
    )  # fmt: skip
    if not rests:
        raise ValueError(
            f"the optimizer of table {table}, {type(optimizer).__name__}, moves rows that have no gradient, but rows on"
            " a server cannot follow; use SGD without momentum and weight decay, Adagrad without weight decay, or"
            " oneemb.tde.RowAdam"
        )


def _dense_state(
    parameter: torch.Tensor | None, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    for optimizer in optimizers:
        for held in (held for group in optimizer.param_groups for held in group["params"]):
            if _same(held, parameter):
                return dict(optimizer.state[held])
    return {}


def _group_of(parameter: torch.Tensor | None, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
    for group in optimizer.param_groups:
        if any(_same(held, parameter) for held in group["params"]):
            return dict(group)
    return None


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors share their memory; TorchRec makes several parameters of one table."""
    return other is not None and one.data_ptr() == other.data_ptr() and one.shape == other.shape
