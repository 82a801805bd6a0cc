"""Train a click model on KuaiRand-Pure, its embeddings on the device, in host memory or on an SSD; kill it; resume it.

    python examples/kuairand_dlrm.py --store ssd                   # trains, prints AUC on the last day
    python examples/kuairand_dlrm.py --store ssd --resume          # goes on from the last checkpoint
    python examples/kuairand_dlrm.py --store ssd --baselines       # and what it has to beat, on the same days
    python examples/kuairand_dlrm.py --store ssd --save-every 500  # with checkpoints for serve.py to follow

Data is read from --data, else from the folder that ONEEMB_DATA names, else from ../shared/data/kuairand beside the
repository; where there is none, a click log is generated from a known model.

What must stay true: what follows a checkpoint is a pure function of it and of the arguments, so a run that was killed
and resumed ends with the same weights, bit for bit, as one that was not. A snapshot is whole before a checkpoint names
it, and stays until a newer checkpoint has its place.
"""

import argparse
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import constant, logistic_regression, on_embedding_bags
from dlrm import DLRM, TABLES, OneEmbLookup
from generated_log import generate_tables
from kuairand import PADDING, ClickLog, encode, read_tables
from sklearn.metrics import log_loss, roc_auc_score
from tqdm import tqdm

import oneemb
from oneemb.policies import RowPolicy

REPOSITORY = Path(__file__).resolve().parent.parent
ROW_RATE, DENSE_RATE = 0.02, 1e-3
# Click models overfit from the second pass over a log on (Zhang et al. arXiv:2209.06053): later passes only refine.
RATE_DECAY = 0.02
KEPT = 3  # snapshots between epochs that stay: a server may be at work on the one before

