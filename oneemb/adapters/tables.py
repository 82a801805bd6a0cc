"""Tables of another library's module: each has a parameter that stands for its rows, and an optimizer that steps the
rows.

table = TableParameter(config, dtype, device)           `weight` is [0, D]; `serves` sets the entry in state dicts
stand_for_rows(rows, [table.weight, ...], is_kept=...)  a user's optimizer of these weights steps the rows
step_in_backward(rows, weight, optimizer, is_kept=...)  or the backward pass steps them
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import distributed

from oneemb.adapters.table_state import TableConfig, TableState, load_together
from oneemb.embeddings.embedding import MultiTableEmbedding
from oneemb.embeddings.internals import stand_for_rows
from oneemb.graph.one_rank import ALONE
from oneemb.graph.ranks import AnyRanks, Ranks
from oneemb.graph.row_optimizers import Group as Options
from oneemb.storage.errors import StorageError
from oneemb.training.eager import Optimizer


class TableParameter(torch.nn.Module):
    """Module of one table in a collection; its parameter `weight` [0, D] stands for the rows."""

    def __init__(self, config: TableConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.weight = torch.nn.Parameter(torch.empty(0, config.embedding_dim, device=device, dtype=torch.float32))
        self._dtype = dtype
        self._state: Callable[[], TableState] | None = None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the optimizer that steps the table in the backward pass, in the attributes of the weight that
        TorchRec's tools and torch's `_apply_optimizer_in_backward` read."""
        vars(self.weight).update(
            _in_backward_optimizers=[optimizer], _optimizer_classes=[type(optimizer)],
            _optimizer_kwargs=[dict(optimizer.defaults)],
        )  # fmt: skip

    def serves(self, state: Callable[[], TableState]) -> None:
        """Set the function that returns the table's current state; it is called when a state dict is taken or
        loaded."""
        self._state = state

    def state_now(self) -> TableState | None:
        """Current state of the table; None on the meta device."""
        return None if self._state is None else self._state()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # module.half() changes no rows, so it must not change the weight that stands for them.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self._state is not None:
            destination[f"{prefix}weight"] = self._state().give()
            return
        # The meta device has no rows.
        destination[f"{prefix}weight"] = torch.empty(
            self.num_embeddings, self.embedding_dim, dtype=self._dtype, device=self.weight.device
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: object, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key != f"{prefix}weight"]
        state = state_dict.get(f"{prefix}weight")
        if state is None:
            missing_keys.append(f"{prefix}weight")
        elif self._state is None:
            warnings.warn(
                f"{prefix}weight is on the meta device and has no rows, so a load into it has no effect; move the"
                " collection first, by to_empty(device='cpu')",
                stacklevel=2,
            )
        else:
            try:
                self._state().load(state)
            except (StorageError, TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}weight: {error}")


def holder_of(tables: Mapping[str, torch.nn.Module]) -> torch.nn.ModuleDict:
    """Module of tables by name. Tables whose entries in a state dict name the same snapshot are loaded together."""
    holder = torch.nn.ModuleDict(dict(tables))
    holder.register_load_state_dict_pre_hook(_load_together)
    return holder


def _load_together(holder: Any, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    named = [(name, table.state_now()) for name, table in holder.items() if isinstance(table, TableParameter)]
    load_together((state, state_dict.get(f"{prefix}{name}.weight")) for name, state in named if state is not None)


def in_backward_optimizers(weight: torch.Tensor) -> tuple[torch.optim.Optimizer, ...]:
    """Optimizers that torch's `_apply_optimizer_in_backward` gave the parameter."""
    return tuple(getattr(weight, "_in_backward_optimizers", ()))


def step_in_backward(
    rows: MultiTableEmbedding, weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer,
    options: Callable[[], Sequence[Options | None]] | None = None, *, is_kept: bool,
) -> Optimizer:  # fmt: skip
    """Step the rows of all tables of `rows` together, in each backward pass.

    Args:
        weight: parameter that stands for all rows. No module may list it, so that no other optimizer steps the rows.
        optimizer: optimizer of this weight only; says how rows are stepped.
        options: returns the options of each table at each step, None for a table that is not trained. If `options`
            itself is None, all tables use the options of `optimizer`.
        is_kept: whether the rows live in a path of the user's.

    Returns:
        The optimizer of rows. It steps them as long as the caller keeps it.
    """
    stand_for_rows(rows, [weight], is_kept=is_kept)
    stepping = Optimizer(optimizer, [rows], fused=True)
    if options is not None:
        stepping.row_step.groups_of_tables = options
    return stepping


def ranks_of_job() -> AnyRanks:
    """Ranks of the default process group, with their own connections; this process alone if there is no group. Every
    rank makes the call."""
    started = distributed.is_available() and distributed.is_initialized()
    group = distributed.group.WORLD if started else None
    return ALONE if group is None or group.size() == 1 else Ranks(group).again()
