"""Names of other libraries for modules of oneemb, and a runner that brings scripts written for a GPU to the CPU.

    from oneemb.compat import install

    install("dynamicemb")
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner      is that of oneemb.dynamicemb.planner

    python -m oneemb.compat dynamicemb script.py --train                the same for a script that stays as it is
    torchrun --nproc_per_node 2 -m oneemb.compat dynamicemb script.py --train
    python -m oneemb.compat dynamicemb -m pytest tests

Importing this package loads no torch. `oneemb.compat.names` has the names, `oneemb.compat.runner` the runner,
`oneemb.compat.rewrite` its changes to a script, and `oneemb.compat.cuda` the replacement of `torch.cuda`.
"""

from oneemb.compat.names import install

__all__ = ["install"]
