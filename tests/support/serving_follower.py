"""A process that follows a job's snapshots and writes what it reads: PATH PROBES.

A line for each lookup that read what none has read before: the versions just before and just after it, and a digest of
the rows. So a version that reads in two ways has two lines.
"""

import hashlib
import json
import sys
import time

import torch

import oneemb


def digest(row_bytes):
    return hashlib.sha256(row_bytes).hexdigest()


def main(path, probes_path):
    probes, table_L = torch.load(probes_path)
    torch.set_num_threads(1)
    embedding = oneemb.InferenceEmbedding.open(path, num_threads=1)
    embedding.follow(0.02)
    written = set()
    while True:
        for probe, id_BL in enumerate(probes):
            before = embedding.version
            try:
                rows = embedding(id_BL, table_L)
            except oneemb.StorageError as error:  # of following, once: the job may have removed what it was to read
                print(json.dumps({"error": str(error)}), flush=True)
                continue
            time.sleep(0.002)  # Others are at work on this machine.
            found = (before, embedding.version, probe, digest(rows.numpy().tobytes()))
            if found not in written:
                written.add(found)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
