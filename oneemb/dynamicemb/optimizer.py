"""Optimizers, by the names that FBGEMM and dynamicemb have for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from oneemb.dynamicemb.types import absent

__all__ = [
    "EmbOptimType", "OptimizerArgs", "get_optimizer_ckpt_state_dim", "get_optimizer_state_dim", "get_required_arg",
    "string_to_opt_type",
]  # fmt: skip

_UPDATES = "rows are updated by torch's optimizer classes; fused_params of a sharder name the class and its options"
_PADDED = "rows have no padded state; DynamicEmbLoad and DynamicEmbDump convert the state in files"
__getattr__ = absent(
    __name__,
    {
        **dict.fromkeys(
            (
                "AdaGradDynamicEmbeddingOptimizer", "AdamDynamicEmbeddingOptimizer", "BaseDynamicEmbeddingOptimizer",
                "RowWiseAdaGradDynamicEmbeddingOptimizer", "SGDDynamicEmbeddingOptimizer",
            ),
            _UPDATES,
        ),
        "pad_optimizer_states_from_checkpoint": _PADDED,
        "truncate_optimizer_states_for_checkpoint": _PADDED,
    },
)  # fmt: skip


@dataclass
class OptimizerArgs:
    """Options of FBGEMM's optimizers, with FBGEMM's defaults."""

    stochastic_rounding: bool = True
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    max_norm: float = 0.0
    learning_rate: float = 0.01
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: int = 0
    eta: float = 0.001
    momentum: float = 0.9
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: int = -1
    grad_sum_decay: int = -1
    tail_id_threshold: float = 0
    is_tail_id_thresh_ratio: int = 0
    total_hash_size: int = 0
    weight_norm_coefficient: float = 0
    lower_bound: float = 0
    regularization_mode: int = 0


def string_to_opt_type(optimizer_str: str) -> EmbOptimType:
    """Member of EmbOptimType with this value, such as "adam"; ValueError if there is none."""
    try:
        return EmbOptimType(optimizer_str)
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in EmbOptimType)
        raise ValueError(f"optimizer_str must be one of {known}, got {optimizer_str!r}") from None


def get_required_arg(args: Mapping[str, Any], key: str) -> Any:
    """args[key]; ValueError if it is missing."""
    if key not in args:
        raise ValueError(f"args must have {key!r}, got {', '.join(map(repr, args)) or 'nothing'}; add it")
    return args[key]


def get_optimizer_state_dim(optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None) -> int:
    """Number of optimizer state values of a row in dynamicemb's formula for the size of a table. `dtype` is required
    for row-wise Adagrad."""
    if optimizer_type.value == EmbOptimType.EXACT_ROWWISE_ADAGRAD.value:
        if dtype is None:
            raise ValueError("dtype must be given for EXACT_ROWWISE_ADAGRAD, whose state takes 16 bytes, got None")
        return 16 // dtype.itemsize
    return get_optimizer_ckpt_state_dim(optimizer_type, dim)


def get_optimizer_ckpt_state_dim(optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None) -> int:
    """Number of optimizer state values of a row in a dump."""
    widths = {EmbOptimType.ADAM.value: 2 * dim, EmbOptimType.EXACT_ADAGRAD.value: dim}
    return widths.get(optimizer_type.value, int(optimizer_type.value == EmbOptimType.EXACT_ROWWISE_ADAGRAD.value))
