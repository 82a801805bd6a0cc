"""Makes the loops of an optimizer from its rules, for the CPU and for GPUs.

    @rule
    def adagrad(w, acc, g, clr, eps, weight_decay): ...                                  -> w', acc'

    _LOOPS = element_loops(adagrad)

    @row_update
    def update_adagrad(step, *, lr, lr_decay, eps, weight_decay):
        return _LOOPS, (lr / (1 + (step - 1) * lr_decay), eps, weight_decay)

The arguments of a rule are `w` (a weight), the state of the weight, `g` (the gradient), and the scalars of the step.

Invariant: a CPU loop is compiled from source text, one of the templates below with a rule's names filled in. numba does
not cache compiled closures, and LLVM vectorizes a loop over elements only if it sees the whole loop.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from oneemb.kernels import row_update_cuda
from oneemb.kernels.arrays import Array
from oneemb.kernels.backend import Backend, RowLoops, Segments
from oneemb.kernels.jit import cpu, written
from oneemb.kernels.jit_code import from_float32, keep_rolled, to_float32
from oneemb.kernels.jit_lanes import LANES, load_lanes, same_lanes, store_lanes, sum_lanes
from oneemb.kernels.reduce_grads import ROWS, row_grads


class RowUpdate:
    """Function that updates rows in place, with the options of an optimizer.

    Args:
        plan: (step, **options) -> (the loops, their scalars, of which Python floats are rounded to float32). `step`
            counts from 1.
        forms: {name of a form: options that choose its loops}, if options choose loops. Each form is compiled for
            GPUs. An option that is left out is 0.1, or False if it is a flag. None = one form, named as `plan`.
    """

    def __init__(
        self, plan: Callable[..., tuple[RowLoops, tuple]], forms: Mapping[str, Mapping[str, Any]] | None = None
    ):
        functools.update_wrapper(self, plan)
        self.plan = plan
        self.forms = forms or {plan.__name__.removeprefix("update_").replace("_", " "): {}}
        kinds = {name: option.annotation for name, option in inspect.signature(plan).parameters.items()}
        self.kinds = {name: kind for name, kind in kinds.items() if name != "step"}
        self.options = frozenset(self.kinds)
        """Names of the options."""
        self.plan_of_group: Callable[[int, Mapping[str, Any]], tuple[RowLoops, tuple]] = self._plan_of_group()
        """Plans the update with the options of a param group of torch."""

    def _plan_of_group(self) -> Any:
        # As text, since a call with options in a dictionary takes several times as long.
        options = []
        for name, kind in self.kinds.items():
            assert kind in (bool, float), "an option is a flag or a number"
            beta = {"beta1": "['betas'][0]", "beta2": "['betas'][1]"}.get(name, f"[{name!r}]")
            options.append(f"{name}={kind.__name__}(group{beta})")  # which may be a tensor of one element
        return eval(f"lambda step, group: plan(step, {', '.join(options)})", {"plan": self.plan})

    def planned(self) -> dict[str, tuple[RowLoops, tuple]]:
        """{name of a form: result of `plan` for its options}. Numbers of other options stand for any numbers."""
        any_options = {name: False if kind is bool else 0.1 for name, kind in self.kinds.items()}
        return {name: self.plan(6, **any_options | dict(options)) for name, options in self.forms.items()}

    def __call__(
        self,
        weight_SX: Array,
        row_SW: Array,
        slot_U: Array,
        grad_UD: Array | Segments,
        *,
        state_begin: int,
        step: int,
        backend: Backend,
        **options: Any,
    ) -> None:
        """Update the rows of slot_U; oneemb.kernels.row_update describes the arrays."""
        options = {name: self.kinds[name](option) for name, option in options.items()}
        backend.update_rows(*self.plan(step, **options), weight_SX, row_SW, slot_U, grad_UD, state_begin)


row_update = RowUpdate
"""Decorator that makes a `RowUpdate` from its `plan`."""


def element_loops(rule: Any) -> RowLoops:
    """Loops of an optimizer that updates each weight by itself. rule: (w, *state, g, *scalars) -> w, *state."""
    state, scalars = _split(_arguments(rule), "g")
    source = f"""
def loop(begin, end, weight_SX, row_SW, slot_U, grads, state_begin, {_listed(scalars)}):
    dim = grads[0].shape[1]
    g_RD = np.empty((ROWS, dim), np.float32)
    for first in range(begin, end, ROWS):
        for r in range(row_grads(grads, first, end, row_SW, slot_U, g_RD)):
            s = slot_U[first + r]
{_views(state)}{_elements("step_rule", "w", state, scalars)}
"""
    on_host = cpu(written("loop", source, {**_SCOPE, "step_rule": rule}, beside=rule))
    return RowLoops(on_host, row_update_cuda.element_update(rule, len(state)), len(state))


def row_loops(
    step: Any, rate_of: Any, *, shares: Any = None, direction: Any = None, has_row_state: bool = False
) -> RowLoops:
    """Loops of an optimizer that computes numbers for a whole row, its rates, before it updates the row's weights.

    Args:
        step: (w, *state, g, *rates, *scalars) -> w, *state; with `direction`, (w, g, *rates, *scalars) -> w.
        rate_of: (sum, sum, dim, row state, *scalars) -> row state, *rates. Without `has_row_state`, row state is 0.
        shares: (w, g, *scalars) -> the terms that one weight adds to the two sums over the row; None = the sums are 0.
        direction: (w, *state, g, *scalars) -> g, *state: the gradient that the sums and `step` use. None = use `g`.

    `shares`, and `step` if there are shares, are called with vectors as well as numbers, so they use only +, -, *, /.
    """
    scalars = _arguments(rate_of)[4:]
    state, after_g = _split(_arguments(step), "g")
    rates = after_g[: len(after_g) - len(scalars)]
    all_state = state if direction is None else _split(_arguments(direction), "g")[0]
    row_state = f"row_SW[s, state_begin + {len(all_state)} * dim]" if has_row_state else "no_state"
    source = f"""
