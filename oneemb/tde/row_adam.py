"""Adam for static tables on a CPU, where FBGEMM has none. Rows without a gradient are not changed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class RowAdam(torch.optim.Optimizer):
    """Adam that steps only rows whose gradient is not 0, as FBGEMM's Adam does on a GPU.

        m' = b1 m + (1 - b1) g    v' = b2 v + (1 - b2) g g    w' = w - lr (m' / c1 / (sqrt(v' / c2) + eps) + decay w)

    with c1 = 1 - b1^t and c2 = 1 - b2^t for step t of the table. The constructor makes the state, so that `wrap` can
    push it with the rows.

    Args:
        params: tables, [rows, D].
        lr, betas, eps: same as for torch.optim.Adam.
        weight_decay: decoupled decay of the rows that are stepped.

    Raises:
        ValueError: an option is out of range, or a parameter is not 2-dimensional.

    Reference: Kingma, Ba. Adam. ICLR 2015; FBGEMM's EmbOptimType.ADAM.
    """

    def __init__(
        self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    ):  # fmt: skip
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr, eps and weight_decay must be 0 or more and betas from 0 up to 1, got lr={lr}, eps={eps},"
                f" weight_decay={weight_decay}, betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for table in group["params"]:
                if table.dim() != 2:
                    raise ValueError(f"a parameter must be a table, [rows, D], got the shape {tuple(table.shape)}")
                for name in ("momentum1", "momentum2"):
                    self.state[table][name] = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
                self.state[table]["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the rows that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for table in group["params"]:
                if table.grad is None:
                    continue
                state = self.state[table]
                state["step"] += 1
                row = table.grad.any(1).nonzero().squeeze(1)
                grad, weight = table.grad[row].float(), table.detach()
                first = state["momentum1"][row].mul_(beta1).add_(grad, alpha=1 - beta1)
                second = state["momentum2"][row].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                state["momentum1"].index_copy_(0, row, first)
                state["momentum2"].index_copy_(0, row, second)
                step = first / (1 - beta1 ** state["step"])
                step /= (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                step += group["weight_decay"] * weight[row]
                weight.index_add_(0, row, step.to(weight.dtype), alpha=-lr)
        return loss
