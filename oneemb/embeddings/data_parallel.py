"""Embeddings inside a module that torch's DistributedDataParallel wraps.

DistributedDataParallel averages dense gradients. Ranks that own rows together reduce the gradients of rows themselves,
in the optimizer's step, so a hook leaves the weights of embeddings out of DistributedDataParallel, as
`_ddp_params_and_buffers_to_ignore` would. Torch calls the hook where a module gets a submodule. The constructor of
DistributedDataParallel registers the wrapped module after it has listed the parameters and before it uses the list.
"""

from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from oneemb.embeddings.weight_of_rows import RowWeight, WeightOfRows


def check_lookup_in_ddp(embedding: WeightOfRows) -> None:
    """Check a lookup that gives a gradient: in the forward pass of a DistributedDataParallel, ranks must train the same
    rows, and must all make the lookup.

    Raises:
        RuntimeError: one of these does not hold.
    """
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    if any(parameter is weight for parameter in ddp._module_parameters for weight in embedding.weights):
        raise RuntimeError(_not_shared(embedding, "rows of its own in each process"))
    if ddp._join_config.enable and not embedding.ranks.alone:
        raise RuntimeError(
            f"embedding {embedding.name!r} must not be looked up under DistributedDataParallel.join(), where a rank"
            " without batches makes no lookup and the others would wait for it; end the loop on all ranks at the"
            " same step, or pass empty batches, ids of shape [0, T], to the ranks without batches"
        )


def _leave_out_rows(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Hook of every registration of a submodule: leave the weights of embeddings out of a DistributedDataParallel that
    is being made around `module`."""
    if not isinstance(parent, DistributedDataParallel) or name != "module" or module is None:
        return
    ddp: Any = parent  # Any: torch declares some of the attributes as Tensor | Module.
    left_out = set()
    for prefix, submodule in module.named_modules():
        for short, tensor in submodule.named_parameters(recurse=False):
            if isinstance(tensor, RowWeight) and _is_shared(tensor, ddp.process_group):
                left_out.add(tensor)
                tensor._ddp_ignored = True  # type: ignore[attr-defined]  # Its mixed precision reads this.
                # Torch looks a parameter of the wrapped module itself up as "weight" and as ".weight".
                ddp.parameters_to_ignore |= {f"{prefix}.{short}", f"{prefix}.{short}".lstrip(".")}
    if left_out:
        ddp._module_parameters = [parameter for parameter in ddp._module_parameters if parameter not in left_out]
        if not any(parameter.requires_grad for parameter in ddp._module_parameters):
            raise RuntimeError(
                "DistributedDataParallel must get a module with dense parameters, got one whose parameters all stand"
                " for rows of embeddings, which the ranks train together already; use the module as it is"
            )


def _is_shared(weight: RowWeight, group: "torch.distributed.ProcessGroup") -> bool:
    """Whether the ranks of `group` own the rows together. False for rows of each process that are not trained.

    Raises:
        RuntimeError: rows that are trained would differ between the ranks of `group`.
    """
    embedding: WeightOfRows | None = weight.embedding()
    if embedding is None:
        return False
    alone = embedding.ranks.alone
    owners = {torch.distributed.get_rank()} if embedding.ranks.alone else _global_ranks(embedding.ranks.group)
    if set(_global_ranks(group)) <= set(owners):
        return True
    if alone and not embedding.is_trained:
        return False
    raise RuntimeError(
        _not_shared(
            embedding,
            "rows of its own in each process"
            if alone
            else f"rows of ranks {sorted(owners)} alone, and gradients are averaged over ranks {_global_ranks(group)}",
        )
    )


def _global_ranks(group: "torch.distributed.ProcessGroup") -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _not_shared(embedding: WeightOfRows, rows: str) -> str:
    return (
        f"embedding {embedding.name!r} inside DistributedDataParallel has {rows}, so the ranks would train different"
        " rows; make it with process_group= the group of DistributedDataParallel, such as"
        " torch.distributed.group.WORLD, so that the ranks own the rows together. To TorchRec's"
        " DistributedModelParallel, pass sharders=oneemb.torchrec.get_default_sharders()"
    )


register_module_module_registration_hook(_leave_out_rows)
