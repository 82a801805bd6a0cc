"""What `oneemb.plan` says of bytes and memory is what there is; what it says of time follows from the figures given."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import oneemb
import oneemb.planning.machine as machine_module
from oneemb.cli.commands import oneemb as command
from oneemb.embeddings.rank_traffic import KeyCounts, PartCounts, messages_of
from oneemb.graph.ranks import Ranks
from oneemb.kernels.owner import owner_of

STEPS = 6


class Noted:
    """A process group that notes the bytes that go to each rank."""

    def __init__(self, group):
        self._group, self.sent = group, []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def alltoall_base(self, received, sent, received_R, sent_R):
        row_bytes = sent.element_size() * (sent.numel() // max(1, len(sent)))
        self.sent.append([n * row_bytes for n in sent_R])
        return self._group.alltoall_base(received, sent, received_R, sent_R)


class Steps(oneemb.TrainGraph):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = torch.nn.ModuleList(embeddings)
        self.add_optimizer(torch.optim.Adagrad(self.parameters(), lr=0.1))

    def build(self, *ids):
        sum(embedding(one).float().sum() for embedding, one in zip(self.embeddings, ids, strict=True)).backward()


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(0, 50, shape, generator=generator) for shape in [(13, 2), (7, 3)]]


def counts_of(step, rank, ranks):
    """How many keys of each lookup this rank asks each other one for."""
    counts = []
    for ids in batch_of(step, rank):
        table_N = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape).ravel()
        keys = np.unique(np.stack([table_N, ids.numpy().ravel()]), axis=1)
        owner_U = owner_of(keys[0].astype(np.int32), keys[1], ranks)
        counts.append(np.bincount(owner_U, minlength=ranks).tolist())
    return counts


def sends(group, path, in_run, comm_dtype):
    """What goes to each rank in steps, and what goes ahead of them."""
    noted, again, ahead = Noted(group), Ranks.again, []

    def note_again(ranks):
        other = again(ranks)
        other.group = Noted(other.group)
        ahead.append(other.group.sent)
        return other

    Ranks.again = note_again
    embeddings = []
    for name, dim, dtype, tables in [("a", 5, torch.float32, 2), ("b", 3, torch.bfloat16, 3)]:
        options = oneemb.make_device_mem_store_options(f"{path}/{name}")
        embeddings.append(
            oneemb.MultiTableEmbedding(
                name,
                dim,
                dtype,
                torch.int64,
                [oneemb.make_table()] * tables,
                options,
                process_group=noted,
                comm_dtype=comm_dtype,
            )
        )
    graph = Steps(embeddings)
    batches = [batch_of(step, group.rank()) for step in range(STEPS)]
    try:
        for _ in graph.run(batches) if in_run else (graph(*batch) for batch in batches):
            pass
    finally:
        Ranks.again = again
    for embedding in embeddings:
        embedding.close()
    return noted.sent, sum(ahead, [])


@pytest.mark.parametrize("in_run, comm_dtype", [(False, "float32"), (True, "bfloat16"), (True, "float32")])
def test_ranks_send_the_bytes_that_are_said(tmp_path, rank_pool, in_run, comm_dtype):
    for ranks in (2, 3):
        results = rank_pool(ranks, sends, str(tmp_path / str(ranks)), in_run, getattr(torch, comm_dtype))
        for rank, (sent, ahead) in enumerate(results):
            counts = [counts_of(STEPS - 1, r, ranks) for r in range(ranks)]
            lookups = [
                oneemb.PlannedEmbedding(rows=1, embedding_dim=dim, dtype=dtype, comm_dtype=comm_dtype).keys(
                    counts[rank][e], [counts[r][e][rank] for r in range(ranks)]
                )
                for e, (dim, dtype) in enumerate([(5, "float32"), (3, "bfloat16")])
            ]
            said = messages_of(lookups, in_run=in_run)
            in_step, early = ([list(one.sent_R) for one in said if one.ahead == is_early] for is_early in (False, True))
            assert sent[-len(in_step) :] == in_step
            if in_run:
                assert ahead[-len(early) - 1 :] == [*early, [24] * ranks], "the last: that there is no other batch"


BAGS, LONG = 4, 30


def bags_of(step, rank):
    return torch.randint(0, 400, (BAGS * LONG,), generator=torch.Generator().manual_seed(100 * step + rank))


def sends_of_bags(group, path):
    """What goes to each rank in steps that sum bags."""
    noted, options = Noted(group), oneemb.make_device_mem_store_options(path)
    items = oneemb.MultiTableEmbedding(
        "items", 16, torch.float32, torch.int64, [oneemb.make_table()], options, process_group=noted
    )
    optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        items(bags_of(step, group.rank()), offsets=torch.arange(0, BAGS * LONG + 1, LONG)).sum().backward()
        optimizer.step()
    items.close()
    return noted.sent


def test_ranks_send_the_bytes_that_are_said_of_bags(tmp_path, rank_pool):
    ranks = 3
    asks, parts, ids = ([[0] * ranks for _ in range(ranks)] for _ in range(3))
    for rank in range(ranks):
        bag_of_id = bags_of(STEPS - 1, rank).view(BAGS, LONG).numpy()
        owners = owner_of(np.zeros(BAGS * LONG, np.int32), bag_of_id.ravel(), ranks).reshape(BAGS, LONG)
        for r in range(ranks):
            asks[rank][r] = len(np.unique(bag_of_id[owners == r]))
            parts[rank][r] = int((owners == r).any(1).sum())
            ids[rank][r] = int((owners == r).sum())
    for rank, sent in enumerate(rank_pool(ranks, sends_of_bags, str(tmp_path))):
        asked = [[of_all[r][rank] for r in range(ranks)] for of_all in (asks, parts)]
        counts = KeyCounts(16, 4, asks[rank], asked[0], parts=PartCounts(parts[rank], ids[rank], asked[1]))
        said = [list(one.sent_R) for one in messages_of([counts], in_run=False)]
        assert sent[-len(said) :] == said


# ---- what a plan says ------------------------------------------------------------------------------------------------

JOB = {"rows": 10**8, "embedding_dim": 16, "ids": 10, "unique": 0.5, "batch": 1000}


def test_the_bytes_of_a_plan_are_those_of_even_owners():
    planned = oneemb.plan(**JOB, ranks=4)
    each = [1250] * 4
    said = messages_of([KeyCounts(16, 4, each, each)])
    assert planned.bytes_sent == sum(sum(message.sent_R[1:]) for message in said)
    assert [one.name for one in planned.messages] == [message.name for message in said]
    twice = [2500] * 4
    everything = messages_of([KeyCounts(16, 4, twice, twice)])
    assert planned.bytes_sent_without_deduplication == sum(sum(message.sent_R[1:]) for message in everything)
    keys_rows_gradients = 3750 * (12 + 64 + 12 + 64)
    assert 0 < planned.bytes_sent - keys_rows_gradients < 1000, "headers and counts"
    assert oneemb.plan(**JOB).bytes_sent == 0


def test_a_step_has_no_more_unique_keys_than_there_are_rows():
    small = {**JOB, "rows": 100}
    assert oneemb.plan(**small, ranks=4).bytes_sent == oneemb.plan(**{**small, "unique": 0.01}, ranks=4).bytes_sent


def test_a_plan_of_bags_asks_owners_for_sums_where_that_moves_fewer_bytes():
    job = {**JOB, "ids": 200, "bags": 2, "unique": 0.8}
    sums, rows = oneemb.plan(**job, ranks=4), oneemb.plan(**{**job, "bags": None}, ranks=4)
    parts, ids = [2000] * 4, [50_000] * 4
    said = messages_of([KeyCounts(16, 4, [40_000] * 4, [40_000] * 4, parts=PartCounts(parts, ids, parts))])
    assert sums.bytes_sent == sum(sum(message.sent_R[1:]) for message in said) < rows.bytes_sent / 3
    assert sums.bytes_sent_without_deduplication == rows.bytes_sent_without_deduplication
    assert sum(sums.memory_bytes.values()) < sum(rows.memory_bytes.values())
    few_ids = {**job, "ids": 4}
    assert oneemb.plan(**few_ids, ranks=4).bytes_sent == oneemb.plan(**{**few_ids, "bags": None}, ranks=4).bytes_sent


def test_what_travels_in_fewer_bytes_is_said():
    whole, rounded, narrow = (
        oneemb.plan(**JOB, ranks=4, dtype=dtype, comm_dtype=comm_dtype).bytes_sent
        for dtype, comm_dtype in [("float32", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")]
    )
    assert abs(whole - rounded - 3750 * (32 + 32)) < 100 and rounded == narrow


def test_rows_that_are_read_ahead_of_a_step_take_no_time_of_it():
    job = JOB | {"cache_mb": 64, "hit_rate": 0.999}
    for ranks in (1, 4):
        assert "disk" not in oneemb.plan(**job, ranks=ranks).parts_ms
        slow = oneemb.plan(**job, ranks=ranks, machine=oneemb.Machine(disk_reads_per_s=10))
        hidden = sum(ms for name, ms in slow.parts_ms.items() if name != "disk")
        reads = slow.disk_reads_per_s * slow.step_ms / 1e3 * ranks / 10 * 1e3
        assert slow.parts_ms["disk"] == pytest.approx(reads - hidden, rel=1e-3)


def test_bytes_to_other_machines_are_those_to_their_ranks():
    planned = oneemb.plan(**JOB, ranks=8, ranks_per_machine=2)
    for message in planned.messages:
        assert abs(message.bytes_off_machine - message.bytes * 6 / 7) <= 100, message


def test_the_memory_of_a_plan_is_what_tiers_hold(tmp_path):
    rows, dim = 300_000, 12  # fewer keys take more memory each
    options = {
        None: oneemb.make_device_mem_store_options(str(tmp_path / "memory")),
        2: oneemb.make_cached_ssd_store_options(2, str(tmp_path / "ssd")),
    }
    for cache_mb, store in options.items():
        embedding = oneemb.MultiTableEmbedding(
            "e", dim, torch.float32, torch.int64, [oneemb.make_table()], store, num_threads=1
        )
        optimizer = oneemb.Optimizer(torch.optim.Adam(embedding.parameters(), lr=0.1))
        for ids in torch.randperm(rows).split(5000):
            embedding(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        planned = oneemb.plan(
            rows=rows, embedding_dim=dim, batch=5000, optimizer="Adam", cache_mb=cache_mb,
            hit_rate=None if cache_mb is None else 0.5,
        )  # fmt: skip
        said, stats = planned.memory_bytes, embedding.stats()
        assert f"{24 if cache_mb is None else 15} bytes a key" in str(planned)
        in_memory = said.get("cache", 0) + said.get("rows", 0) + said.get("index", 0)
        assert abs(stats["device"]["bytes"] / in_memory - 1) < 0.05, cache_mb
        if cache_mb is not None:
            assert abs(stats["persistent"]["index_bytes"] / said["index of the table on disk"] - 1) < 0.15
        embedding.close()


def test_an_index_that_is_on_the_disk_takes_its_limit_or_two_bytes_a_key():
    job = {"rows": 10**8, "embedding_dim": 64, "batch": 4096, "cache_mb": 100, "hit_rate": 0.5}
    whole, half, least = (oneemb.plan(**job, index_memory_mb=limit) for limit in (4096, 1024, 10))
    sizes = [plan.memory_bytes["index of the table on disk"] for plan in (whole, half, least)]
    assert sizes == [15 * 10**8, 1024 * 2**20, 17 * 10**7]
    assert "15 bytes a key\n" in str(whole) and str(whole) == str(oneemb.plan(**job))
    assert "10.7 bytes a key, 52% of keys on the SSD" in str(half) and "1.7 bytes a key, 100% of keys" in str(least)
    assert whole.parts_ms["disk"] < half.parts_ms["disk"] < least.parts_ms["disk"]


def test_the_state_of_a_row_is_the_optimizers():
    def words(optimizer):
        return oneemb.PlannedEmbedding(rows=1, embedding_dim=10, optimizer=optimizer).row_words

    assert [words(one) for one in ("SGD", "Adagrad", "Adam", "RowWiseAdagrad", 7)] == [10, 20, 30, 11, 17]


def test_several_embeddings_take_the_sum_of_what_each_takes():
    one = oneemb.PlannedEmbedding(**{name: value for name, value in JOB.items() if name != "batch"})
    single, double = oneemb.plan(one, batch=1000, ranks=4), oneemb.plan(one, one, batch=1000, ranks=4)
    assert len(double.messages) == len(single.messages) + 3, "headers, keys and rows"
    assert sum(double.memory_bytes.values()) == 2 * sum(single.memory_bytes.values())
    assert double.parts_ms["rows"] == 2 * single.parts_ms["rows"]


def test_what_binds_follows_the_figures():
    def binds(machine=None, **more):
        return oneemb.plan(**(JOB | more), ranks=16, ranks_per_machine=4, machine=machine).binds

    assert binds(oneemb.Machine(network_gb_s=0.01)) == "transfer"
    assert binds(oneemb.Machine(network_us=1e5)) == "latency"
    assert binds(oneemb.Machine(memory_gib=0.1)) == "memory"
    assert binds(cache_mb=64, hit_rate=0.1, machine=oneemb.Machine(disk_reads_per_s=1000)) == "disk"
    assert binds(dense_ms=1000.0) == "dense"


def test_arrays_that_the_system_gives_anew_take_time():
    job = {"rows": 10**8, "embedding_dim": 128, "ids": 8}
    assert "fresh memory" not in oneemb.plan(**job, batch=8191).parts_ms
    assert "fresh memory" not in oneemb.plan(**job, batch=8192, dtype="bfloat16").parts_ms
    rows_and_gradient = 2 * 8192 * 8 * 128 * 4
    taken = oneemb.plan(**job, batch=8192).parts_ms["fresh memory"]
    assert taken == rows_and_gradient / oneemb.Machine().fresh_gb_s / 1e6


def test_more_of_a_figure_never_takes_longer():
    slow = oneemb.plan(**JOB, ranks=16, ranks_per_machine=4)
    fast = oneemb.plan(**JOB, ranks=16, ranks_per_machine=4, machine=oneemb.Machine(network_gb_s=25.0, network_us=10.0))
    assert fast.step_ms < slow.step_ms and fast.bytes_sent == slow.bytes_sent


def test_what_is_out_of_range_is_refused_in_words():
    for arguments, words in [
        ({"unique": 0}, "unique must be a share above 0 up to 1, got 0"),
        ({"embedding_dim": 0}, "embedding_dim must be a whole number from 1 up, got 0"),
        ({"optimizer": "Rprop"}, "optimizer must be the name of one that rows support .*'Rprop'"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ({"comm_dtype": "float64"}, "comm_dtype must be one of float32, float16, bfloat16, got 'float64'"),
        ({"cache_mb": 64}, "a cache needs its hit_rate"),
        ({"hit_rate": 0.5}, "give cache_mb too"),
        ({"index_memory_mb": 5}, "index_memory_mb must be left out without cache_mb"),
        ({"cache_mb": 1, "hit_rate": 0.5, "batch": 10**6}, "cache_mb must hold the 5,000,000 rows of a step"),
        ({"ranks": 2, "ranks_per_machine": 4}, "ranks_per_machine must be at most ranks, 2, got 4"),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"dense_ms": float("nan")}, "dense_ms must be a number from 0 up, got nan"),
        ({"dense_ms": float("inf")}, "dense_ms must be a number from 0 up, got inf"),
        ({"dense_parameters": "9"}, "dense_parameters must be a number from 0 up, got '9'"),
    ]:
        with pytest.raises(ValueError, match=words):
            oneemb.plan(**(JOB | arguments))
    with pytest.raises(TypeError, match="plan takes PlannedEmbedding.* and not both; got 0 objects and no such"):
        oneemb.plan(batch=10)
    with pytest.raises(TypeError, match="machine must be a Machine, .* got {}"):
        oneemb.plan(**JOB, machine={})
    with pytest.raises(ValueError, match="network_gb_s must be above 0, got 0"):
        oneemb.Machine(network_gb_s=0)


def test_unique_shares_are_counted_by_table():
    assert oneemb.unique_share([[[1, 1], [1, 2]], [[5, 5], [6, 6]]]) == (3 / 4 + 4 / 4) / 2
    with pytest.raises(ValueError, match="at least one batch"):
        oneemb.unique_share([])


def test_figures_of_a_machine_survive_json():
    machine = oneemb.Machine(cores=3, on_ranks=oneemb.StepCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert oneemb.Machine.from_json(machine.to_json()) == machine
    assert oneemb.Machine.from_json('{"cores": 4}') == oneemb.Machine(cores=4)
    with pytest.raises(ValueError, match="got speed"):
        oneemb.Machine.from_json('{"speed": 4}')


def test_figures_that_explain_steps_are_found_again():
    planted = oneemb.StepCost(500.0, 120.0, 30.0, 0.9, 60.0, 0.5)
    cases = []
    for samples, tables, vocabulary, dim, embeddings in machine_module.CASES:
        ids = samples * tables
        keys = min(ids, vocabulary)
        ms = planted.call_us / 1e3 + embeddings * (planted.lookup_us / 1e3 + planted.rows_ms(ids, keys, dim, 2 * dim))
        cases.append(
            {"embeddings": embeddings, "dim": dim, "ids": ids * embeddings, "keys": keys * embeddings, "ms": ms}
        )
    found = machine_module.fitted(cases, oneemb.Machine(), 1)
    for one in cases:
        samples = one["ids"] // one["embeddings"], one["keys"] // one["embeddings"], one["dim"], 2 * one["dim"]
        ms = found.call_us / 1e3 + one["embeddings"] * (found.lookup_us / 1e3 + found.rows_ms(*samples))
        assert abs(ms / one["ms"] - 1) < 0.1


# ---- the command line ------------------------------------------------------------------------------------------------

COMMAND = ["plan", "--rows", "100000000", "--dim", "16", "--ids", "10", "--batch", "1000"]


def run(*arguments, code=0):
    result = CliRunner().invoke(command, [*COMMAND, *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_says_what_the_function_does(tmp_path):
    planned = oneemb.plan(**JOB, ranks=4, ranks_per_machine=2, optimizer="Adam")
    arguments = ["--unique", "0.5", "--ranks", "4", "--ranks-per-machine", "2", "--optimizer", "Adam"]
    assert run(*arguments).stdout.strip() == str(planned)
    assert json.loads(run(*arguments, "--json").stdout) == json.loads(json.dumps(planned.to_dict()))
    table = run(*arguments, "--ranks", "64").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["ranks", "4", "64"]


def test_a_log_of_ids_and_figures_of_a_machine_may_be_files(tmp_path):
    ids = np.random.default_rng(0).integers(0, 300, (5000, 10))
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "machine.json").write_text('{"network_us": 500.0, "cores": 8}')
    files = ["--log", str(tmp_path / "ids.npy"), "--machine", str(tmp_path / "machine.json")]
    result = json.loads(run(*files, "--set", "cores=16", "--json").stdout)
    assert result["embeddings"][0]["unique"] == oneemb.unique_share(ids.reshape(5, 1000, 10))
    assert (result["machine"]["network_us"], result["machine"]["cores"]) == (500.0, 16)
    assert "give one of them" in run("--unique", "1", "--log", str(tmp_path / "ids.npy"), code=2).output
    assert "NAME=FIGURE" in run("--set", "cores", code=2).output


def test_the_plan_in_the_documents_is_the_commands():
    text = (Path(__file__).parent.parent / "docs" / "several-machines.md").read_text()
    said, printed = re.search(r"```\n\$ oneemb (plan .*? 1024)\n(.*?)```", text, re.DOTALL).groups()
    result = CliRunner().invoke(command, said.replace("\\\n", " ").split())
    assert result.stdout == printed


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path):
    machine = oneemb.measure_machine(str(tmp_path), network_gb_s=5.0)
    assert machine.network_gb_s == 5.0 and machine.disk_reads_per_s > 100 and not list(tmp_path.iterdir())
    assert 0.01 < machine.local_gb_s < 100 and 1 < machine.local_us < 1e5
    assert oneemb.plan(**JOB, ranks=2, machine=machine).step_ms > oneemb.plan(**JOB, machine=machine).step_ms
