"""Translation of TorchRec's and FBGEMM's optimizers to optimizers of rows, and the state of those for TorchRec's tools.

    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, parameters, {"lr": 0.1})      a class and its arguments
    EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM, ...})        FBGEMM's names

FBGEMM's options that choose how a result is computed (caches, bounds checks, precisions of caches) are accepted and
have no effect. Options that change results are followed, or refused by name.
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
"""{value of FBGEMM's EmbOptimType: (path of the optimizer's class, its description)}."""

_PLACEHOLDERS: dict[type, str] = {
    getattr(torchrec_optim, known.torchrec): known.fbgemm[-1] for known in OPTIMIZERS.values() if known.torchrec
}
"""{optimizer class of TorchRec: value of EmbOptimType}, for classes that only name an optimizer of FBGEMM."""

# FBGEMM's defaults, which differ from torch's. All optimizers have the same lr.
_DEFAULTS = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0}

_NO_EFFECT = {
    "bounds_check_mode", "cache_algorithm", "cache_load_factor", "cache_precision", "cache_reserved_memory",
    "cache_sets", "gather_uvm_cache_stats", "embedding_table_index_type", "embedding_table_offset_type", "enforce_hbm",
    "multipass_prefetch_config", "output_dtype", "prefetch_pipeline", "record_cache_metrics", "stats_reporter_config",
    "stochastic_rounding", "use_experimental_tbe", "uvm_host_mapped", "uvm_non_rowwise_momentum", "weights_precision",
}  # fmt: skip
"""Options that say how FBGEMM computes, or where it keeps rows. They have no effect: oneemb rounds to nearest."""

_OFF = {
    "gradient_clipping": False, "max_norm": 0.0, "global_weight_decay": None, "counter_based_regularization": None,
    "cowclip_regularization": None, "ensemble_mode": None, "emainplace_mode": None, "extra_optimizer_config": None,
    "optimizer_state_dtypes": None, "enable_raw_embedding_streaming": False,
}  # fmt: skip
"""{unsupported option that changes results: the only accepted value, which turns it off}."""


def from_fused_params(fused_params: Mapping[str, Any]) -> MakeOptimizer:
    """Function that makes an optimizer from FBGEMM's options. Without `optimizer` it makes SGD at rate 0.01, as FBGEMM
    does.

    Args:
        fused_params: `optimizer`, an EmbOptimType or its value; `learning_rate`, `eps`, `beta1`, `beta2`,
            `weight_decay`, `momentum` and `eta`, as FBGEMM's operator takes them; `initial_accumulator_value` for
            Adagrad.

    Raises:
        ValueError: an optimizer or an option is not supported for rows; the message names it.
    """
    given = dict(fused_params)
    asked = given.pop("optimizer", EmbOptimType.EXACT_SGD)
    name = asked.value if isinstance(asked, EmbOptimType) else str(asked)
    if name not in _KNOWN:
        raise ValueError(f"fused_params: optimizer must be one of {', '.join(_KNOWN)}, got {name!r}")
    for option in [option for option in given if option in _NO_EFFECT or option.startswith("__register")]:
        del given[option]
    for option in [option for option in given if option in _OFF]:
        if given[option] != _OFF[option]:
            raise ValueError(f"fused_params: {option}={given[option]!r} is not supported; leave it out")
        del given[option]
    given.pop("max_gradient", None)  # FBGEMM reads it only with gradient_clipping
    mode = given.pop("weight_decay_mode", WeightDecayMode.NONE)
    decay_mode = (mode if isinstance(mode, WeightDecayMode) else WeightDecayMode(mode)).name
    if decay_mode not in ("NONE", "L2", "DECOUPLE"):
        raise ValueError(f"fused_params: weight_decay_mode {decay_mode} is not supported; use L2")
    if "lr" in given and "learning_rate" in given:
        raise ValueError("fused_params: lr and learning_rate are one option; give one of them")
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
            raise ValueError(
                f"fused_params: {option} has no effect on optimizer {name!r}, in FBGEMM and here; leave it out"
            )
        if option == "weight_decay" and given.get(option) and "adagrad" in name and decay_mode not in ("NONE", "L2"):
            raise ValueError(f"fused_params: weight_decay_mode {decay_mode} is not supported; use L2")
    kind, options = pkgutil.resolve_name(cls), options | given
    own = {option: options[option] for option in known.fbgemm_options if option in options}
    return lambda parameters: kind(parameters, **own)


def from_classes(classes: Sequence[type], options: Sequence[Mapping[str, Any]]) -> MakeOptimizer:
    """Function that makes the optimizer that `apply_optimizer_in_backward` gave a parameter. ValueError if the
    parameter has two, or an option is not supported for rows."""
    if len(classes) > 1:
        raise ValueError(
            "apply_optimizer_in_backward must be called once for a table, was called twice; one optimizer can step a"
            " table"
        )
    cls: Any = classes[0]
    if (name := _PLACEHOLDERS.get(cls)) is not None:
        # RowWiseAdagrad, unlike the other classes, is a real optimizer, with its own defaults.
        defaults = {"lr": 1e-2, "eps": 1e-10} if cls is rowwise_adagrad.RowWiseAdagrad else {}
        return from_fused_params({"optimizer": name, **defaults, **_fbgemm_names(options[0])})
    return lambda parameters: cls(parameters, **options[0])


def _fbgemm_names(options: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")
    for name, off in [("lr_decay", 0.0), ("maximize", False)]:
        if options.pop(name, off) != off:
            raise ValueError(
                f"apply_optimizer_in_backward: {name} of TorchRec's optimizers is not supported; leave it out"
            )
    return options


def row_stepper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Optimizer that can step rows, with the class and options that `optimizer`, of torch or TorchRec, asks for."""
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


