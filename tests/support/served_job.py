"""A run of the demo that notes what each of its versions must answer, and a client of the server.

The oracle is the job itself: rows as its embedding in eval mode gives them just before a snapshot, dense weights as
they go into the checkpoint. What is noted is found by the snapshot's name: a resumed run has the same bits.
"""

import contextlib
import http.client
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch

import oneemb

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Rows(torch.nn.Module):
    """A lookup that gives rows which are there already."""

    def __init__(self, row_BLD):
        super().__init__()
        self.row_BLD = row_BLD

    def forward(self, ids, table_ids):
        return self.row_BLD


def as_int8(row_BLD):
    """As torch's own op quantizes rows and reads them."""
    ops = torch.ops.quantized
    packed = ops.embedding_bag_byte_prepack(row_BLD.reshape(-1, row_BLD.shape[-1]).contiguous())
    return ops.embedding_bag_byte_unpack(packed).view_as(row_BLD)


def first_examples(log, arguments, batches, size):
    """[(numeric_BX, id_BL)]: the examples that a job trains on first, whose ids any of its snapshots has."""
    import kuairand_dlrm as script

    events = next(script.batches_of(log, 0, arguments))
    return [log.batch(events[size * i : size * (i + 1)])[:2] for i in range(batches)]


@contextlib.contextmanager
def noted(probes, fields, note):
    """In here, `note(name, answers)` is called at each checkpoint, before it is there.

    Args:
        probes: [(numeric_BX, id_BL)].
        note: answers has of each probe {"float32": scores, "int8": scores, "rows": bytes of [B, L, D]}.
    """
    import kuairand_dlrm as script

    real_snapshot, real_checkpoint = oneemb.MultiTableEmbedding.save_snapshot, script.save_checkpoint
    table_L = torch.repeat_interleave(torch.arange(len(fields)), torch.tensor([field.width for field in fields]))
    found = {}

    def snapshot(embedding, name, **options):
        embedding.eval()
        with torch.no_grad():
            found[name] = [embedding(id_BL, table_L) for _, id_BL in probes]
        embedding.train()
        real_snapshot(embedding, name, **options)

    def checkpoint(path, state):
        (name,) = found
        note(name, answers(found.pop(name), state))
        real_checkpoint(path, state)

    @torch.no_grad()
    def answers(rows, state):
        out = []
        for (numeric_BX, id_BL), row_BLD in zip(probes, rows, strict=True):
            its = {"rows": row_BLD.numpy().tobytes()}
            for dtype, read in ("float32", row_BLD), ("int8", as_int8(row_BLD)):
                lookup = script.OneEmbLookup(Rows(read), fields)
                model = script.DLRM(lookup, len(fields), numeric_BX.shape[1], row_BLD.shape[-1])
                for part in "bottom", "top":
                    of = f"{part}."
                    weights = {k[len(of) :]: v for k, v in state["model"].items() if k.startswith(of)}
                    getattr(model, part).load_state_dict(weights)
                its[dtype] = torch.sigmoid(model(numeric_BX, id_BL).double()).tolist()
            out.append(its)
        return out

    with (
        mock.patch.object(oneemb.MultiTableEmbedding, "save_snapshot", snapshot),
        mock.patch.object(script, "save_checkpoint", checkpoint),
    ):
        yield


def body_of(probe):
    numeric_BX, id_BL = probe
    return json.dumps({"numbers": numeric_BX.tolist(), "ids": id_BL.tolist()}).encode()


class Client:
    """One connection, which is made anew where the server has closed it."""

    def __init__(self, port):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(self, method, path, body=None, **headers):
        """(status, headers, content) of an answer."""
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    def score(self, body):
        status, _, content = self.ask("POST", "/score", body)
        return status, json.loads(content)

    def close(self):
        self._connection.close()


def main(argv):
    """The demo, which writes what its versions must answer to a file, a line each: FILE, then its arguments.

    After its first version it waits until there is FILE.go.
    """
    sys.path.insert(0, str(EXAMPLES))
    import kuairand_dlrm as script

    path, *argv = argv
    script.RATE_DECAY = 1.0  # Else versions of late epochs could not be told from each other.
    arguments = script.parse(argv)
    log = script.load(arguments)
    noted_so_far = []
    with open(path, "a") as file:

        def note(name, answers):
            its = [{**one, "rows": one["rows"].hex()} for one in answers]
            file.write(json.dumps([name, its]) + "\n")
            file.flush()
            while len(noted_so_far) and not os.path.exists(f"{path}.go"):
                time.sleep(0.01)
            noted_so_far.append(name)

        with noted(first_examples(log, arguments, 3, 8), log.fields, note), script.hold(arguments.workdir):
            script.run(arguments, log)


if __name__ == "__main__":
    main(sys.argv[1:])
