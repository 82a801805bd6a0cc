"""Optimizers of rows for the optimizers that TorchRec's users name, and the form in which TorchRec's tools see them.

    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, parameters, {"lr": 0.1})      a class and its arguments
    EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM, ...})        FBGEMM's names

FBGEMM's options that choose among its ways to compute the same (caches, bounds checks, precisions of caches) are
accepted and have no effect. Those that change results are followed or refused by name.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec import optim as torchrec_optim
from torchrec.optim import rowwise_adagrad
from torchrec.optim.fused import FusedOptimizer

from oneemb.adapters.table_state import TableState, write_back
from oneemb.graph.row_optimizers import OPTIMIZERS

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

_KNOWN = {name: (cls, known) for cls, known in OPTIMIZERS.items() for name in known.fbgemm}
"""Optimizers and the names of their classes, by the values of FBGEMM's EmbOptimType."""

_PLACEHOLDERS: dict[type, str] = {
    getattr(torchrec_optim, known.torchrec): known.fbgemm[-1] for known in OPTIMIZERS.values() if known.torchrec
}
"""TorchRec's classes, which stand for FBGEMM's."""

# FBGEMM's defaults, which are not torch's; and of lr there is one for all.
_DEFAULTS = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0}

_NO_EFFECT = {
    "bounds_check_mode", "cache_algorithm", "cache_load_factor", "cache_precision", "cache_reserved_memory",
    "cache_sets", "gather_uvm_cache_stats", "embedding_table_index_type", "embedding_table_offset_type", "enforce_hbm",
    "multipass_prefetch_config", "output_dtype", "prefetch_pipeline", "record_cache_metrics", "stats_reporter_config",
    "stochastic_rounding", "use_experimental_tbe", "uvm_host_mapped", "uvm_non_rowwise_momentum", "weights_precision",
}  # fmt: skip
"""Options that say how FBGEMM computes, or where it keeps rows; rounding is to nearest here."""

_OFF = {
    "gradient_clipping": False, "max_norm": 0.0, "global_weight_decay": None, "counter_based_regularization": None,
    "cowclip_regularization": None, "ensemble_mode": None, "emainplace_mode": None, "extra_optimizer_config": None,
    "optimizer_state_dtypes": None, "enable_raw_embedding_streaming": False,
}  # fmt: skip
"""Options that change what is computed and are not followed, with the values that turn them off."""


def from_fused_params(fused_params: Mapping[str, Any]) -> MakeOptimizer:
    """Function that makes the optimizer of FBGEMM's options; SGD at rate 0.01 if they name none, as FBGEMM does.

    Args:
        fused_params: `optimizer`, an EmbOptimType or its value, `learning_rate`, `eps`, `beta1`, `beta2`,
            `weight_decay`, `momentum`, `eta`, as FBGEMM's operator takes them; and for Adagrad
            `initial_accumulator_value`.

    Raises:
        ValueError: an optimizer or an option that rows cannot follow; the message names it.
    """
    given = dict(fused_params)
    asked = given.pop("optimizer", EmbOptimType.EXACT_SGD)
    name = asked.value if isinstance(asked, EmbOptimType) else str(asked)
    if name not in _KNOWN:
        raise ValueError(f"fused_params: optimizer {name!r} is not one of {', '.join(_KNOWN)}")
    for option in [option for option in given if option in _NO_EFFECT or option.startswith("__register")]:
        del given[option]
    for option in [option for option in given if option in _OFF]:
        if given[option] != _OFF[option]:
            raise ValueError(f"fused_params: {option}={given[option]!r} is not supported; leave it out")
        del given[option]
    given.pop("max_gradient", None)  # which FBGEMM reads with gradient_clipping alone
    mode = given.pop("weight_decay_mode", WeightDecayMode.NONE)
    decay_mode = (mode if isinstance(mode, WeightDecayMode) else WeightDecayMode(mode)).name
    if decay_mode not in ("NONE", "L2", "DECOUPLE"):
        raise ValueError(f"fused_params: weight_decay_mode {decay_mode} is not supported; use L2")
    if "lr" in given and "learning_rate" in given:
        raise ValueError("fused_params: lr and learning_rate are the same; give one of them")
    options = dict(_DEFAULTS)
    for theirs, ours in [("learning_rate", "lr"), ("lr", "lr")]:
        if theirs in given:
            options[ours] = given.pop(theirs)
    if "beta1" in given or "beta2" in given:
        given["betas"] = (given.pop("beta1", 0.9), given.pop("beta2", 0.999))
    unknown = sorted(set(given) - {"eps", "betas", "weight_decay", "momentum", "eta", "initial_accumulator_value"})
    if unknown:
        raise ValueError(f"fused_params: unknown options {unknown}")
    cls, known = _KNOWN[name]
    for option, default in [
        ("weight_decay", 0.0), ("betas", (0.9, 0.999)), ("momentum", 0.9), ("eta", 0.001),
        ("initial_accumulator_value", 0.0),
    ]:  # fmt: skip
        if given.get(option) and given[option] != default and option not in known.fbgemm_options:
            raise ValueError(f"fused_params: {option} has no effect on {name!r} in FBGEMM, and none here; leave it out")
        if option == "weight_decay" and given.get(option) and "adagrad" in name and decay_mode not in ("NONE", "L2"):
            raise ValueError(f"fused_params: weight_decay_mode {decay_mode} is not supported; use L2")
    kind, options = pkgutil.resolve_name(cls), options | given
    own = {option: options[option] for option in known.fbgemm_options if option in options}
    return lambda parameters: kind(parameters, **own)


