"""What dynamicemb's users import beside tables: initializers, paths of files, ids dealt to ranks, rows by id."""

import pytest
import torch
import torch.distributed
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import oneemb
from oneemb.dynamicemb import (
    DynamicEmbInitializerArgs as Begin,
    DynamicEmbInitializerMode as Mode,
    DynamicEmbPoolingMode as Pooling,
    DynamicEmbScoreStrategy as Score,
    DynamicEmbTableOptions as Options,
    EmbOptimType,
)
from oneemb.dynamicemb.batched_dynamicemb_tables import (
    BatchedDynamicEmbeddingTablesV2,
    encode_checkpoint_file_path,
    encode_counter_checkpoint_file_path,
    encode_meta_json_file_path,
    find_files,
    get_loading_files,
)
from oneemb.dynamicemb.dynamicemb_config import complete_initializer_args
from oneemb.dynamicemb.initializer import create_initializer_from_args
from oneemb.dynamicemb.input_dist import RwSparseFeaturesDist, bucketize_kjt_before_all2all
from oneemb.dynamicemb.types import CopyMode, Storage

# ---- how rows begin --------------------------------------------------------------------------------------------------


def test_bounds_that_are_missing_follow_from_the_number_of_rows():
    config = EmbeddingConfig(num_embeddings=100, embedding_dim=4, name="t")
    given = Begin(Mode.UNIFORM)
    whole = complete_initializer_args(given, embedding_config=config)
    assert (whole.lower, whole.upper) == (-0.1, 0.1) and (given.lower, given.upper) == (None, None)
    whole = complete_initializer_args(Begin(Mode.UNIFORM, upper=0.5))
    assert (whole.lower, whole.upper) == (0.0, 0.5)
    for as_it_is in (Begin(Mode.UNIFORM, lower=-1.0, upper=1.0), Begin(Mode.NORMAL)):
        assert complete_initializer_args(as_it_is, embedding_config=config) is as_it_is


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_initializers_fill_the_rows_they_are_told_and_no_others(dtype):
    torch.manual_seed(0)
    indices, keys = torch.arange(1, 2000, 2), torch.arange(1000) * 300 - 7

    def filled(*args, **more):
        buffer = torch.full((2001, 4), 7.0, dtype=dtype)
        create_initializer_from_args(Begin(*args, **more))(buffer, indices, keys)
        assert (buffer[::2] == 7).all()
        return buffer[indices].double()

    assert (filled(Mode.CONSTANT, value=0.5) == 0.5).all()
    assert torch.equal(filled(Mode.DEBUG), (keys % 100_000).to(dtype).double()[:, None].expand(-1, 4))
    drawn = filled(Mode.UNIFORM, lower=-2.0, upper=4.0)
    assert -2 <= drawn.min() < -1.9 and 3.9 < drawn.max() <= 4 and drawn.mean() == pytest.approx(1, abs=0.1)
    drawn = filled(Mode.UNIFORM)
    assert 0 <= drawn.min() and drawn.max() <= 1 and drawn.mean() == pytest.approx(0.5, abs=0.03)
    drawn = filled(Mode.NORMAL, mean=3.0, std_dev=0.5)
    assert drawn.mean() == pytest.approx(3, abs=0.05) and drawn.std() == pytest.approx(0.5, abs=0.05)
    drawn = filled(Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=1.0, lower=-0.5, upper=0.25)
    assert -0.5 <= drawn.min() < -0.45 and 0.2 < drawn.max() <= 0.25


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_paths_are_those_of_the_files_of_a_dump(tmp_path):
    tables, folder = table_of(optimizer=EmbOptimType.ADAM), str(tmp_path)
    step(tables, [3, 5])
    tables.dump(folder, optim=True, counter=True, table_names=["t_0"])
    paths = [
        encode_checkpoint_file_path(folder, "t_0", 0, 1, item) for item in ("keys", "values", "scores", "opt_values")
    ]
    counts = [encode_counter_checkpoint_file_path(folder, "t_0", 0, 1, item) for item in ("keys", "frequencies")]
    written = {encode_meta_json_file_path(folder, "t_0"), *paths, *counts}
    assert {str(path) for path in tmp_path.iterdir()} == written
    assert get_loading_files(folder, "t_0", 0, 1) == tuple([path] for path in [*paths, *counts])


