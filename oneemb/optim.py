"""Optimizers that torch.optim lacks: Ftrl, Lamb, Lars, Lion, PartialRowWiseAdam, RowWiseAdagrad, SmartDecayAdam.

Each one steps dense parameters by plain torch operations; oneemb.graph.row_optimizers defines how it steps rows of an
embedding, so one optimizer may hold both. A row that has a gradient at every step is updated like a row of a dense
parameter.

State of a dense parameter has the parameter's dtype, as in torch.optim; state of a row of an embedding is float32.
"""

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar, overload

import torch

from oneemb.graph.row_optimizers import RowOptimizer, rows_of_class

__all__ = ["Ftrl", "Lamb", "Lars", "Lion", "PartialRowWiseAdam", "RowWiseAdagrad", "SmartDecayAdam"]

# A param group of torch.optim: the parameters, and options of any type.
_Group = dict[str, Any]
_Params = Iterable[torch.Tensor] | Iterable[_Group]
T = TypeVar("T")


class _Optimizer(torch.optim.Optimizer):
    """Base of these optimizers. `step` visits each parameter of each group; subclasses check a group's options
    (`_check`) and step one parameter (`_step`).

    Counts of steps are tensors named `step`, as in torch.optim: a checkpoint loaded in place reaches them, and
    `load_state_dict` keeps their dtype.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state from `load_state_dict`; counts of steps that older versions saved as ints become tensors."""
        super().__setstate__(state)
        for of_param in self.state.values():
            if isinstance(of_param.get("step"), int):
                of_param["step"] = _count(of_param["step"])

    def add_param_group(self, param_group: _Group) -> None:
        """Add a param group. Options that it lacks are those of the constructor.

        Raises:
            ValueError: an option is out of range.
        """
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], T]) -> T: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it; it is called once, with gradients enabled.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._begin(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} steps dense gradients, got a sparse one; construct the module with "
                        "sparse=False, or keep its rows in an oneemb embedding"
                    )
                self._step(param, param.grad, self.state[param], group)
        return loss

    def row_optimizer(self, group: _Group) -> RowOptimizer:
        """Row optimizer that steps the rows of embeddings in this group."""
        kind = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        return rows_of_class(kind, self, group)

    def _check(self, group: _Group) -> None:
        """Raise TypeError or ValueError unless betas are two numbers below 1, and all options at least 0 and finite."""
        for option in self.defaults:
            value = group[option]
            if option == "betas" and not (isinstance(value, list | tuple) and len(value) == 2):
                raise TypeError(f"{type(self).__name__}: betas must be two numbers, got {value!r}")
            for number in value if option == "betas" else (value,):
                if not isinstance(number, Real | torch.Tensor):
                    got = f"{type(number).__name__} {number!r:.100}"
                    raise TypeError(f"{type(self).__name__}: {option} must be numbers of at least 0, got {got}")
            for i, beta in enumerate(value if option == "betas" else ()):
                if not 0 <= beta < 1:
                    raise ValueError(f"{type(self).__name__}: betas[{i}] must be at least 0 and below 1, got {beta}")
            if option != "betas" and not 0 <= value < math.inf:
                raise ValueError(f"{type(self).__name__}: {option} must be at least 0 and finite, got {value}")

    def _begin(self, group: _Group) -> None:
        """Prepare a step of a group, before its parameters are stepped."""

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        raise NotImplementedError


class _WithMoments(_Optimizer):
    """Base of optimizers that have Adam's options."""

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))


class RowWiseAdagrad(_Optimizer):
    """Adagrad with one accumulator for each row instead of one for each weight.

        acc' = acc + mean(g * g over the row)        w' = w - lr * g / (sqrt(acc') + eps)

    A row is a row of an embedding, or an index of a dense parameter's dimension 0.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate, at least 0.
        weight_decay: L2 penalty, added to the gradient as weight_decay * w; at least 0.
        initial_accumulator_value: accumulator of a new row, at least 0.
        eps: added to the root of the accumulator, at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: Mudigere et al. Software-Hardware Co-design for Fast and Scalable Training of Deep Learning
        Recommendation Models. ISCA 2022 (arXiv:2104.05158); FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = RowWiseAdagrad([weight], lr=0.5)
        >>> weight.grad = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
        >>> optimizer.step()
        >>> weight.detach()
        tensor([[0.5000, 0.5000],
                [1.0000, 1.0000]])
    """

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ):
        defaults = dict(lr=lr, weight_decay=weight_decay, initial_accumulator_value=initial_accumulator_value, eps=eps)
        super().__init__(params, defaults)

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        grad = _l2_grad(param, grad, group)
        if not state:
            state["acc"] = param.new_full(param.shape[:1], group["initial_accumulator_value"])
        acc = state["acc"]
        acc.add_(_row_means(grad.square()))
        rate = group["lr"] / (acc.sqrt() + group["eps"])
        param.addcmul_(grad, _per_row(rate, grad), value=-1)


