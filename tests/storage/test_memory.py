"""Memory on the host: which limits hold, what tiers reserve of it together, and arrays that grow where they lie."""

import gc
import itertools
import os
import re
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StoreFullError
from oneemb.storage.hash_index import HashIndex
from oneemb.storage.merged_store import MergedStore
from oneemb.storage.policies.row_places import OwnPlaces, SlotPlaces
from oneemb.storage.table import row_writer
from oneemb.storage.table.persistent_table import PersistentTable
from oneemb.storage.tiers import growing_array, reservation
from oneemb.storage.tiers.growing_array import GrowingArray
from oneemb.storage.tiers.hot_tier import SLOT_OVERHEAD_BYTES, HotTier
from oneemb.storage.tiers.memory_limit import MemoryLimit, memory_limit
from tests.support.graph_models import make_embedding
from tests.support.inside import forget_addresses, page_behind, refuse_growth, reservations, reserved_bytes
from tests.support.interrupts import interrupted
from tests.support.keys import distinct
from tests.support.row_store_suite import DictStore, keys_of

MIB = 1 << 20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
THREADS = Threads(1)
W = 6


def tier(slots=1 << 30, *, width=W, **options):
    return HotTier("device", row_width=width, slots=slots, below=None, resident=True, threads=THREADS, **options)


def put(tier, count, first=0):
    """Rows of `count` ids from `first` on, each with its id in all words."""
    id_N = np.arange(first, first + count)
    tier.put(np.zeros(count, np.int32), id_N, np.repeat(id_N, W).reshape(-1, W).astype(np.float32))


def rows_of(tier, count):
    out_NW = np.zeros((count, W), np.float32)
    assert not tier.get(np.zeros(count, np.int32), np.arange(count), out_NW).any()
    return out_NW


def written(count):
    return np.repeat(np.arange(count), W).reshape(-1, W).astype(np.float32)


@pytest.fixture
def limited(monkeypatch):
    """Sets the limit of memory, with no reservation of other tests."""
    gc.collect()
    before = reserved_bytes()

    def limit(bytes):
        bytes += int(before / 0.9) + 1
        monkeypatch.setattr(reservation, "memory_limit", lambda taken: MemoryLimit(bytes, "the limit of the test"))

    return limit