def test_files_of_all_ranks_are_found_in_order_and_a_missing_one_is_an_error(tmp_path):
    folder, ranks = str(tmp_path), 12
    keys, values = (
        [encode_checkpoint_file_path(folder, "t", rank, ranks, item) for rank in range(ranks)]
        for item in ("keys", "values")
    )
    for path in [*keys, *values, encode_checkpoint_file_path(folder, "t_emb", 0, 1, "keys")]:
        open(path, "wb").close()
    assert find_files(folder, "t", "emb_keys") == (keys, ranks)
    assert find_files(folder, "t", "opt_values") == ([], 0)
    assert get_loading_files(folder, "t", 5, 2) == (keys, values, [], [], [], [])
    assert get_loading_files(folder, "t", 5, ranks) == ([keys[5]], [values[5]], [], [], [], [])
    (tmp_path / values[3].rpartition("/")[2]).unlink()
    for call in (lambda: find_files(folder, "t", "emb_values"), lambda: get_loading_files(folder, "t", 0, 1)):
        with pytest.raises(oneemb.StorageError, match="must be one for each of 12 ranks"):
            call()
    with pytest.raises(ValueError, match="suffix must be one of"):
        find_files(folder, "t", "keys")
    with pytest.raises(ValueError, match="item must be one of"):
        encode_checkpoint_file_path(folder, "t", 0, 1, "frequencies")


# ---- ids dealt to ranks ----------------------------------------------------------------------------------------------

DISTS = {"f": "roundrobin", "g": "continuous", "h": "hash_roundrobin"}


def place_of(feature, unsigned, ranks, block):
    """The rank of an id, and what stands there for it, as dynamicemb's kernel has them."""
    if DISTS[feature] == "roundrobin":
        return unsigned % ranks, unsigned
    if DISTS[feature] == "continuous":
        inside = unsigned < block * ranks
        return (unsigned // block, unsigned % block) if inside else (unsigned % ranks, unsigned // ranks)
    mixed = unsigned
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = ((mixed ^ mixed >> 33) * factor) % 2**64
    return (mixed ^ mixed >> 33) % ranks, unsigned


@pytest.mark.parametrize("weighted", [False, True])
def test_ids_are_dealt_as_dist_type_says_in_the_order_in_which_they_come(weighted):
    ranks, blocks = 3, [4, 4, 4]
    bags = {"f": [[5, -1], [], [7]], "g": [[0, 3, 11, 12], [2**60], [-5]], "h": [[], [9, 9, 1], [2]]}
    ids = torch.tensor([n for its in bags.values() for bag in its for n in bag])
    lengths = torch.tensor([len(bag) for its in bags.values() for bag in its])
    weights = torch.rand(len(ids)) if weighted else None
    kjt = KeyedJaggedTensor.from_lengths_sync(list(bags), ids, lengths, weights)
    dealt, permute = bucketize_kjt_before_all2all(
        kjt, ranks, torch.tensor(blocks), output_permute=True, bucketize_pos=True, dist_type_per_feature=DISTS
    )
    expected = [[[[] for _ in its] for its in bags.values()] for _ in range(ranks)]
    number = 0
    for f, (feature, its) in enumerate(bags.items()):
        for b, bag in enumerate(its):
            for place, n in enumerate(bag):
                rank, key = place_of(feature, n % 2**64, ranks, blocks[f])
                weight = weights[number].item() if weighted else place
                expected[rank][f][b].append((key - 2**64 if key >= 2**63 else key, weight, number))
                number += 1
    flat = [bag for of_rank in expected for of_feature in of_rank for bag in of_feature]
    assert dealt.keys() == list(bags) * ranks and dealt.lengths().tolist() == [len(bag) for bag in flat]
    assert dealt.values().tolist() == [key for bag in flat for key, _, _ in bag]
    assert dealt.weights().tolist() == [weight for bag in flat for _, weight, _ in bag]
    assert permute.argsort().tolist() == [number for bag in flat for _, _, number in bag]


def test_dist_types_that_are_missing_are_an_error():
    kjt = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"dist_type_per_feature must be one of .* got {'f': None}"):
        bucketize_kjt_before_all2all(kjt, 2, torch.tensor([4]))