def from_classes(classes: Sequence[type], options: Sequence[Mapping[str, Any]]) -> MakeOptimizer:
    """Function that makes the optimizer that a parameter was given by `apply_optimizer_in_backward`. ValueError if that
    was called twice, or has an option that rows cannot follow."""
    if len(classes) > 1:
        raise ValueError("apply_optimizer_in_backward was called twice for a table, which one optimizer steps")
    cls: Any = classes[0]
    if (name := _PLACEHOLDERS.get(cls)) is not None:
        # The one class that is no placeholder has defaults of its own.
        defaults = {"lr": 1e-2, "eps": 1e-10} if cls is rowwise_adagrad.RowWiseAdagrad else {}
        return from_fused_params({"optimizer": name, **defaults, **_fbgemm_names(options[0])})
    return lambda parameters: cls(parameters, **options[0])


def _fbgemm_names(options: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")
    for name, off in [("lr_decay", 0.0), ("maximize", False)]:
        if options.pop(name, off) != off:
            raise ValueError(f"apply_optimizer_in_backward: {name} of TorchRec's optimizers is not supported")
    return options


def row_stepper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Optimizer that steps rows as this one, of torch or TorchRec, says."""
    kind = type(optimizer)
    if kind not in _PLACEHOLDERS:
        return optimizer
    if kind is rowwise_adagrad.RowWiseAdagrad:
        group = optimizer.param_groups[0]
        parameters = group["params"]
        options = {name: value for name, value in group.items() if name in optimizer.defaults}
    else:  # A placeholder has no groups.
        parameters, options = list(optimizer._params), optimizer._kwargs  # type: ignore[attr-defined]
    return from_classes([kind], [options])(parameters)


def same_optimizer(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer of another parameter, with the class, the options and the defaults of `optimizer`."""
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    made = make([{**optimizer.param_groups[0], "params": [parameter]}])
    # Some options are read from here alone, as Adagrad's initial_accumulator_value is.
    made.defaults = dict(optimizer.defaults)
    return made


def options_now(optimizer: torch.optim.Optimizer, stepper: torch.optim.Optimizer) -> dict[str, Any]:
    """Options of `stepper`, which `row_stepper` gave, with the values of the users' optimizer at this step."""
    if stepper is optimizer or not hasattr(optimizer, "param_groups"):
        return stepper.param_groups[0]
    own = stepper.param_groups[0]
    return {name: optimizer.param_groups[0].get(name, value) for name, value in own.items()}


class _States(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """State of each table, gathered on each access, which every rank makes. Values that are written into its tensors
    reach the rows: see table_state.py."""

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
    """Optimizers of tables: rows are updated in the backward pass, with the options in `param_groups` at that time.

    Its state has TorchRec's names, `t1.momentum1`, and does not depend on how rows are sharded. Tables that have a path
    have no state here: their snapshots hold it.

    Args:
        weights: the tables' parameters, by name.
        tables: their states, in the same order; None on the meta device, where there are no rows.
        optimizers: of the tables.
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
        """No effect: the backward pass has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """No effect: rows keep no gradient."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a dict that `state_dict` gave. Every rank makes the call, with the same dict. ValueError if the state is
        that of other tables, or of another optimizer."""
        # The tensors must live until their values are brought into the rows.
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
        """Bring values that were written into the state into the rows. TorchRec's optimizer of a whole model calls it,
        too. ValueError, and no change, if tables that are one embedding would have different counts of steps."""
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