class Ftrl(_Optimizer):
    """FTRL-Proximal: learning rates as in Adagrad, and an L1 penalty that sets weights to exactly zero.

        n' = n + g * g
        z' = z + g - (n'^p - n^p) / lr * w                               p = -lr_power
        w' = (sign(z') * lambda1 - z') / ((beta + n'^p) / lr + lambda2)  where |z'| > lambda1, else 0

    The weight is a function of z and n. z begins at 0, for which the weight is 0, so the initial value of a weight
    matters only in its first step. Initialize embeddings that Ftrl trains with small values.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate (alpha in the paper), above 0.
        weight_decay: L2 penalty, added to the gradient as weight_decay * w; at least 0.
        lr_power: negated exponent p of n in the formula; at most 0. -0.5 is that of the paper, 0 makes the rate
            constant.
        initial_accumulator_value: initial value of n, at least 0.
        lambda1: L1 penalty, at least 0.
        lambda2: L2 penalty of the paper, at least 0. (TensorFlow's l2_regularization_strength is half of it.)
        beta: added to n'^p, at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: McMahan et al. Ad Click Prediction: a View from the Trenches. KDD 2013. The arguments are OneFlow's;
        its kernels raise n to lr_power itself and apply weight_decay outside the gradient.
    """

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        lambda1: float = 0.0,
        lambda2: float = 0.0,
        beta: float = 0.0,
    ):
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            lr_power=lr_power,
            initial_accumulator_value=initial_accumulator_value,
            lambda1=lambda1,
            lambda2=lambda2,
            beta=beta,
        )
        super().__init__(params, defaults)

    def _check(self, group: _Group) -> None:
        power: Any = group["lr_power"]
        super()._check({**group, "lr_power": 0.0})
        if not group["lr"] > 0:
            raise ValueError(f"Ftrl: lr must be above 0 and finite, got {group['lr']}")
        if isinstance(power, str) or not hasattr(power, "__float__") or not -math.inf < power <= 0:
            raise ValueError(f"Ftrl: lr_power must be a finite number of at most 0, got {power!r}")

    def _begin(self, group: _Group) -> None:
        grads = [param.grad for param in group["params"] if param.grad is not None]
        if not group["lr"] > 0 and any(grad.count_nonzero() for grad in grads):
            raise ValueError(
                f"Ftrl: lr must be above 0, since Ftrl divides by it, got {group['lr']}; let the scheduler end above 0"
            )

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        if not state:
            state["n"] = torch.full_like(param, group["initial_accumulator_value"])
            state["z"] = torch.zeros_like(param)
        if not group["lr"] > 0:  # Tools take steps with zero gradients only to make the state.
            return
        grad = _l2_grad(param, grad, group)
        n, z = state["n"], state["z"]
        power, lr, lambda1 = -group["lr_power"], group["lr"], group["lambda1"]
        n_power_before = n.pow(power)
        n.addcmul_(grad, grad)
        n_power = n.pow(power)
        z.add_(grad).sub_((n_power - n_power_before).div_(lr).mul_(param))
        weight = (z.sign() * lambda1 - z) / ((n_power + group["beta"]) / lr + group["lambda2"])
        param.copy_(torch.where(z.abs() <= lambda1, torch.zeros_like(weight), weight))


