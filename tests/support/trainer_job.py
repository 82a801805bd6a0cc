"""A job of two ranks by a trainer: `python -m tests.support.trainer_job WHICH FOLDER`, with torchrun for all but
lightning and fabric, which start the second rank themselves.

Every trainer wraps the whole model in DistributedDataParallel. Rank 0 writes all weights to FOLDER/numbers.pt.
"""

import pathlib
import sys

import torch

from tests.support.click_model import ClickModel, clicks
from tests.support.models import make_embedding

EPOCHS = 2
CLIP = 0.05


def ranked_model(path):
    """The click model, whose rows all ranks own together."""
    ranks = torch.distributed.group.WORLD
    return ClickModel(
        make_embedding(path / "items", dim=4, name="items", process_group=ranks),
        make_embedding(path / "words", dim=4, name="words", seed=1, process_group=ranks),
    )


def own_clicks(rank):
    """Half of each batch."""
    return [tuple(part[rank::2] for part in batch) for batch in clicks()]


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.2, initial_accumulator_value=0.1)


class Loss(torch.nn.Module):
    """Trainers call `forward` of what they have wrapped."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *batch):
        return self.model.loss(*batch)


def by_fabric(folder):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    raw = Loss(ranked_model(folder / "rows"))
    module, optimizer = fabric.setup(raw, adagrad(raw.parameters()))
    for epoch in range(EPOCHS):
        for batch in own_clicks(fabric.global_rank):
            fabric.backward(module(*batch))
            fabric.clip_gradients(module, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(folder / f"{epoch}.ckpt", {"model": module, "optimizer": optimizer})
    expected = raw.model.numbers()
    for batch in own_clicks(fabric.global_rank):
        fabric.backward(module(*batch))
        optimizer.step()
        optimizer.zero_grad()
    fabric.load(folder / f"{EPOCHS - 1}.ckpt", {"model": module, "optimizer": optimizer})
    numbers = raw.model.numbers()
    assert all(map(torch.equal, numbers, expected))
    return fabric.global_rank, numbers


def by_accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    raw = Loss(ranked_model(folder / "rows"))
    module, optimizer = accelerator.prepare(raw, adagrad(raw.parameters()))
    assert isinstance(module, torch.nn.parallel.DistributedDataParallel)
    for _ in range(EPOCHS):
        for batch in own_clicks(accelerator.process_index):
            accelerator.backward(module(*batch))
            accelerator.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    expected = raw.model.numbers()
    accelerator.save_state(folder / "state")
    for batch in own_clicks(accelerator.process_index):
        accelerator.backward(module(*batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.load_state(folder / "state")
    numbers = raw.model.numbers()
    assert all(map(torch.equal, numbers, expected))
    return accelerator.process_index, numbers


def documented(name):
    """A class of docs/lightning.md."""
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "lightning.md"
    blocks = [part.split("```")[0] for part in page.read_text().split("```python\n")[1:]]
    names = {"module": None}
    for block in blocks:
        exec(block, names)
    return names[name]


def by_lightning(folder):
    import pytorch_lightning

    RowsOfCheckpoints = documented("RowsOfCheckpoints")

    class Clicks(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = None

        def configure_model(self):  # The group of ranks exists now.
            if self.model is None:
                self.model = ranked_model(folder / "rows")

        def train_dataloader(self):
            return torch.utils.data.DataLoader(own_clicks(self.global_rank), batch_size=None)

        def training_step(self, batch, batch_idx):
            return self.model.loss(*batch)

        def configure_optimizers(self):
            return adagrad(self.parameters())

    def fit(epochs, **options):
        module = Clicks()
        saved = pytorch_lightning.callbacks.ModelCheckpoint(folder / "saved", save_top_k=1, monitor=None)
        often = pytorch_lightning.callbacks.ModelCheckpoint(
            folder / "saved", "often", every_n_train_steps=2, save_top_k=1, monitor=None
        )
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False, max_epochs=epochs,
            gradient_clip_val=CLIP, callbacks=[saved, often, RowsOfCheckpoints(folder / "saved")],
            default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, **options)
        return trainer, module.model, saved.best_model_path

    trainer, model, path = fit(EPOCHS)
    expected = model.numbers()
    # Of 9 saves. The files name two, and the snapshot of the file that was removed last goes at the next save.
    assert all(len(table.snapshots()) <= 3 for table in (model.items, model.words))
    model.items.close()
    model.words.close()
    further, model, _ = fit(EPOCHS, ckpt_path=path, weights_only=True)  # goes on from the end
    assert all(map(torch.equal, model.numbers(), expected)) and further.global_step == trainer.global_step
    return trainer.global_rank, expected


if __name__ == "__main__":
    which, folder = sys.argv[1:]
    torch.set_num_threads(1)
    rank, numbers = {"lightning": by_lightning, "fabric": by_fabric, "accelerate": by_accelerate}[which](
        pathlib.Path(folder)
    )
    if rank == 0:
        torch.save(numbers, f"{folder}/numbers.pt")
