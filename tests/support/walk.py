"""Walk of a call: the functions of the packages that it enters, in their order.

`python -m tests.support.walk` prints the walk of a lookup of ids that leaves no gradient.
"""

import os
import sys
import tempfile

PACKAGES = ("oneemb", "graph", "storage", "kernels")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def walk_of(call):
    """(file, function) of each call of a Python function of the packages."""
    found = []

    def profile(frame, event, argument):
        file = os.path.relpath(os.path.realpath(frame.f_code.co_filename), ROOT)
        if event == "call" and file.split(os.sep)[0] in PACKAGES:
            found.append((file, frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def walk_of_ids(path):
    """Walk of a lookup of known ids in eager mode, which leaves no gradient."""
    import torch

    import oneemb

    embedding = oneemb.MultiTableEmbedding(
        "items", 8, torch.float32, torch.int64, [oneemb.make_table()], oneemb.make_device_mem_store_options(path),
        num_threads=1,
    )  # fmt: skip
    ids = torch.arange(4)
    embedding(ids)
    with torch.no_grad():
        for _ in range(3):
            embedding(ids)
        # The shortest of a few: a collection of garbage may enter the finalizers of others.
        walk = min((walk_of(lambda: embedding(ids)) for _ in range(5)), key=len)
    embedding.close()
    return walk


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        walk = walk_of_ids(folder)
    for file, function in walk:
        print(f"{file}: {function}")
    print(f"{len({file for file, _ in walk})} files, {len(walk)} calls")