class SmartDecayAdam(_WithMoments):
    """Adam for rows that rarely have a gradient: a row catches up on the steps in which it had no gradient.

    With k = the number of steps since the row's last gradient:

        m' = beta1^k * m + (1 - beta1) * g
        v' = beta2^k * v + (1 - beta2) * g * g
        w' = w - lr * (m' + m * beta1 * (1 - beta1^(k-1)) / (1 - beta1)) / (sqrt(v') + eps)

    Neither rows nor dense parameters have a bias correction. For a dense parameter as a whole, k counts the calls of
    `step` since the last one in which it had a gradient.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate, at least 0.
        betas: decay of m and of v per step, each at least 0 and below 1.
        eps: added to the root of v, at least 0.
        weight_decay: L2 penalty, added to the gradient as weight_decay * w; at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: SmartDecaySparseAdam of Caffe2, which OneFlow's SmartDecayAdam follows on embedding rows. OneFlow
        steps dense parameters as Adam instead; give those to torch.optim.Adam for the same.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state from `load_state_dict`. Older versions saved a count of steps for each group, and the number
        of the last step for each parameter; both become the parameter's `step`."""
        super().__setstate__(state)
        for group in self.param_groups:
            step = group.pop("step", None)
            for param in group["params"]:
                of_param = self.state.get(param, {})
                if "last_step" in of_param:
                    of_param["step"] = _count(step - of_param.pop("last_step"))

    def _begin(self, group: _Group) -> None:
        for param in group["params"]:
            if state := self.state.get(param):
                state["step"] += 1

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        grad = _l2_grad(param, grad, group)
        if not state:
            state["step"] = _count(1)  # steps since the last gradient, with this one
            state["m"] = torch.zeros_like(param)
            state["v"] = torch.zeros_like(param)
        m, v = state["m"], state["v"]
        (beta1, beta2), skipped = group["betas"], float(state["step"])
        state["step"] -= skipped
        owed = m * (beta1 * (1 - beta1 ** (skipped - 1)) / (1 - beta1))
        m.mul_(beta1**skipped).add_(grad, alpha=1 - beta1)
        v.mul_(beta2**skipped).addcmul_(grad, grad, value=1 - beta2)
        param.addcdiv_(m + owed, v.sqrt().add_(group["eps"]), value=-group["lr"])


class PartialRowWiseAdam(_WithMoments):
    """Adam with one second moment for each row instead of one for each weight.

        m' = beta1 * m + (1 - beta1) * g
        v' = beta2 * v + (1 - beta2) * mean(g * g over the row)
        w' = w - lr * (m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + eps) + weight_decay * w)

    A row is a row of an embedding, or an index of a dense parameter's dimension 0. For a dense parameter t counts the
    steps in which it had a gradient. For rows t is the step of the embedding, and a row without a gradient is not
    changed.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate, at least 0.
        betas: decay of m and of v, each at least 0 and below 1.
        eps: added to the root of v, at least 0.
        weight_decay: decoupled decay: each step subtracts lr * weight_decay * w; at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: FBGEMM's PARTIAL_ROWWISE_ADAM.
    """

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        if not state:
            state["step"] = _count(0)
            state["m"] = torch.zeros_like(param)
            state["v"] = param.new_zeros(param.shape[:1])
        state["step"] += 1
        m, v = state["m"], state["v"]
        (beta1, beta2), step = group["betas"], float(state["step"])
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).add_(_row_means(grad.square()), alpha=1 - beta2)
        root = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
        move = (m / (1 - beta1**step)).div_(_per_row(root, m)).add_(param, alpha=group["weight_decay"])
        param.sub_(move, alpha=group["lr"])


class Lamb(_WithMoments):
    """Adam whose step, for each row, has the norm lr * (norm of the row's weights).

        m' = beta1 * m + (1 - beta1) * g
        v' = beta2 * v + (1 - beta2) * g * g
        r  = m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + eps) + weight_decay * w
        w' = w - lr * |w| / |r| * r                            |.| = the root of the sum of squares over the row

    A row is a row of an embedding, or an index of a dense parameter's dimension 0. If r is 0 the row is not changed. A
    row of zeros is never changed: initialize rows with other values. For a dense parameter t counts the steps in which
    it had a gradient. For rows t is the step of the embedding, and a row without a gradient is not changed.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate, at least 0.
        betas: decay of m and of v, each at least 0 and below 1.
        eps: added to the root of v, at least 0.
        weight_decay: factor of w in r, at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: You et al. Large Batch Optimization for Deep Learning. ICLR 2020; FBGEMM's LAMB, where a row whose r is 0
        becomes NaN.
    """

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        if not state:
            state["step"] = _count(0)
            state["m"] = torch.zeros_like(param)
            state["v"] = torch.zeros_like(param)
        state["step"] += 1
        m, v = state["m"], state["v"]
        (beta1, beta2), step = group["betas"], float(state["step"])
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
        r = (m / (1 - beta1**step)).div_(root).add_(param, alpha=group["weight_decay"])
        r_norm = _row_norms(r)
        ratio = torch.where(r_norm != 0, _row_norms(param) / r_norm, torch.zeros_like(r_norm))
        param.addcmul_(r, _per_row(ratio, r), value=-group["lr"])


