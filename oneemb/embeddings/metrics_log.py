"""`log_metrics`: passes figures of embeddings to a logger. Loggers are known by their methods, without an import."""

import logging
from typing import Any

import torch

from oneemb.graph.modules import embeddings_in


def log_metrics(model: torch.nn.Module, logger: Any, step: int | None = None, *, every: int = 1) -> dict[str, float]:
    """Figures of all embeddings of a model, which are also passed to a logger.

    Args:
        model: any module, also an embedding.
        logger: an object with one of these methods; the first that it has is called:
            - `log_metrics(figures, step)`: a logger of Lightning, or the module `mlflow`;
            - `add_scalar(name, figure, step)`: TensorBoard's `SummaryWriter`;
            - `log_dict(figures)`: a `LightningModule`;
            - `log(figures, step=step)`: a run of Weights & Biases, or the module `wandb`;
            - `info(text)`: a `logging.Logger`;
            - or a function, called as `logger(figures, step)`; or None: the figures are only returned.
        step: number of the training step; None = the largest number of updates of an embedding.
        every: log only in steps that are a multiple of this number.

    Returns:
        {"name/figure": value} of the figures of `embedding.metrics()`, such as "model.items/hit_rate"; {} in a step
        that is not logged.

    Raises:
        TypeError: `model` is no module, or `logger` has none of these methods.
        ValueError: `every` is no int of at least 1.
        StorageError: an embedding is closed.

    Example:
        >>> import torch, oneemb
        >>> model = oneemb.MultiTableEmbedding.from_pretrained(torch.eye(4), name="items")
        >>> figures = oneemb.log_metrics(model, lambda figures, step: print(step, figures["items/rows"]), 100)
        100 4
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if type(every) is not int or every < 1:
        raise ValueError(f"every must be an int of at least 1, got {every!r}")
    embeddings = {name or embedding.name: embedding for name, embedding in embeddings_in(model).items()}
    if step is None:
        step = max((embedding.store.step for embedding in embeddings.values()), default=0)
    if step % every:
        return {}
    check_logger(logger)
    figures = {
        f"{name}/{figure}": value
        for name, embedding in embeddings.items()
        for figure, value in embedding.metrics().items()
    }
    if isinstance(logger, logging.Logger | logging.LoggerAdapter):
        logger.info("step %s: %s", step, figures)
    elif hasattr(logger, "log_metrics"):
        logger.log_metrics(figures, step)
    elif hasattr(logger, "add_scalar"):
        for figure, value in figures.items():
            logger.add_scalar(figure, value, step)
    elif hasattr(logger, "log_dict"):
        logger.log_dict(figures)
    elif hasattr(logger, "log"):
        logger.log(figures, step=step)
    elif logger is not None:
        logger(figures, step)
    return figures


def check_logger(logger: Any) -> None:
    """Raise TypeError unless figures can be handed to the logger."""
    if logger is None or callable(logger) or isinstance(logger, logging.Logger | logging.LoggerAdapter):
        return
    if not any(hasattr(logger, name) for name in ("log_metrics", "add_scalar", "log_dict", "log")):
        raise TypeError(
            "logger must have log_metrics, add_scalar, log_dict or log, or be a function of (figures, step), got"
            f" {type(logger).__name__}"
        )