def loop(begin, end, weight_SX, row_SW, slot_U, grads, state_begin, {_listed(scalars)}):
    dim = grads[0].shape[1]
    rest = dim - dim % LANES
    g_RD = np.empty((ROWS, dim), np.float32)
    no_state = np.float32(0)
    {"; ".join(f"{rate}_R = np.empty(ROWS, np.float32)" for rate in rates)}
    for first in range(begin, end, ROWS):
        rows = row_grads(grads, first, end, row_SW, slot_U, g_RD)
        for r in range(rows):
            keep_rolled()
            s = slot_U[first + r]
            sum_x = sum_y = np.float32(0)
{_views(all_state) + _elements("direction_rule", "g_RD[r, d]", all_state, scalars) if direction else ""}
{_SUMS.format(scalars=_listed(scalars)) if shares else ""}
            {row_state}, {_listed(f"{rate}_R[r]" for rate in rates)} = rate_rule(
                sum_x, sum_y, np.float32(dim), {row_state}, {_listed(scalars)}
            )
        for r in range(rows):
            keep_rolled()
            s = slot_U[first + r]
            {"; ".join(f"{rate} = {rate}_R[r]" for rate in rates)}
{_views(state)}{_lanes(state, after_g) if shares else ""}
{_elements("step_rule", "w", state, after_g, "rest, dim" if shares else "dim")}
"""
    rules = {"step_rule": step, "rate_rule": rate_of, "shares_rule": shares, "direction_rule": direction}
    on_host = cpu(written("loop", source, {**_SCOPE, **rules}, beside=step))
    on_cuda = row_update_cuda.row_update(
        step, rate_of, shares=shares, direction=direction, states=len(all_state), has_row_state=has_row_state
    )
    return RowLoops(on_host, on_cuda, len(all_state), int(has_row_state))


# ---- texts -----------------------------------------------------------------------------------------------------------

_SCOPE = {
    "np": np, "ROWS": ROWS, "LANES": LANES, "row_grads": row_grads, "keep_rolled": keep_rolled,
    "to_float32": to_float32, "from_float32": from_float32, "load_lanes": load_lanes, "store_lanes": store_lanes,
    "same_lanes": same_lanes, "sum_lanes": sum_lanes,
}  # fmt: skip

# The sums over a row: lane l adds the terms d = l, l + 16, ...; `sum_lanes` adds the lanes; then the terms of the last
# dim % 16 weights are added.
_SUMS = """
            lanes_x = lanes_y = same_lanes(np.float32(0))
            for d in range(0, rest, LANES):
                keep_rolled()
                terms_x, terms_y = shares_rule(load_lanes(weight_SX, s, d), load_lanes(g_RD, r, d), {scalars})
                lanes_x, lanes_y = lanes_x + terms_x, lanes_y + terms_y
            sum_x, sum_y = sum_lanes(lanes_x), sum_lanes(lanes_y)
            for d in range(rest, dim):
                term_x, term_y = shares_rule(to_float32(weight_SX[s, d]), g_RD[r, d], {scalars})
                sum_x, sum_y = sum_x + term_x, sum_y + term_y
"""


def _views(state: Sequence[str]) -> str:
    """Source of assignments that make views of one row: w_D, the weights, and x_D for each state value x of the
    rule."""
    views = [("w", "weight_SX[s, :dim]")]
    views += [(x, f"row_SW[s, state_begin + {k} * dim : state_begin + {k + 1} * dim]") for k, x in enumerate(state)]
    return "".join(f"{' ' * 12}{name}_D = {view}\n" for name, view in views)


def _elements(rule: str, to: str, state: Sequence[str], scalars: Sequence[str], places: str = "dim") -> str:
    """Source of a loop that calls a rule for one weight after another and assigns its first result to `to`."""
    state_d = "".join(f", {x}_D[d]" for x in state)
    text = f"""
            for d in range({places}):
                {to}{state_d} = {rule}(to_float32(w_D[d]){state_d}, g_RD[r, d], {_listed(scalars)})
"""
    return text + (f"{' ' * 16}w_D[d] = from_float32(w, w_D[d])\n" if to == "w" else "")


def _lanes(state: Sequence[str], scalars: Sequence[str]) -> str:
    """Source of a loop that calls `step_rule` for 16 weights at a time, up to weight `rest`."""
    columns = [f"row_SW, s, state_begin + {k} * dim + d" for k in range(len(state))]
    stores = "".join(f"{' ' * 16}store_lanes({at}, {x}_L)\n" for x, at in zip(state, columns, strict=True))
    return f"""
            for d in range(0, rest, LANES):
                keep_rolled()
                w_L{"".join(f", {x}_L" for x in state)} = step_rule(
                    load_lanes(weight_SX, s, d){"".join(f", load_lanes({at})" for at in columns)},
                    load_lanes(g_RD, r, d), {_listed(scalars)}
                )
                store_lanes(weight_SX, s, d, w_L)
{stores}"""


def _arguments(rule: Any) -> list[str]:
    code = rule.py_func.__code__
    return list(code.co_varnames[: code.co_argcount])


def _split(arguments: Sequence[str], middle: str) -> tuple[list[str], list[str]]:
    """(arguments between the first one and `middle`, arguments after `middle`)."""
    at = arguments.index(middle)
    return list(arguments[1:at]), list(arguments[at + 1 :])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
