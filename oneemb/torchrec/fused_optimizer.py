"""Optimizers that step a sharded module's rows in the backward pass, in the form that TorchRec's tools ask for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer

from oneemb.adapters.table_state import TableState, write_back


class _States(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """The state of each table, gathered whenever it is asked for, which every rank does.

    As tensors of a state dict, what is written into it in place reaches the rows: see table_state.py.
    """

    def __init__(self, tables: Mapping[torch.Tensor, TableState]):
        self._tables = tables

    def __getitem__(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        table = self._tables[weight]
        return {f"{table.name}.{name}": part for name, part in table.of_optimizer().items()}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


class FusedRowsOptimizer(FusedOptimizer):
    """The optimizers of tables: rows are updated in the backward pass, with the options that `param_groups` has then.

    Its state has TorchRec's names, `t1.momentum1`, and does not depend on how rows are sharded. Tables that have a path
    have none here: their snapshots hold it.

    Args:
        weights: the tables' parameters, by name.
        tables: their states, in the same order; None on the meta device, where there are no rows.
        optimizers: those that step them.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        tables: Sequence[TableState | None],
        optimizers: Sequence[torch.optim.Optimizer],
    ):
        its = zip(weights.values(), tables, strict=True)
        self._tables: dict[torch.Tensor, TableState] = {weight: table for weight, table in its if table is not None}
        self._states = _States(self._tables)
        super().__init__(weights, self._states, [optimizer.param_groups[0] for optimizer in optimizers])

    def step(self, closure: Any = None) -> None:
        """Does nothing: the backward pass has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: rows keep no gradient."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave. Every rank makes the call, with the same.

        Raises:
            ValueError: the state is that of other tables, or of another optimizer.
        """
        # What is written into it must be there when it is brought into the rows.
        self.state: Mapping[torch.Tensor, dict[str, torch.Tensor]] = dict(self._states)
        try:
            self._check(state_dict["state"])
            super().load_state_dict(state_dict)
        finally:
            self.state = self._states

    def _check(self, state: Mapping[str, Any]) -> None:
        steps: dict[Any, dict[str, float]] = {}
        for name, weight in self.params.items():
            if weight not in self.state or name not in state:
                continue
            its, given = ({key: tuple(part.shape) for key, part in found.items()} for found in (
                self.state[weight], state[name]))  # fmt: skip
            if its != given:
                raise ValueError(
                    f"the state of {name} must be {its}, as its optimizer has it, got {given}: it is that of another"
                    " optimizer, or of a table of another size"
                )
            table = self._tables[weight]
            if (step := state[name].get(f"{table.name}.step")) is not None:
                steps.setdefault(table.rows, {})[table.name] = float(step)
        _check_steps(steps)

    def post_load_state_dict(self) -> None:
        """Bring what was written into the state into the rows. TorchRec's optimizer of a whole model calls it, too.

        Raises:
            ValueError: tables that are one embedding would have different counts of steps; nothing is brought in.
        """
        steps: dict[Any, dict[str, float]] = {}
        for table in self._tables.values():
            if (step := table.written_step) is not None:
                steps.setdefault(table.rows, {})[table.name] = step
        try:
            _check_steps(steps)
        except ValueError:
            for table in self._tables.values():
                table.given.clear()
            raise
        write_back(self._tables.values())


def _check_steps(steps: Mapping[Any, Mapping[str, float]]) -> None:
    """Raise ValueError unless the tables of each embedding have one count of steps."""
    for of_tables in steps.values():
        if len(set(of_tables.values())) > 1:
            raise ValueError(f"tables that are one embedding have one count of steps, got {of_tables}")
