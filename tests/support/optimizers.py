"""The optimizers that rows have. A line in OPTIMIZERS puts a new one through every test that is for all of them.

OPTIMIZERS has one of each class and width of rows; MORE has other options, for tests of the updates themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from oneemb.optim import Ftrl, Lamb, Lars, Lion, PartialRowWiseAdam, RowWiseAdagrad, SmartDecayAdam


class Case(NamedTuple):
    """An optimizer of given parameters, and the values of state that rows have then, of each weight and of each row."""

    make: Callable
    states: int
    row_states: int = 0

    def __call__(self, params):
        return self.make(params)

    def state_width(self, dim):
        """Values of state of a row of `dim` weights."""
        return self.states * dim + self.row_states


OPTIMIZERS = {
    "sgd": Case(lambda params: torch.optim.SGD(params, lr=0.05), 0),
    "momentum": Case(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True), 1),
    "adagrad": Case(
        lambda params: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1), 1
    ),
    "adam": Case(lambda params: torch.optim.Adam(params, lr=0.02), 2),
    "adamw": Case(lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.05), 2),
    "sparse adam": Case(lambda params: torch.optim.SparseAdam(list(params)[:1], lr=0.02), 2),  # No dense parameters.
    "amsgrad": Case(lambda params: torch.optim.Adam(params, lr=0.02, amsgrad=True), 3),
    "nadam": Case(lambda params: torch.optim.NAdam(params, lr=0.02), 2),
    "radam": Case(lambda params: torch.optim.RAdam(params, lr=0.02), 2),
    "adamax": Case(lambda params: torch.optim.Adamax(params, lr=0.02), 2),
    "adadelta": Case(lambda params: torch.optim.Adadelta(params, lr=0.5), 2),
    "rmsprop": Case(lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True, eps=0.1), 3),
    "row-wise adagrad": Case(lambda params: RowWiseAdagrad(params, lr=0.05), 0, 1),
    "ftrl": Case(lambda params: Ftrl(params, lr=0.05, lambda1=0.001, beta=1.0), 2),
    "lamb": Case(lambda params: Lamb(params, lr=0.02), 2),
    "lars": Case(lambda params: Lars(params, lr=0.1, eta=0.1), 1),
    "lion": Case(lambda params: Lion(params, lr=0.005, weight_decay=0.1), 1),
    "partial row-wise adam": Case(lambda params: PartialRowWiseAdam(params, lr=0.02), 1, 1),
    "smart decay adam": Case(lambda params: SmartDecayAdam(params, lr=0.02), 2, 1),
}

MORE = {
    "sgd, decay": Case(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01), 0),
    "sgd, momentum": Case(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), 1),
    "sgd, nesterov": Case(
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01), 1
    ),
    "sgd, dampening": Case(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.3), 1),
    "adagrad, options": Case(
        lambda params: torch.optim.Adagrad(
            params, lr=0.1, lr_decay=0.05, weight_decay=0.01, initial_accumulator_value=0.1
        ), 1,
    ),
    "adam, options": Case(
        lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01), 2
    ),
    "adam, far lerp": Case(lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.4, 0.9)), 2),
    "adam, amsgrad": Case(
        lambda params: torch.optim.Adam(params, lr=0.05, betas=(0.9, 0.5), amsgrad=True, maximize=True), 3
    ),
    "adamw, amsgrad": Case(lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.9, 0.5), amsgrad=True), 3),
    "nadam, options": Case(
        lambda params: torch.optim.NAdam(params, lr=0.05, weight_decay=0.01, momentum_decay=0.1), 2
    ),
    "radam, options": Case(
        lambda params: torch.optim.RAdam(params, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True), 2
    ),
    "adamax, decay": Case(lambda params: torch.optim.Adamax(params, lr=0.05, weight_decay=0.01), 2),
    "adadelta, decay": Case(lambda params: torch.optim.Adadelta(params, lr=0.5, weight_decay=0.01), 2),
    "rmsprop, plain": Case(lambda params: torch.optim.RMSprop(params, lr=0.01, weight_decay=0.01, maximize=True), 1),
    "rmsprop, momentum": Case(lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.8), 2),
    "rmsprop, centered": Case(lambda params: torch.optim.RMSprop(params, lr=0.01, eps=0.1, centered=True), 2),
    "row-wise adagrad, options": Case(
        lambda params: RowWiseAdagrad(params, lr=0.1, weight_decay=0.01, initial_accumulator_value=0.01), 0, 1
    ),
    "ftrl, options": Case(lambda params: Ftrl(params, lr=0.1, lambda1=0.01, lambda2=0.02, beta=0.5), 2),
    "lamb, decay": Case(lambda params: Lamb(params, lr=0.02, weight_decay=0.1), 2),
    "lars, decay": Case(lambda params: Lars(params, lr=0.1, eta=0.1, weight_decay=0.01), 1),
    "partial row-wise adam, decay": Case(lambda params: PartialRowWiseAdam(params, lr=0.05, weight_decay=0.1), 1, 1),
}  # fmt: skip
