"""Lets exported programs that look up bags accept batches of 0 and 1 samples.

While torch.export traces, it assumes that each free dimension of an input is 2 or more; afterwards it admits 0 and 1
too, since they run through the same ops. It makes no such assumption about a size that is computed from a dimension,
such as the number of samples, which follows from the length of offsets: if an op asks whether that size is 0 or 1,
torch writes a check into the program. So this module makes the assumption for the number of samples, and removes it
afterwards.
"""

from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

SAMPLES_MIN = 2
"""Smallest number of samples that a trace assumes; torch assumes the same of a dimension."""
_TRIED = (*range(SAMPLES_MIN, 40), 1000, 1 << 20)


class _Assumed(NamedTuple):
    """A size of an input that is assumed to be large enough for two samples."""

    symbol: Any
    """sympy's symbol for the size, in the ShapeEnv."""
    env: Any
    none: int
    """The size for 0 samples."""
    each: int
    """The amount that each sample adds to the size."""

    @property
    def least(self) -> int:
        return self.none + SAMPLES_MIN * self.each


class FreeSizes:
    """Sizes of inputs that are assumed to be large enough for two samples while a program is traced."""

    def __init__(self) -> None:
        self._assumed: list[_Assumed] = []

    def assume_samples(self, bags: "int | torch.SymInt", bags_a_sample: int) -> None:
        """Assume that the batch has two samples or more, if the number of bags follows from one size of an input.
        ValueError if the example batch has fewer samples.

        Args:
            bags: number of bags of the batch.
            bags_a_sample: number of bags of one sample.
        """
        if not isinstance(bags, torch.SymInt):
            return  # Nothing is traced, or the number of bags is fixed.
        if bags.node.hint < SAMPLES_MIN * bags_a_sample:
            raise ValueError(
                f"the example batch must have {SAMPLES_MIN} examples or more, so that their number stays free: its"
                f" offsets have {bags.node.hint} bags, {bags_a_sample} of each example; give more, or dynamic_shapes="
                " if the first dimension of offsets is fixed"
            )
        expression, env = bags.node.expr, bags.node.shape_env
        if len(expression.free_symbols) != 1:
            return
        (symbol,) = expression.free_symbols
        factor = expression.coeff(symbol, 1)
        rest = expression - factor * symbol
        if rest.is_Integer and factor.is_Integer and factor > 0 and not (rest % factor or bags_a_sample % factor):
            found = env.var_to_range[symbol]
            made = _Assumed(symbol, env, int(-rest // factor), int(bags_a_sample // factor))
            if found.lower < made.least <= found.upper:
                env.constrain_symbol_range(symbol, compiler_min=made.least, compiler_max=int_oo)
                self._assumed.append(made)

    def take_back(self, exported: torch.export.ExportedProgram) -> None:
        """Let the traced program accept 0 samples and 1 sample again."""
        ranges = exported.range_constraints
        of_symbols = {size: found for size, found in ranges.items() if size.is_Symbol}
        lowered = {size: _with_lower(found.lower, found) for size, found in of_symbols.items()}
        for assumed in reversed(self._assumed):
            symbol = assumed.env.replace(assumed.symbol)  # symbol of an equal size of another input
            if symbol in lowered and lowered[symbol].lower == assumed.least:
                ranges[symbol] = lowered[symbol] = _with_lower(assumed.none, lowered[symbol])
            _remove_checks(exported.graph, assumed)
        for size, found in ranges.items():  # sizes that follow from another size, such as a length of offsets
            if not size.is_Symbol and found.lower == bound_sympy(size, of_symbols).lower:
                ranges[size] = _with_lower(bound_sympy(size, lowered).lower, found)
        exported.graph.eliminate_dead_code()
        exported.graph_module.recompile()
        self._assumed.clear()


def _with_lower(lower: Any, found: Any) -> Any:
    """The range `found` with another lower bound, in which torch writes 0 for 2."""
    return ValueRanges(0 if lower == SAMPLES_MIN else lower, found.upper)


def _remove_checks(graph: torch.fx.Graph, assumed: _Assumed) -> None:
    """Remove the program's checks that fail only for 0 samples or 1 sample."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default and isinstance(node.args[0], torch.fx.Node):
            condition = node.args[0].meta.get("val")
            if isinstance(condition, torch.SymBool) and condition.node.expr.free_symbols == {assumed.symbol}:
                few = [_holds(condition.node.expr, assumed, samples) for samples in range(SAMPLES_MIN)]
                more = [_holds(condition.node.expr, assumed, samples) for samples in _TRIED]
                if all(more) and not all(few):
                    graph.erase_node(node)


def _holds(condition: Any, assumed: _Assumed, samples: int) -> bool:
    try:
        return condition.xreplace({assumed.symbol: sympy.Integer(assumed.none + samples * assumed.each)}) == sympy.true
    except ZeroDivisionError:
        return False