@contextmanager
def address_space(more):
    """At most so many bytes of address space beyond those in use."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- limits ----------------------------------------------------------------------------------------------------------


def a_process(folder, groups, mounts, files):
    """A folder as /proc/self, of a process with these control groups."""
    folder.mkdir()
    (folder / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    (folder / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("least", ["job", "job/rank", "."])
def test_the_smallest_limit_from_the_group_up_to_the_root_holds(least, tmp_path):
    unified = tmp_path / "p/unified tree"
    escaped = str(unified).replace(" ", "\\040")
    process = a_process(
        tmp_path / "p",
        ["0::/job/rank"],
        ["22 1 8:1 / / rw - ext4 /dev/sda rw", f"30 22 0:28 / {escaped} rw,relatime shared:4 - cgroup2 cgroup2 rw"],
        {
            "unified tree/job/rank/memory.max": "max\n",
            "unified tree/job/memory.max": f"{3 * MIB}\n",
            "unified tree/memory.max": f"{4 * MIB}\n",
            f"unified tree/{least}/memory.max": f"{2 * MIB}\n",
        },
    )
    assert memory_limit(process=process).bytes == 2 * MIB
    assert str(unified) in memory_limit(process=process).name


def test_limits_of_the_first_version_of_control_groups_hold(tmp_path):
    tree = tmp_path / "p/memory"
    process = a_process(
        tmp_path / "p",
        ["9:name=systemd:/", "4:cpu,memory:/docker/1f", "1:cpuset:/docker/1f", "0::/"],
        [
            # In a container: the group has the name that the host gives it, and is itself what is mounted.
            f"35 31 0:32 /docker/1f {tree} rw - cgroup cgroup rw,cpu,memory",
            f"36 31 0:33 / {tmp_path}/p/cpuset rw - cgroup cgroup rw,cpuset",
        ],
        {"memory/memory.limit_in_bytes": f"{5 * MIB}", "cpuset/memory.limit_in_bytes": "1"},
    )
    assert memory_limit(process=process) == MemoryLimit(5 * MIB, f"the limit in {tree}/memory.limit_in_bytes")


def test_a_limit_that_changes_holds_at_once_and_its_files_are_looked_for_once(tmp_path, monkeypatch):
    mounts = [f"30 22 0:28 / {tmp_path}/p/tree rw - cgroup2 cgroup2 rw"]
    process = a_process(tmp_path / "p", ["0::/a/b"], mounts, {"tree/a/b/memory.max": f"{6 * MIB}"})
    assert memory_limit(process=process).bytes == 6 * MIB
    read, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *args: (read.append(path.name), read_text(path, *args))[1])
    for limit in (5 * MIB, 7 * MIB):
        (tmp_path / "p/tree/a/b/memory.max").write_text(str(limit))
        assert memory_limit(process=process).bytes == limit
    (tmp_path / "p/tree/a/memory.max").write_text(str(3 * MIB))  # a parent that counted none before
    assert memory_limit(process=process) == MemoryLimit(3 * MIB, f"the limit in {tmp_path}/p/tree/a/memory.max")
    assert not {"cgroup", "mountinfo"} & set(read)


@pytest.mark.parametrize("path", ["/../../other", "/elsewhere"])
def test_a_group_outside_of_what_is_mounted_has_the_limit_of_the_mount(path, tmp_path):
    mounts = [f"30 22 0:28 /job {tmp_path}/p/tree rw - cgroup2 cgroup2 rw"]
    process = a_process(tmp_path / "p", [f"0::{path}"], mounts, {"tree/memory.max": f"{6 * MIB}"})
    assert memory_limit(process=process).bytes == 6 * MIB


def test_without_control_groups_the_memory_of_the_machine_is_the_limit(tmp_path):
    assert memory_limit(process=tmp_path) == MemoryLimit(MACHINE, "the machine's memory")
    unlimited = a_process(tmp_path / "p", ["4:memory:/"], [f"1 1 0:1 / {tmp_path}/p/m rw - cgroup none rw,memory"], {
        "m/memory.limit_in_bytes": "9223372036854771712",
    })  # fmt: skip
    assert memory_limit(process=unlimited).bytes == MACHINE


def test_a_limit_of_address_space_counts_less_what_others_have_taken(tmp_path):
    with address_space(64 * MIB):
        assert memory_limit(process=tmp_path).bytes <= 64 * MIB
        assert "ulimit -v" in memory_limit(process=tmp_path).name
        assert 64 * MIB < memory_limit(taken=32 * MIB, process=tmp_path).bytes <= 96 * MIB


def test_a_limit_of_data_counts_less_what_others_have_taken(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * MIB, before[1]))
    try:
        least, more = memory_limit(process=tmp_path), memory_limit(taken=32 * MIB, process=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert least.bytes <= 64 * MIB and "ulimit -d" in least.name
    assert 64 * MIB < more.bytes <= 96 * MIB


# ---- reservations ----------------------------------------------------------------------------------------------------


def test_tiers_that_hold_all_rows_share_the_memory_there_is(limited):
    limited(20 * MIB)
    one, two = tier(), tier()
    put(one, 150_000)  # 9.2 of 18 MiB
    with pytest.raises(StoreFullError) as error:
        put(two, 150_000)
    text = str(error.value)
    assert "the device tier needs 10 MiB" in text and "nine tenths of the limit of the test" in text
    assert "cache_budget_mb" in text and "capacity" in text
    assert len(two) == 0
    put(two, 100_000)
    assert rows_of(two, 100_000).tobytes() == written(100_000).tobytes()
    assert rows_of(one, 150_000).tobytes() == written(150_000).tobytes()


@pytest.mark.parametrize("how", ["closed", "collected"])
def test_a_tier_that_is_gone_gives_its_memory_to_others(how, limited):
    limited(20 * MIB)
    one, two = tier(), tier()
    put(one, 250_000)
    with pytest.raises(StoreFullError):
        put(two, 250_000)
    if how == "closed":
        one.close()
        one.close()
    else:
        del one
    put(two, 250_000)


def test_a_tier_with_a_capacity_has_its_memory_reserved_and_no_more(limited):
    limited(20 * MIB)
    expected = 100_000  # 6.1 MiB
    one = tier(expected, expected=expected)
    two = tier()
    with pytest.raises(StoreFullError):
        put(two, 250_000)
    put(two, 190_000)
    put(one, expected)
    with pytest.raises(StoreFullError, match="100000 slots"):
        put(one, 1, first=expected)


def test_a_capacity_that_does_not_fit_is_only_a_limit(limited):
    limited(20 * MIB)
    one = tier(10**6, expected=10**6)
    put(one, 1000)
    two = tier()
    put(two, 250_000)


def test_the_budget_of_a_cache_is_reserved(limited):
    limited(20 * MIB)
    cache = HotTier("device", row_width=W, slots=250_000, below=DictStore(W), resident=False, threads=THREADS)
    with pytest.raises(StoreFullError, match="other tiers have reserved"):
        put(tier(), 100_000)
    cache.close()
    put(tier(), 100_000)


def test_rows_that_are_loaded_are_reserved_for_before_others_are_forgotten(limited):
    limited(20 * MIB)
    below = DictStore(W)
    put(below, 100)
    one = HotTier("device", row_width=W, slots=10**6, below=below, resident=True, threads=THREADS)
    one.reload()
    with pytest.raises(StoreFullError):
        one.check_holds(400_000)
    assert rows_of(one, 100).tobytes() == written(100).tobytes()
    one.check_holds(200_000)
    with pytest.raises(StoreFullError):
        put(tier(), 150_000)


def test_a_tier_enters_the_book_when_no_other_thread_reads_it():
    entered = threading.Event()

    def make():
        kept.append(reservation.Reservation("device"))
        entered.set()

    kept, maker = [], threading.Thread(target=make)
    with reservation._lock:
        maker.start()
        assert not entered.wait(0.2)
    maker.join()
    assert kept[0] in reservations()


def test_a_child_of_fork_has_a_book_of_its_own(limited):
    limited(40 * MIB)
    one = tier(500_000, expected=500_000)  # 30 MiB, of which it uses little
    put(one, 1000)
    with reservation._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            status = 1
            try:
                put(tier(), 400_000)
                status = 0 if rows_of(one, 1000).tobytes() == written(1000).tobytes() else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(StoreFullError):
        put(tier(), 400_000)
    put(one, 500_000)


def test_memory_that_the_system_refuses_is_an_error_that_says_what_to_do(monkeypatch):
    one = tier()
    put(one, 100)
    # Rows may take all of what there is, and then the index has none.
    monkeypatch.setattr(reservation, "_MEMORY_SHARE", 4.0)
    with address_space(32 * MIB):
        with pytest.raises(StoreFullError, match=r"address space for 2000000 rows .*ulimit -v.*cache_budget_mb"):
            one.check_room(2_000_000 - 100, 0)
        with pytest.raises(StoreFullError, match="address space for 10000000 rows"):
            HotTier("host", row_width=W, slots=10**7, below=DictStore(W), resident=False, threads=THREADS)
    assert rows_of(one, 100).tobytes() == written(100).tobytes()
    put(one, 2_000)


def test_a_reservation_is_given_back_where_the_system_refuses_the_memory(limited, monkeypatch):
    limited(200 * MIB)
    one, two = tier(), tier()
    put(one, 100)
    with monkeypatch.context() as patch:
        refuse_growth(patch)
        with pytest.raises(StoreFullError, match="address space"):
            one.check_room(2_000_000, 0)  # 122 of 180 MiB
    two.check_room(2_000_000, 0)
    assert rows_of(one, 100).tobytes() == written(100).tobytes()


def test_many_tiers_fit_under_a_limit_of_address_space():
    with address_space(128 * MIB):
        tiers = [tier() for _ in range(300)]
        for n, one in enumerate(tiers):
            put(one, 20, first=n)
    for n, one in enumerate(tiers):
        assert one.contains(np.zeros(1, np.int32), np.array([n + 19])).all() and len(one) == 20


def test_many_embeddings_fit_under_a_limit_of_address_space():
    make_embedding("first", 4, 1).store.build()  # what is compiled and loaded once
    with address_space(256 * MIB):
        embeddings = [make_embedding(f"e{n}", 4, 1) for n in range(20)]
        for one in embeddings:
            one.store.build()
            one.store.release(one.store.acquire(distinct(*keys_of([(0, 1)])))[0])
    assert all(one.store.stats()["rows"] == 1 for one in embeddings)


def test_a_table_of_few_rows_on_disk_has_a_small_buffer(tmp_path, monkeypatch):
    made, make = [], row_writer.aligned_bytes
    monkeypatch.setattr(row_writer, "aligned_bytes", lambda size: (made.append(size), make(size))[1])
    table = PersistentTable.open(tmp_path, row_width=W, threads=THREADS, background=False)
    put(table, 20)
    assert sum(made) <= 1 << 16
    put(table, 20_000)
    assert rows_of(table, 20_000).tobytes() == written(20_000).tobytes()
    table.close()


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_an_array_grows_where_it_lies(width):
    one, two = (GrowingArray(1 << 28, (width,), np.float32) for _ in range(2))
    before = one.array
    one.grow(5)
    first = one.array
    first[:] = 7
    two.grow(10)
    for rows in (6, 5000, 100_000):
        one.grow(rows)
        assert one.array.shape == (rows, width) and one.array.ctypes.data == first.ctypes.data == before.ctypes.data
        assert not one.array[5:].any()
    one.array[0] = 8
    assert (first[0] == 8).all() and (first[1:] == 7).all() and not two.array.any()
    assert first.ctypes.data % (width * 4) == 0 and two.array.ctypes.data % (width * 4) == 0
    del one
    gc.collect()
    assert (first[1:] == 7).all()  # as long as somebody has a part of it


def test_an_array_that_cannot_grow_where_it_lies_does_not_move():
    one = GrowingArray(1 << 28, (3,), np.float32)
    one.grow(1000)
    one.array[:] = 7
    before, rows = one.array, len(one.array)
    with page_behind(one):  # The array would have to move.
        with pytest.raises(MemoryError, match="address space"):
            one.grow(100_000)
        assert len(one.array) == rows and one.array.ctypes.data == before.ctypes.data and (before == 7).all()
    one.grow(100_000)
    assert one.array.ctypes.data == before.ctypes.data and (one.array[:rows] == 7).all()


def test_an_array_whose_growth_is_stopped_at_any_line_grows_on_and_leaves_nothing():
    def mappings():
        return len(Path("/proc/self/maps").read_text().splitlines())

    def address_after_growth(at):
        """Stop growth at a line. Returns whether there is such a line, and where the array lies."""
        array, before = GrowingArray(1 << 28, (3,), np.float32), mappings()
        array.grow(7)
        array.array[:] = at
        stopped, place = interrupted(lambda: array.grow(9000), at, "raise", files=[growing_array.__file__])
        for rows in (9000, 9 << 10, 1 << 20):
            array.grow(rows)
            assert len(array.array) == rows and (array.array[:7] == at).all() and not array.array[7:].any(), place
        assert mappings() == before, place
        return stopped, array.array.ctypes.data

    _, first = address_after_growth(10**6)
    for at in itertools.count(1):  # Arrays that are gone leave their addresses to the next one.
        stopped, address = address_after_growth(at)
        assert address == first
        if not stopped:
            break
    assert at > 12


def test_addresses_are_used_again():
    begins = set()
    for _ in range(20):
        array = GrowingArray(1 << 44, (), np.bool_)
        array.grow(1)
        begins.add(array.array.ctypes.data)
        del array
    assert len(begins) == 1


def test_where_others_lie_an_array_lies_elsewhere():
    one = GrowingArray(1 << 30, (), np.bool_)
    forget_addresses(one)
    two = GrowingArray(1 << 30, (), np.bool_)
    two.grow(1 << 20)
    one.grow(1 << 20)
    two.array[:] = True
    assert not one.array.any()


def test_a_system_without_such_addresses_gives_others(monkeypatch):
    monkeypatch.setattr(growing_array, "_FIRST", 1 << 62)
    monkeypatch.setattr(growing_array, "_LAST", (1 << 62) + (1 << 40))
    array = GrowingArray(1 << 28, (3,), np.float32)
    array.grow(1 << 20)
    array.array[:] = 1
    assert array.array.ctypes.data % 12 == 0 and array.array.sum() == 3 << 20


def test_usage_metadata_asks_such_a_system_for_no_more_addresses_than_the_machine_has_memory(monkeypatch):
    monkeypatch.setattr(growing_array, "_FIRST", 1 << 62)
    monkeypatch.setattr(growing_array, "_LAST", (1 << 62) + (1 << 40))
    with address_space(MACHINE + 64 * MIB):
        places = OwnPlaces(THREADS)
    table_N, id_N = np.zeros(50_000, np.int32), np.arange(50_000)
    place_N = places.add(table_N, id_N, None)
    places.word_PX[place_N] = 7
    assert places.word_PX.sum() == 7 * 4 * 50_000


def test_very_many_arrays_share_the_addresses():
    arrays = [GrowingArray(1 << 46, (), np.bool_) for _ in range(100)]
    assert all(array.most > 1 << 35 for array in arrays)
    assert len({array.array.ctypes.data for array in arrays}) == 100


def test_merged_slots_stay_good_while_members_grow():
    embeddings = [make_embedding(f"e{m}", 5, 1, seed=m) for m in range(2)]
    merged = MergedStore([one.store for one in embeddings], [1, 1], ["a", "b"])
    merged.build()
    first = distinct(*keys_of([(0, 1), (0, 2)]))
    slot_U = merged.merged_slots([0], [merged.members[0].acquire(first)[0]])
    merged.row_SW[slot_U] = 3
    before = merged.row_SW
    many = distinct(np.zeros(20_000, np.int32), np.arange(20_000))
    for store in merged.members:
        store.release(store.acquire(many)[0])
    last = merged.members[1].acquire(distinct(*keys_of([(0, 19_999)])))[0]
    last_U = merged.merged_slots([1], [last])
    assert (before[slot_U] == 3).all() and (merged.row_SW[slot_U] == 3).all()
    assert merged.row_SW[last_U].tobytes() == merged.members[1].row_SW[last].tobytes()


def test_numbers_beside_rows_grow_with_them():
    one = tier()
    put(one, 10)
    places = SlotPlaces(one, 0)
    table_N, id_N = np.zeros(50_000, np.int32), np.arange(10, 50_010)
    places.reserve(table_N, id_N)
    reserved = len(places.held_P)
    put(one, 50_000, first=10)
    place_N = places.add(table_N, id_N, None)
    assert reserved > place_N.max() and len(places.held_P) == len(places.table_P) == len(places.score_P) >= reserved
    assert len(np.unique(place_N)) == 50_000 and not places.held_P.any()


def test_usage_metadata_grows_in_place():
    places = OwnPlaces(THREADS)
    place_N = places.add(np.zeros(1000, np.int32), np.arange(1000), None)
    arrays = places.word_PX, places.table_P, places.held_P
    places.word_PX[place_N] = 7
    more_N = places.add(np.ones(100_000, np.int32), np.arange(100_000), None)
    for before, after in zip(arrays, (places.word_PX, places.table_P, places.held_P), strict=True):
        assert len(after) >= 101_000 and np.shares_memory(before, after)
    assert (places.word_PX[place_N] == 7).all() and not places.word_PX[more_N].any() and not places.held_P.any()
    assert (places.table_P[more_N] == 1).all() and not places.table_P[place_N].any()


def test_numbers_that_are_reserved_for_need_no_memory(monkeypatch):
    one = tier()
    put(one, 10)
    places = SlotPlaces(one, 0)
    table_N, id_N = np.zeros(5000, np.int32), np.arange(10, 5010)
    places.reserve(table_N, id_N)
    put(one, 5000, first=10)
    one.check_holds(10**6)  # The slab has more slots now than are used.
    refuse_growth(monkeypatch)
    place_N = places.add(table_N, id_N, None)
    assert len(np.unique(place_N)) == 5000 and not places.held_P[place_N].any()


def test_a_slot_takes_the_bytes_that_are_reserved_for_it(limited):
    limited(20 * MIB)
    most = int(20 * MIB * 0.9) // (W * 4 + SLOT_OVERHEAD_BYTES)
    one = tier()
    put(one, most // 2)
    put(one, most - most // 2, first=most // 2)  # What a tier has reserved itself does not count twice.
    with pytest.raises(StoreFullError):
        put(one, 2, first=most)


def flags_at(address):
    """Flags of the mapping that holds an address, a line of /proc/self/smaps."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(
        n for n, line in enumerate(lines)
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) and int(found[1], 16) <= address < int(found[2], 16)
    )  # fmt: skip
    return next(line for line in lines[at:] if line.startswith("VmFlags"))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_an_array_that_has_grown_large_lies_in_huge_pages():
    array = GrowingArray(1 << 22, (4,), np.float32)
    for rows in range(1 << 16, 1 << 20, 1 << 16):
        array.grow(rows)
    first = array.array.ctypes.data
    end = first // 4096 * 4096 + array.mapped
    assert " hg" in flags_at(first) and end % (1 << 21) == 0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_a_large_index_lies_in_huge_pages():
    index = HashIndex(Threads(1), expected=3_700_000)
    begins = [address for address in index.shards[0].tolist() if address % (1 << 21) == 0]
    assert len(begins) >= 16 and all(" hg" in flags_at(address) for address in begins)
