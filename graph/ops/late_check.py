"""Checks gradients on the GPU itself. The host reads the result after the step, so no step waits for the check.

    check = late_check_of(steps, ...)         the device looks at the gradients; None = the host has to wait
    ...                                       updates, and torch's fused optimizers, write nothing if one is not finite
    check.resolve(wait=...)                    raises the error, in a later step or in a call that waits

Invariants: once the device has left a step out, it leaves out every later step of these stores until the host raises
the error. The host then restores all counts to their values before that step.
"""

import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch

from oneemb.graph.ops.grads import RowGrads
from oneemb.graph.row_optimizers import RowOptimizer
from oneemb.kernels.backend import SUM_MAX

Counts = Sequence[tuple[Any, str]]
"""Objects and the names of their counts that a step changes."""


class NonFiniteGradientError(ArithmeticError):
    """A gradient holds NaN or infinity. Nothing was updated, no weight, state or count. Ids that lookups of the step
    have inserted stay, with their initial values."""


class _Step(NamedTuple):
    """A step of which the host does not know yet whether the device has made it."""

    go: Any
    """`Later` value of go_1."""
    counts: list[tuple[weakref.ref[Any], str, int]]
    """Objects, names of their counts, and the counts before the step."""


class LateCheck:
    """Checks of the steps of some stores, whose rows one GPU has."""

    def __init__(self, backend: Any):
        from oneemb.kernels import finite_cuda, later

        self.backend, self._loops, self._later = backend, finite_cuda, later.Later
        self.go_1: torch.Tensor = self._one()
        """On the device: 1, or 0 since a gradient was not finite."""
        self._steps: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._handle: int | None = None
        """Handle of the stream of the last step. A handle takes less time to get than a stream."""
        _checks.add(self)

    def begin(self, grads: Sequence[RowGrads], dense: Sequence[torch.Tensor], counts: Counts) -> None:
        """Let the device check the gradients of a step, which it then makes or not. `counts` are restored if it is not
        made. Raises as `resolve` with wait=False."""
        gpu, checks = self.backend.gpu, self._loops
        if gpu.stream_now() != self._handle:
            self._change_stream()
        with self._lock:
            self._resolve(False)
            # Read now, since another thread may have restored counts until here. The lock of a store holds this object,
            # which must not keep the store.
            before = [(weakref.ref(one), name, getattr(one, name)) for one, name in counts]
            go_1 = finite_1 = self.go_1
            for grad in grads:
                found = grad.sum_to_check(go_1)
                if found is None:
                    checks.check_segments_cuda(cast(Any, grad.segments), SUM_MAX, go_1, gpu=gpu)
                elif found is not go_1:
                    if finite_1 is not go_1:
                        checks.check_sums_cuda(finite_1, go_1, gpu=gpu)
                    finite_1 = found
                grad.go_1 = go_1
            if dense and (dense := [grad for grad in dense if grad.numel()]):
                checks.check_norm_cuda(torch.nn.utils.get_total_norm(dense, torch.inf), go_1, gpu=gpu)
            later = self._later(gpu, 1)
            checks.check_sums_cuda(finite_1, go_1, gpu=gpu, later=later)
            self._steps.append(_Step(later, before))

    def _change_stream(self) -> None:
        """Let the next step, on the current stream, run after those before."""
        gpu = self.backend.gpu
        if gpu.device.type == "cuda":
            stream = torch.cuda.current_stream(gpu.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
                self.go_1.record_stream(stream)
            self._stream = stream
        self._handle = gpu.stream_now()

    def _one(self) -> torch.Tensor:
        gpu = self.backend.gpu
        return cast(torch.Tensor, gpu.kept(gpu.full(1, value=1, dtype=torch.int64)))

    def found_inf(self) -> torch.Tensor:
        """Attribute `found_inf` of torch's fused optimizers: float32 scalar on the device; 1 = leave the step out."""
        return (1 - self.go_1).to(torch.float32).reshape(())

    def resolve(self, *, wait: bool = True) -> None:
        """Raise NonFiniteGradientError if the device has left out a step. wait=False: look only at the checks whose
        results the host has already."""
        with self._lock:
            self._resolve(wait)

    def _resolve(self, wait: bool) -> None:
        while self._steps and (made := self._steps[0].go.values(wait=wait)) is not None:
            if made == [1]:
                self._steps.popleft()
                continue
            left_out = len(self._steps)
            while self._steps:
                for reference, name, count in self._steps.pop().counts:
                    if (one := reference()) is not None:
                        setattr(one, name, count)
            # Steps that are under way still have the old array.
            self.go_1 = self._one()
            self.backend.gpu.wait()  # The next step may be on another stream.
            and_more = f", nor were the {left_out - 1} after it" if left_out > 1 else ""
            raise NonFiniteGradientError(
                f"a gradient of a step was not finite: that step was not made{and_more}; no weight, state or count has"
                " changed since. Lower the learning rate or clip the gradients. check_in_step=True, an argument of"
                " oneemb.Optimizer and an attribute of graph.config, raises this in the step itself and names the row"
            )


_checks: "weakref.WeakSet[LateCheck]" = weakref.WeakSet()


@atexit.register
def _say_at_exit() -> None:
    for check in list(_checks):
        try:
            check.resolve()
        except NonFiniteGradientError as error:
            print(f"NonFiniteGradientError: {error}", file=sys.stderr)
        except RuntimeError:
            pass  # of CUDA, which calls before this one have met too


def resolve_all(grads: Iterable[RowGrads]) -> None:
    """Wait for the checks of all earlier steps of the stores of these gradients. NonFiniteGradientError if one of these
    steps was left out."""
    for store in {store: None for grad in grads for store in grad.stores}:
        if store.step_lock.late_check is not None:
            store.step_lock.late_check.resolve()


def late_check_of(
    steps: Sequence[Any], row_optimizers: Sequence[RowOptimizer], grads: Sequence[RowGrads], more: Counts = ()
) -> LateCheck | None:
    """The check of the stores of a step, which it begins, also for the torch optimizers of the step; None = the host
    has to wait. Earlier steps of these stores are checked, as far as the host knows without a wait.

    Args:
        steps: optimizers of the step: `RowStep`.
        row_optimizers: optimizers of its rows.
        more: further counts that the step changes.

    Raises:
        NonFiniteGradientError: an earlier step was left out.
    """
    # Plain loops here and below, since every step on a GPU runs them: a loop over a few items takes less time than a
    # call of the standard library.
    backend = grads[0].store.backend
    stores: dict[Any, None] = {}
    dense = _dense_to_check(steps, backend)
    may_be_late = dense is not None and backend.waits
    for row_optimizer in row_optimizers:
        may_be_late = may_be_late and not row_optimizer.has_own_update
    for grad in grads:
        may_be_late = may_be_late and grad.store.backend is backend
        for store in grad.stores:
            may_be_late = may_be_late and not store.watchers  # They read the rows that are about to change.
            stores[store] = None
    if not may_be_late:
        resolve_all(grads)
        return None
    check = next(iter(stores)).step_lock.late_check
    for store in stores:
        if check is None or check.backend is not backend or store.step_lock.late_check is not check:
            resolve_all(grads)
            check = LateCheck(backend)
            break
    counts: list[tuple[Any, str]] = [*more]
    of_dense: list[torch.Tensor] = []
    for store in stores:
        store.step_lock.late_check = check
        counts.append((store, "step"))
    for step in steps:
        counts.append((step, "taken"))
    assert dense is not None
    for found in dense.values():
        of_dense += found
    check.begin(grads, of_dense, counts)
    for step in dense:
        step.begin_late(check)
    return cast(LateCheck, check)


def _dense_to_check(steps: Sequence[Any], backend: Any) -> dict[Any, list[torch.Tensor]] | None:
    """The gradients of dense parameters of each step that has some; None = the host has to know whether they are
    finite. The gradients of rows must have left the weights before."""
    found: dict[Any, list[torch.Tensor]] = {}
    for step in steps:
        optimizer = step.optimizer
        if step.skip_nonfinite or hasattr(optimizer, "found_inf"):
            return None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (dense := parameter.grad) is None:
                    continue
                if type(dense) is not torch.Tensor or dense.is_sparse or dense.device != backend.device:
                    return None
                if not _has_state(optimizer, parameter):
                    return None  # A first step that is left out may leave a state of torch's without initial values.
                found.setdefault(step, []).append(dense)
        if step in found and not _asks_device(optimizer):
            return None  # It would write numbers that are not finite.
    return found


def _has_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether a step has made all of a parameter's state."""
    state = optimizer.state.get(parameter, {})
    if isinstance(optimizer, torch.optim.SGD):
        has_momentum = any(group["momentum"] for group in optimizer.param_groups)
        return not has_momentum or state.get("momentum_buffer") is not None
    return bool(state)


def _asks_device(optimizer: Any) -> bool:
    """Whether a torch optimizer takes `found_inf`, a tensor on the device, in all of its groups."""
    all_fused = all(group.get("fused") for group in optimizer.param_groups)
    return all_fused and getattr(optimizer, "_step_supports_amp_scaling", False)