NOT_BEGUN = (0, 0.0)
"""Steps of an epoch that have been made, and the sum of their events' losses."""

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Run the script. Returns the figures of each epoch, resumed ones too."""
    arguments = parse(argv)
    with hold(arguments.workdir):
        return run(arguments, load(arguments))


def run(arguments: argparse.Namespace, log: ClickLog) -> list[dict[str, float]]:
    """Train, and save. Returns the figures of each epoch, resumed ones too."""
    torch.set_num_threads(1)  # the dense layers are small, and a sum's bits depend on how many share it
    torch.manual_seed(arguments.seed)
    checkpoint_path = arguments.workdir / "checkpoint.pt"
    if not (arguments.resume and checkpoint_path.exists()):
        start_anew(arguments, checkpoint_path)

    embedding = make_embedding(arguments, len(log.fields))
    model = DLRM(OneEmbLookup(embedding, log.fields), len(log.fields), log.numeric_EX.shape[1], arguments.dim)
    twin = on_embedding_bags(model, log) if arguments.baselines else None
    optimizers = make_optimizers(model)
    step = TrainStep(model, optimizers)
    settings = what_must_agree(arguments, log)
    results: list[dict[str, float]] = []
    begun = NOT_BEGUN
    if checkpoint_path.exists():
        results, begun = load_checkpoint(checkpoint_path, settings, model, optimizers)

    def save(snapshot: str, begun: tuple[int, float]) -> None:
        embedding.save_snapshot(snapshot, overwrite=True)  # a killed run may have left one
        state = {
            "settings": settings,
            "fields": [(field.name, field.width) for field in log.fields],
            "numbers": log.numeric_EX.shape[1],
            "model": model.state_dict(),  # names the embedding's snapshot
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "rng": torch.get_rng_state(),
            "results": results,
            "begun": begun,
        }
        save_checkpoint(checkpoint_path, state)
        between = [name for name in embedding.snapshots() if name.startswith("step-")]
        for name in between[:-KEPT]:
            embedding.delete_snapshot(name)

    steps = -(-len(log.train) // arguments.batch_size)
    for epoch in range(len(results), arguments.epochs):

        def after_step(done: int, total: float, before: int = epoch * steps) -> None:
            if arguments.save_every is not None and (before + done) % arguments.save_every == 0 and done < steps:
                save(f"step-{before + done}", (done, total))

        before, start = counted(embedding), time.perf_counter()
        loss = train_epoch(step, optimizers, log, epoch, arguments, begun, after_step)
        seconds = time.perf_counter() - start
        results.append({"loss": loss, **scores(log, predict(model, log))})
        save(f"epoch-{epoch + 1}", NOT_BEGUN)
        examples = len(log.train) - begun[0] * arguments.batch_size
        report(epoch, arguments.epochs, results[-1], examples / seconds, before, counted(embedding))
        begun = NOT_BEGUN

    table = {f"DLRM, oneemb, {arguments.store} store": results[-1]} if results else {}
    if twin is not None:
        table |= run_baselines(log, twin, arguments)
    if log.probability_E is not None:
        table["the planted model: the best there can be"] = scores(log, log.probability_E[log.validation])
    for name, figures in table.items():
        print(f"{name:42} AUC {figures['auc']:.4f}  logloss {figures['logloss']:.4f}")
    embedding.close()
    return results


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("Train a DLRM on a click log with oneemb embeddings.", REPOSITORY / "build/kuairand")
    parser.add_argument("--baselines", action="store_true", help="run what the DLRM has to beat, too")
    parser.add_argument("--save-every", type=at_least_1, metavar="STEPS", help="save checkpoints between epochs, too")
    return parser.parse_args(argv)


def at_least_1(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def make_parser(description: str, workdir: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--store", choices=["device", "host", "ssd"], default="ssd", help="where embedding rows live")
    parser.add_argument("--cache-mb", type=int, default=8, help="MiB of cache over the host or ssd store")
    parser.add_argument("--threads", type=int, help="threads of the embedding's kernels; default: the cores there are")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--dim", type=int, default=16, help="weights of an embedding row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of KuaiRand-Pure's csv.gz files")
    parser.add_argument("--generate", type=int, metavar="EVENTS", help="use a generated log, whatever data there is")
    parser.add_argument("--workdir", type=Path, default=workdir, help="tables and checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --workdir")
    return parser


def load(arguments: argparse.Namespace) -> ClickLog:
    """The click log there is, and a line about which it is."""
    named = arguments.data or os.environ.get("ONEEMB_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared/data/kuairand"
    if arguments.generate is None and (named or folder.is_dir()):
        log, source = encode(read_tables(folder)), f"KuaiRand-Pure in {folder}"
    else:
        events = arguments.generate or 120_000
        log, source = encode(generate_tables(events, arguments.seed)), f"a generated click log of {events:,} events"
    print(
        f"data: {source}\n      {len(log.train):,} events train, {len(log.validation):,} of 30 April validate;"
        f" {len(log.fields)} fields, {log.numeric_EX.shape[1]} numbers"
    )
    return log


def make_embedding(
    arguments: argparse.Namespace,
    tables: int,
    process_group: torch.distributed.ProcessGroup | None = None,
    *,
    policy: RowPolicy | None = None,
    capacity: int | None = None,
) -> oneemb.MultiTableEmbedding:
    path = str(arguments.workdir / TABLES)
    if arguments.store == "device":
        store: Any = oneemb.make_device_mem_store_options(path, capacity)
    elif arguments.store == "host":
        store = oneemb.make_cached_host_mem_store_options(arguments.cache_mb, path, capacity=capacity)
    else:
        store = oneemb.make_cached_ssd_store_options(arguments.cache_mb, path, capacity=capacity)
    initializer = oneemb.make_normal_initializer(mean=0, std=0.01)
    return oneemb.MultiTableEmbedding(
        name="kuairand",
        embedding_dim=arguments.dim,
        dtype=torch.float32,
        key_type=torch.int64,
        tables=[oneemb.make_table(initializer)] * tables,
        store_options=store,
        padding_idx=PADDING,
        seed=arguments.seed,
        num_threads=arguments.threads,
        process_group=process_group,
        policy=policy,
    )


# ---- training -------------------------------------------------------------------------------------------------------


class TrainStep(oneemb.TrainGraph):
    """One step as a graph: embedding rows and dense weights are updated by the call."""

    def __init__(self, model: DLRM, optimizers: list[torch.optim.Optimizer]):
        super().__init__()
        self.model = model
        for optimizer in optimizers:
            self.add_optimizer(optimizer)

    def build(self, numeric_BX: torch.Tensor, id_BL: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(numeric_BX, id_BL), label_B)
        loss.backward()
        return loss


def make_optimizers(model: DLRM) -> list[torch.optim.Optimizer]:
    """Adagrad for embedding rows, Adam for the rest."""
    rows = list(model.lookup.parameters())
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    return [torch.optim.Adagrad(rows, lr=ROW_RATE), torch.optim.Adam(dense, lr=DENSE_RATE, fused=True)]


def train_epoch(
    step: Step,
    optimizers: list[torch.optim.Optimizer],
    log: ClickLog,
    epoch: int,
    arguments: argparse.Namespace,
    begun: tuple[int, float] = NOT_BEGUN,
    after_step: Callable[[int, float], None] | None = None,
) -> float:
    """Train on every event once, day after day, and return the mean loss of an event.

    Args:
        begun: steps of this epoch that have been made, and the sum of their events' losses.
        after_step: called with the same after each step.
    """
    set_rates(optimizers, epoch)
    (skipped, total), done = begun, 0
    with tqdm(total=len(log.train), unit="ex", desc=f"epoch {epoch + 1}", leave=False, disable=None) as bar:
        for number, events in enumerate(batches_of(log, epoch, arguments), 1):
            done += len(events)
            bar.update(len(events))
            if number <= skipped:
                continue
            total += step(*log.batch(events)).item() * len(events)
            bar.set_postfix(loss=f"{total / done:.4f}", refresh=False)
            if after_step is not None:
                after_step(number, total)
    return total / done


def set_rates(optimizers: list[torch.optim.Optimizer], epoch: int) -> None:
    for optimizer, rate in zip(optimizers, (ROW_RATE, DENSE_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * RATE_DECAY**epoch


def batches_of(log: ClickLog, epoch: int, arguments: argparse.Namespace) -> Iterator[np.ndarray]:
    """The events of each batch. Seed and epoch alone decide the order of a day's events."""
    rng = np.random.default_rng([arguments.seed, epoch])
    order = np.concatenate([rng.permutation(day) for day in log.train_days])
    for begin in range(0, len(order), arguments.batch_size):
        yield order[begin : begin + arguments.batch_size]


