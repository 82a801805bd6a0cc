"""The click model of kuairand_dlrm.py, trained by several processes that own its embedding rows together.

    torchrun --nproc-per-node 2 examples/kuairand_dlrm_distributed.py
    torchrun --nproc-per-node 3 examples/kuairand_dlrm_distributed.py --resume   # any number of processes goes on

Each process trains on its part of every batch. Embedding rows live with their owners (`process_group`), dense modules
are copies that DistributedDataParallel keeps equal. `--workdir` is a folder that all processes see.

What must stay true: the losses of the parts are weighted so that their mean over the processes is the loss of the whole
batch. So figures depend on the number of processes by rounding alone, and are those of kuairand_dlrm.py.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from typing import Any

import numpy as np
import torch
from dlrm import DLRM, OneEmbLookup
from kuairand import ClickLog
from kuairand_dlrm import (
    REPOSITORY,
    TrainStep,
    batches_of,
    counted,
    hold,
    load,
    make_embedding,
    make_optimizers,
    make_parser,
    predict,
    report,
    scores,
    set_rates,
    start_anew,
    what_must_agree,
)
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Run the script on one process of torchrun's. Returns the figures of each epoch, the same on all processes."""
    arguments = parse(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with ExitStack() as held:
        if distributed.get_rank() == 0:
            held.enter_context(hold(arguments.workdir))
        else:
            silence = held.enter_context(open(os.devnull, "w"))
            held.enter_context(redirect_stdout(silence))  # the first process speaks for all
        results = run(arguments, device)
    distributed.destroy_process_group()
    return results


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("Train a DLRM with several processes.", REPOSITORY / "build/kuairand_distributed")
    arguments = parser.parse_args(argv)
    if arguments.threads is None:  # the processes of a machine share its cores
        arguments.threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))
    return arguments


def run(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    log = load(arguments)
    checkpoint_path = arguments.workdir / "checkpoint"
    if rank == 0 and not (arguments.resume and checkpoint_path.exists()):
        start_anew(arguments, checkpoint_path)
    distributed.barrier()  # Nobody opens what the first process is still removing.

    embedding = make_embedding(arguments, len(log.fields), distributed.group.WORLD)
    model = DLRM(OneEmbLookup(embedding, log.fields), len(log.fields), log.numeric_EX.shape[1], arguments.dim)
    model.to(device)
    # Around what is dense alone: an embedding inside would have each process train rows of its own.
    model.bottom, model.top = DistributedDataParallel(model.bottom), DistributedDataParallel(model.top)
    optimizers = make_optimizers(model)
    graph = RankTrainStep(model, optimizers, what_must_agree(arguments, log))
    if checkpoint_path.exists():
        graph.load(checkpoint_path)
        print(f"resumed after epoch {len(graph.results)} on {ranks} processes")

    for epoch in range(len(graph.results), arguments.epochs):
        set_rates(optimizers, epoch)
        before, start, total = counted(embedding), time.perf_counter(), 0.0
        for loss in graph.run(parts_of(log, epoch, arguments, device)):
            total += loss.item()
        (total,) = sums([total], device).tolist()
        seconds = time.perf_counter() - start
        probability = np.zeros(len(log.validation))
        probability[rank::ranks] = predict(model, log, rank, ranks)
        probability = sums(probability, device)  # A number and zeros: the sum is exact.
        graph.results.append({"loss": total / len(log.train), **scores(log, probability)})
        graph.save(checkpoint_path, keep=1)
        before, after = sums(before, device), sums(counted(embedding), device)
        report(epoch, arguments.epochs, graph.results[-1], len(log.train) / seconds, before, after)

    if graph.results:
        figures = graph.results[-1]
        print(f"{f'DLRM on {ranks} processes':42} AUC {figures['auc']:.4f}  logloss {figures['logloss']:.4f}")
    embedding.close()
    return graph.results


class RankTrainStep(TrainStep):
    """A step on this process's part of a batch. Its checkpoints keep the figures of the epochs too."""

    def __init__(self, model: DLRM, optimizers: list[torch.optim.Optimizer], settings: dict[str, int]):
        super().__init__(model, optimizers)
        self.settings = settings
        self.results: list[dict[str, float]] = []

    def build(
        self, numeric_BX: torch.Tensor, id_BL: torch.Tensor, label_B: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """The sum of the losses of the part. `weight` makes their mean over processes the mean of the batch."""
        logit_B = self.model(numeric_BX, id_BL)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit_B, label_B, reduction="sum")
        (loss * weight).backward()
        return loss.detach()

    def get_extra_state(self) -> dict[str, Any]:
        return {"settings": self.settings, "results": self.results}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["settings"] != self.settings:
            raise SystemExit(f"the checkpoint was made with {state['settings']}, asked for {self.settings}")
        self.results = list(state["results"])


def parts_of(
    log: ClickLog, epoch: int, arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """This process's part of each batch, which may be empty, with the weight of its losses."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for events in batches_of(log, epoch, arguments):
        numeric_BX, id_BL, label_B = (part.to(device) for part in log.batch(events[rank::ranks]))
        yield numeric_BX, id_BL, label_B, ranks / len(events)


def sums(mine: Any, device: torch.device) -> np.ndarray:
    """The sums over all processes of numbers, or of arrays of one shape."""
    total = torch.as_tensor(np.asarray(mine, np.float64), device=device)
    distributed.all_reduce(total)
    return total.cpu().numpy()


if __name__ == "__main__":
    main()
