"""Gives modules of oneemb the names of other libraries, and runs scripts that were written for GPUs on a CPU.

    from oneemb.compat import install

    install("dynamicemb")
    from dynamicemb.planner import DynamicEmbeddingShardingPlanner      is the class of oneemb.dynamicemb.planner

    python -m oneemb.compat dynamicemb script.py --train                runs an unchanged script in this way
    torchrun --nproc_per_node 2 -m oneemb.compat dynamicemb script.py --train
    python -m oneemb.compat dynamicemb -m pytest tests

Importing this package does not import torch. `oneemb.compat.names` maps the names, `oneemb.compat.runner` runs scripts,
`oneemb.compat.rewrite` changes a script's syntax tree, and `oneemb.compat.cuda` replaces `torch.cuda`.
"""

from oneemb.compat.names import install

__all__ = ["install"]