@torch.no_grad()
def predict(model: DLRM, log: ClickLog, rank: int = 0, ranks: int = 1) -> np.ndarray:
    """The probability of a click on each validation event; of several ranks each predicts `[rank::ranks]` of them, in
    as many batches as the others."""
    model.eval()
    device = next(model.top.parameters()).device
    batches = np.array_split(log.validation[rank::ranks], max(1, len(log.validation) // ranks // 1024))
    logit = torch.cat([model(*(part.to(device) for part in log.batch(events)[:2])) for events in batches])
    model.train()
    return torch.sigmoid(logit.double()).cpu().numpy()


def scores(log: ClickLog, probability: np.ndarray) -> dict[str, float]:
    label = log.label_E[log.validation]
    return {"auc": float(roc_auc_score(label, probability)), "logloss": float(log_loss(label, probability))}


def counted(embedding: oneemb.MultiTableEmbedding) -> np.ndarray:
    """Cache hits, cache misses and rows so far."""
    stats = embedding.stats()
    return np.array([stats["device"]["hits"], stats["device"]["misses"], stats["rows"]])


def report(
    epoch: int, epochs: int, figures: dict[str, float], examples_per_s: float, before: np.ndarray, after: np.ndarray
) -> None:
    """Print the figures of an epoch, with what `counted` gave before and after it."""
    hits, misses, _ = after - before
    print(
        f"epoch {epoch + 1}/{epochs}  loss {figures['loss']:.6f}  AUC {figures['auc']:.4f}"
        f"  logloss {figures['logloss']:.4f}  {examples_per_s:,.0f} examples/s  cache hits {hits / (hits + misses):.1%}"
        f"  {int(after[2]):,} rows",
        flush=True,
    )


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Keep other runs out of the work folder. A run that is killed lets go of it."""
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run is at work in {workdir}; wait for it, or name another --workdir") from None
        yield


def start_anew(arguments: argparse.Namespace, checkpoint_path: Path) -> None:
    """Remove what an earlier run left in the work folder."""
    if arguments.resume:
        print(f"no checkpoint in {arguments.workdir}: starting from the first epoch")
    checkpoint_path.unlink(missing_ok=True)
    shutil.rmtree(arguments.workdir / TABLES, ignore_errors=True)


def what_must_agree(arguments: argparse.Namespace, log: ClickLog) -> dict[str, int]:
    """What a resumed run shares with the run that it resumes."""
    named = {name: getattr(arguments, name) for name in ("seed", "batch_size", "dim")}
    return {**named, "train_events": len(log.train)}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Put a checkpoint in the place of the last one, atomically."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def load_checkpoint(
    path: Path, settings: dict[str, int], model: DLRM, optimizers: list[torch.optim.Optimizer]
) -> tuple[list[dict[str, float]], tuple[int, float]]:
    """Take up a checkpoint. Returns the figures of its epochs, and how far the next one is begun."""
    state = torch.load(path, weights_only=True)
    if state["settings"] != settings:
        raise SystemExit(f"{path} was made with {state['settings']}, asked for {settings}")
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    torch.set_rng_state(state["rng"])
    steps, total = state["begun"]
    print(f"resumed after epoch {len(state['results'])}" + (f" and {steps} steps" if steps else ""))
    return state["results"], (steps, total)


# ---- baselines ------------------------------------------------------------------------------------------------------


def run_baselines(log: ClickLog, twin: DLRM, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train and score each baseline on the split of the DLRM."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # as by default, but said, so that torch does not warn
    optimizers = make_optimizers(twin)

    def step(numeric_BX: torch.Tensor, id_BL: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(twin(numeric_BX, id_BL), label_B)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    for epoch in range(arguments.epochs):
        train_epoch(step, optimizers, log, epoch, arguments)
    return {
        "DLRM, nn.EmbeddingBag(sparse=True)": scores(log, predict(twin, log)),
        "logistic regression, one-hot": scores(log, logistic_regression(log)),
        "a constant": scores(log, constant(log)),
    }


if __name__ == "__main__":
    main()