class Lars(_Optimizer):
    """SGD with momentum, whose rate for each row follows from the norms of the row's weights and gradient.

        rate = lr * eta * |w| / (|g| + weight_decay * |w|)     |.| = the root of the sum of squares over the row
        buf' = momentum * buf + rate * (g + weight_decay * w)
        w'   = w - buf'

    A row is a row of an embedding, or an index of a dense parameter's dimension 0. The rate is 0 where the formula
    gives 0 / 0. A row of zeros is never changed: initialize rows with other values.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate, at least 0.
        momentum: factor of the buffer in each step, at least 0.
        eta: the trust coefficient, a factor of the rate; at least 0.
        weight_decay: L2 penalty, at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: You, Gitman, Ginsburg. Large Batch Training of Convolutional Networks (arXiv:1708.03888); FBGEMM's
        LARS_SGD, whose rate is NaN where it is 0 / 0.
    """

    def __init__(
        self, params: _Params, lr: float = 1e-2, momentum: float = 0.9, eta: float = 1e-3, weight_decay: float = 0.0
    ):
        super().__init__(params, dict(lr=lr, momentum=momentum, eta=eta, weight_decay=weight_decay))

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        if not state:
            state["buf"] = torch.zeros_like(param)
        buf = state["buf"]
        w_norm = _row_norms(param)
        norm = _row_norms(grad) + group["weight_decay"] * w_norm
        rate = torch.where(norm != 0, group["lr"] * group["eta"] * w_norm / norm, torch.zeros_like(norm))
        buf.mul_(group["momentum"]).add_(_l2_grad(param, grad, group) * _per_row(rate, grad))
        param.sub_(buf)


class Lion(_Optimizer):
    """Optimizer whose step has the same size for every weight: lr times the sign of a momentum.

        w' = w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m' = beta2 * m + (1 - beta2) * g

    Use a learning rate of a third to a tenth of Adam's, and a weight decay that is larger by the same factor. A row of
    an embedding without a gradient in a step is not changed.

    Args:
        params: parameters, or dicts that define groups of them.
        lr: learning rate, at least 0.
        betas: (beta1, beta2): weight of the momentum in the sum whose sign is taken; decay of the momentum per step.
            Each is at least 0 and below 1.
        weight_decay: decoupled decay: each step subtracts lr * weight_decay * w; at least 0.

    Raises:
        ValueError: an argument is out of range.

    Reference: Chen et al. Symbolic Discovery of Optimization Algorithms. NeurIPS 2023, Algorithm 2.
    """

    def __init__(
        self, params: _Params, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def _step(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: _Group) -> None:
        if not state:
            state["m"] = torch.zeros_like(param)
        m, (beta1, beta2) = state["m"], group["betas"]
        pull = m.mul(beta1).add_(grad, alpha=1 - beta1)
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(pull.sign_(), alpha=group["lr"])
        m.mul_(beta2).add_(grad, alpha=1 - beta2)


def _count(steps: int) -> torch.Tensor:
    """Count of steps in the form of torch.optim, independent of torch's default dtype and device."""
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _l2_grad(param: torch.Tensor, grad: torch.Tensor, group: _Group) -> torch.Tensor:
    return grad.add(param, alpha=group["weight_decay"]) if group["weight_decay"] != 0 else grad


def _row_means(x: torch.Tensor) -> torch.Tensor:
    """Mean over each index of dimension 0."""
    return x.mean(dim=tuple(range(1, x.ndim))) if x.ndim > 1 else x


def _row_norms(x: torch.Tensor) -> torch.Tensor:
    """Root of the sum of squares over each index of dimension 0."""
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim))) if x.ndim > 1 else x.abs()


def _per_row(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x`, one number for each index of dimension 0, in a shape that broadcasts with `like`."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))
