"""Dense layers for recommenders."""

from collections.abc import Sequence

import torch

__all__ = ["FusedMLP"]


class FusedMLP(torch.nn.Module):
    """Linear layers with ReLU between them, and dropout if a rate is given.

    Args:
        in_features: width of the input.
        hidden_features: width of each hidden layer; empty or None = no hidden layer.
        out_features: width of the output.
        hidden_dropout_rates: dropout rate after each hidden layer, or one rate for all; None = 0.
        out_dropout_rate: dropout rate after the last layer.
        skip_final_activation: whether the last layer has no ReLU.

    Raises:
        ValueError: a width is below 1, a rate is not in [0, 1), or the number of rates is not that of hidden layers.

    Example:
        >>> FusedMLP(16, [64, 32], 1, skip_final_activation=True)(torch.ones(5, 16)).shape
        torch.Size([5, 1])

    Reference: OneFlow's nn.FusedMLP.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int] | None,
        out_features: int,
        hidden_dropout_rates: float | Sequence[float] | None = None,
        out_dropout_rate: float = 0.0,
        skip_final_activation: bool = False,
    ):
        super().__init__()
        if hidden_features is not None and not isinstance(hidden_features, list | tuple):
            raise TypeError(f"hidden_features must be a list of widths, got {_with_type(hidden_features)}")
        hidden = list(hidden_features or [])
        for name, width in (
            ("in_features", in_features), *(("hidden_features", one) for one in hidden), ("out_features", out_features),
        ):  # fmt: skip
            if isinstance(width, bool) or not isinstance(width, int):
                raise TypeError(f"{name} must be an int of at least 1, got {_with_type(width)}")
        if not isinstance(hidden_dropout_rates, int | float | list | tuple | None):
            raise TypeError(f"hidden_dropout_rates must be a number or a list, got {_with_type(hidden_dropout_rates)}")
        if not isinstance(out_dropout_rate, int | float):
            raise TypeError(f"out_dropout_rate must be a number, got {_with_type(out_dropout_rate)}")
        if hidden_dropout_rates is None or isinstance(hidden_dropout_rates, int | float):
            hidden_dropout_rates = [hidden_dropout_rates or 0.0] * len(hidden)
        if len(hidden_dropout_rates) != len(hidden):
            raise ValueError(
                f"hidden_dropout_rates must be one for each of {len(hidden)} hidden layers, got"
                f" {len(hidden_dropout_rates)}"
            )
        widths = [in_features, *hidden, out_features]
        rates = [*hidden_dropout_rates, out_dropout_rate]
        if min(widths) < 1:
            raise ValueError(f"widths must be at least 1, got {widths}")
        if not all(0.0 <= rate < 1.0 for rate in rates):
            raise ValueError(f"dropout rates must be from 0 to below 1, got {rates}")
        layers: list[torch.nn.Module] = []
        for i, rate in enumerate(rates):
            layers.append(torch.nn.Linear(widths[i], widths[i + 1]))
            if i < len(hidden) or not skip_final_activation:
                layers.append(torch.nn.ReLU())
            if rate > 0.0:
                layers.append(torch.nn.Dropout(rate))
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [..., out_features] for inputs [..., in_features]."""
        return self.layers(x)


def _with_type(value: object) -> str:
    return f"{type(value).__name__} {value!r}"