def copy_optimizer_for(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """New optimizer for `parameter`, with the class, options and defaults of `optimizer`."""
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    made = make([{**optimizer.param_groups[0], "params": [parameter]}])
    # Some options, such as Adagrad's initial_accumulator_value, are read only from the defaults.
    made.defaults = dict(optimizer.defaults)
    return made


def options_now(optimizer: torch.optim.Optimizer, stepper: torch.optim.Optimizer) -> dict[str, Any]:
    """Options of `stepper`, made by `row_stepper(optimizer)`, with the current values of `optimizer`."""
    if stepper is optimizer or not hasattr(optimizer, "param_groups"):
        return stepper.param_groups[0]
    own = stepper.param_groups[0]
    return {name: optimizer.param_groups[0].get(name, value) for name, value in own.items()}


class _States(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """{parameter of a table: state of its optimizer}. Each access gathers a state from all ranks, so every rank makes
    it. Values that are written into its tensors reach the rows, see `TableState`."""

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
    """Optimizers of tables whose rows the backward pass updates, with the current options in `param_groups`.

    The state has TorchRec's names, such as `t1.momentum1`, and does not depend on how rows are sharded. Tables with a
    path have no state here: their snapshots hold it.

    Args:
        weights: {table's name: its parameter}.
        tables: state of each table, in the order of `weights`; None on the meta device, where there are no rows.
        optimizers: optimizer of each table, in the same order.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        tables: Sequence[TableState | None],
        optimizers: Sequence[torch.optim.Optimizer],
    ):
        pairs = zip(weights.values(), tables, strict=True)
        self._tables: dict[torch.Tensor, TableState] = {weight: table for weight, table in pairs if table is not None}
        self._states = _States(self._tables)
        super().__init__(weights, self._states, [optimizer.param_groups[0] for optimizer in optimizers])

    def step(self, closure: Any = None) -> None:
        """No effect: the backward pass has updated the rows."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """No effect: rows keep no gradient."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a dict that `state_dict` returned; every rank loads the same dict. ValueError if it is from other tables
        or from another optimizer."""
        # The tensors must live until their values are written into the rows.
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
            own, given = ({key: tuple(part.shape) for key, part in found.items()} for found in (
                self.state[weight], state[name]))  # fmt: skip
            if own != given:
                raise ValueError(
                    f"the optimizer state of {name} must have the shapes {own}, got {given}: it is that of another"
                    " optimizer, or of a table of another size"
                )
            table = self._tables[weight]
            if (step := state[name].get(f"{table.name}.step")) is not None:
                steps.setdefault(table.rows, {})[table.name] = float(step)
        _check_steps(steps)

    def post_load_state_dict(self) -> None:
        """Write changed tensors of the state into the rows. TorchRec's optimizer of a whole model calls this too.
        ValueError, and no change, if tables of one embedding would get different counts of steps."""
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
            raise ValueError(f"tables of one embedding must have one count of steps, got {of_tables}")
