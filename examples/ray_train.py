"""The click model of several_ranks.py on the workers of Ray Train. A worker that dies is started anew by Ray, and the
job goes on from the last checkpoint; it may be run again with another number of workers.

    pip install 'oneemb[ray]'
    python examples/ray_train.py --workers 4 --epochs 2
    python examples/ray_train.py --workers 3 --epochs 4     # goes on after epoch 2
    python examples/ray_train.py --workers 5 --epochs 6

`--folder` is on a disk that all machines of the cluster see.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path


def worker(config):
    """Runs on each worker, in the process group that Ray has made."""
    sys.path.insert(0, config["examples"])
    import torch
    from ray import train as ray_train
    from several_ranks import train
    from torch import distributed

    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), distributed.get_rank()

    def report(epoch, loss):
        if rank == 0:
            with open(folder / "losses.jsonl", "a") as file:
                file.write(json.dumps({"epoch": epoch, "loss": loss, "ranks": distributed.get_world_size()}) + "\n")
        ray_train.report({"epoch": epoch, "loss": loss})
        killed = folder / "killed"
        if epoch == config["kill_after"] and rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, config["epochs"], report)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("ray_train"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill-after", type=int, default=-1, help="epoch after which worker 1 is killed, once")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=options.workers + 1, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        worker,
        train_loop_config={
            "folder": str(folder), "epochs": options.epochs, "kill_after": options.kill_after,
            "examples": str(Path(__file__).resolve().parent),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)),
    )  # fmt: skip
    trainer.fit()
    ray.shutdown()
    for line in (folder / "losses.jsonl").read_text().splitlines():
        found = json.loads(line)
        print(f"epoch {found['epoch']}  loss {found['loss']:.6f}  ranks {found['ranks']}")


if __name__ == "__main__":
    main()