def test_one_rank_has_all_ids(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        dist = RwSparseFeaturesDist(
            torch.distributed.group.WORLD, 2, [9, 9], is_sequence=True, dist_type_per_feature=DISTS
        )
        kjt = KeyedJaggedTensor.from_lengths_sync(["f", "h"], torch.tensor([4, 2**50, 5]), torch.tensor([1, 0, 0, 2]))
        its = dist(kjt).wait().wait()
    finally:
        torch.distributed.destroy_process_group()
    assert its.values().tolist() == kjt.values().tolist() and its.lengths().tolist() == [1, 0, 0, 2]
    assert dist.unbucketize_permute_tensor.tolist() == [0, 1, 2]


# ---- rows by id ------------------------------------------------------------------------------------------------------


def table_of(**more):
    options = Options(dim=4, initializer_args=Begin(Mode.CONSTANT, value=1.0), score_strategy=Score.STEP)
    return BatchedDynamicEmbeddingTablesV2([options] * 2, pooling_mode=Pooling.NONE, learning_rate=0.5, **more)


def step(tables, ids, table=0):
    begin = 0 if table == 0 else None
    offsets = torch.tensor([0, len(ids), len(ids)] if begin == 0 else [0, 0, len(ids)])
    rows = tables(torch.tensor(ids), offsets)
    rows.sum().backward()
    return rows.detach()


def test_rows_are_found_and_written_by_id():
    tables = table_of(optimizer=EmbOptimType.EXACT_ADAGRAD, eps=0.0)
    step(tables, [3, -5])
    step(tables, [3], table=1)
    storage = tables.tables
    assert isinstance(storage, Storage)
    keys, ids = torch.tensor([3, 4, -5, 3]), torch.tensor([0, 0, 0, 1])
    found = storage.find(keys, ids, CopyMode.VALUE)
    assert found.num_missing == 1 and found.missing_keys.tolist() == [4] and found.missing_indices.tolist() == [1]
    assert found.founds.tolist() == [True, False, True, True] and found.missing_table_ids.tolist() == [0]
    assert found.scores.tolist() == [1, 0, 1, 2]
    trained = [0.5] * 4 + [1.0] * 4  # a step of 0.5 * 1 / sqrt(1), and the sum of squares
    assert found.values.tolist() == [trained, [0.0] * 8, trained, trained]
    assert storage.find(keys, ids, CopyMode.EMBEDDING).values.tolist() == found.values[:, :4].tolist()
    new = torch.arange(16.0).view(2, 8)
    storage.insert(keys[:2], ids[:2], new, preserve_existing=True)
    assert storage.find(keys[:2], ids[:2], CopyMode.VALUE).values.tolist() == [trained, new[1].tolist()]
    storage.insert(keys[:2], ids[:2], new)
    assert torch.equal(storage.find(keys[:2], ids[:2], CopyMode.VALUE).values, new)
    assert storage.embedding_dims().tolist() == [4, 4] and storage.all_dims_vec4()
    assert storage.max_value_dim() == storage.value_dim(1) == 8


@pytest.mark.parametrize("optim", [False, True])
def test_a_table_is_dumped_into_files_and_loaded(tmp_path, optim):
    made = [table_of(optimizer=EmbOptimType.EXACT_ADAGRAD, eps=0.0) for _ in range(2)]
    step(made[0], [3, -5, 2**60])
    paths = [str(tmp_path / name) for name in ("meta", "keys", "values", "scores")]
    state = str(tmp_path / "state") if optim else None
    made[0].tables.dump(0, *paths, state, timestamp=0)
    made[1].tables.load(1, *paths, state, optim, timestamp=0)
    keys = torch.tensor([3, -5, 2**60])
    was, its = (one.tables.find(keys, torch.full((3,), t), CopyMode.VALUE) for t, one in enumerate(made))
    assert its.founds.all() and torch.equal(its.scores, was.scores)
    assert torch.equal(its.values[:, :4], was.values[:, :4])
    assert torch.equal(its.values[:, 4:], was.values[:, 4:] if optim else torch.zeros(3, 4))
    with open(paths[2], "ab") as file:
        file.write(b"\0" * 4)
    with pytest.raises(ValueError, match="the same number of values for each of 3 keys"):
        made[1].tables.load(1, *paths, state, optim, timestamp=0)
