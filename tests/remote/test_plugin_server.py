"""Parameter servers in shared libraries, the honest and the hostile."""

import ctypes
import gc
import itertools
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from oneemb.storage.remote import plugin_calls, servers
from oneemb.storage.remote.parameter_server import Erases, ServerError, ServerTimeoutError
from oneemb.storage.remote.plugin_abi import load_plugin
from oneemb.storage.remote.plugin_server import PluginServer
from oneemb.storage.remote.servers import open_server, register_io
from tests.support.forks import ended_well, in_child
from tests.support.parameter_server_suite import SUITE, run_check
from tests.support.plugins import HOSTILE_IO, MEMORY_IO, compile_plugin, needs_compiler

pytestmark = needs_compiler

IDS = np.array([5, 7, -9])
SOON, LONG = 0.2, 60.0


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    return {
        "memory": compile_plugin(MEMORY_IO, folder / "memory_io.so"),
        "hostile": compile_plugin(HOSTILE_IO, folder / "hostile_io.so"),
    }


@pytest.fixture
def memory_io(libraries):
    """Opens a server of the example, on a memory that is the test's own or one by name."""
    made = []

    def make(name=None):
        made.append(PluginServer(load_plugin(libraries["memory"]), name or f"{next(_names)}", LONG))
        return made[-1]

    yield make
    for server in made:
        server.close()


_names = itertools.count()


@pytest.fixture
def hostile(libraries, tmp_path):
    """Opens a hostile plugin whose library, and so whose counts, are the test's own."""
    plugin = load_plugin(shutil.copy(libraries["hostile"], tmp_path / "hostile.so"))
    made = []

    def make(mode, timeout=LONG):
        made.append(PluginServer(plugin, mode, timeout))
        return made[-1]

    make.loaded = ctypes.CDLL(plugin.path)
    make.plugin = plugin
    make.count = lambda name: ctypes.c_int.in_dll(make.loaded, name).value
    yield make
    for server in made:
        server.close()


@pytest.fixture
def no_plugins(monkeypatch):
    monkeypatch.setattr(servers, "_plugins", {})


def rows_of(ids):
    """What an honest hostile_io keeps: value k of part p of an id is id + 100 * p + k."""
    return [(ids[:, None] + 100 * p + np.arange(3)).astype(np.float32) for p in range(2)]


# ---- an honest plugin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_the_example_is_a_parameter_server(check, memory_io):
    name = check.__name__
    run_check(check, lambda: memory_io(name))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_readme_of_the_example_runs(tmp_path):
    folder = shutil.copytree(MEMORY_IO.parent, tmp_path / "io_plugin", ignore=shutil.ignore_patterns("*.so"))
    subprocess.run(["make", "-s"], cwd=folder, check=True)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL).group(1)
    code += "assert found.all() and (weights == 1).all() and (state == 0).all()"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def test_parts_of_several_widths_come_back_bit_for_bit(memory_io):
    server = memory_io()
    ids = np.array([0, -1, 2**63 - 1, -(2**63), 5, 5 + 2**32])
    weights = np.arange(12, dtype=np.float32).reshape(6, 2)
    sums = np.array([[np.nan], [-0.0], [1e-45], [np.inf], [4], [5]], np.float32)
    server.push("t", ids, [weights, sums])
    parts, found_NP = server.pull("t", ids[::-1], [2, 1])
    assert found_NP.all()
    assert [part.tobytes() for part in parts] == [weights[::-1].tobytes(), sums[::-1].tobytes()]
    assert not server.pull("other", ids, [2])[1].any()
    parts, found_NP = server.pull("t", np.array([5, 6]), [2, 1, 1])
    assert found_NP.tolist() == [[True, True, False], [False] * 3] and not parts[0][1].any() and not parts[2].any()
    assert not isinstance(server, Erases)


def test_a_value_of_another_width_is_named(memory_io):
    server = memory_io()
    server.push("t", IDS, [np.zeros((3, 2), np.float32), np.zeros((3, 5), np.float32)])
    with pytest.raises(ServerError, match=r"part 1 of row 5 of table 't' must have 4 bytes, has 20"):
        server.pull("t", IDS, [2, 1])


def test_instances_share_the_rows_of_their_configuration(memory_io):
    one, same, other = memory_io("one"), memory_io("one"), memory_io("other")
    one.push("t", IDS, [np.ones((3, 2), np.float32)])
    assert same.pull("t", IDS, [2])[1].all() and not other.pull("t", IDS, [2])[1].any()


def test_no_rows_and_no_parts_are_fine(memory_io):
    server = memory_io()
    none = np.empty(0, np.int64)
    server.push("t", none, [np.empty((0, 2), np.float32)])
    parts, found_NP = server.pull("t", none, [2, 1])
    assert [part.shape for part in parts] == [(0, 2), (0, 1)] and found_NP.shape == (0, 2)
    server.push("t", IDS, [])
    parts, found_NP = server.pull("t", IDS, [])
    assert parts == [] and found_NP.shape == (3, 0)


def test_large_requests_are_cut_into_pieces(memory_io, monkeypatch):
    monkeypatch.setattr("oneemb.storage.remote.plugin_server._VALUES_MAX", 5)
    server = memory_io()
    ids = np.arange(7)
    server.push("t", ids, [np.arange(14, dtype=np.float32).reshape(7, 2), np.ones((7, 1), np.float32)])
    parts, found_NP = server.pull("t", np.arange(9), [2, 1])
    assert parts[0][:7].ravel().tolist() == list(range(14)) and found_NP.sum() == 14


def test_no_id_is_taken_for_another(memory_io):
    server = memory_io()
    rng = np.random.default_rng(3)
    ids = rng.integers(-(2**63), 2**63 - 1, 100_000)
    ids = np.unique(np.concatenate([ids, ids ^ (1 << 40), [0, -1, -(2**63), 2**63 - 1]]))
    assert len(ids) >= 200_000
    rng.shuffle(ids)
    halves = ids.view(np.uint32).reshape(-1, 2)
    rows = halves.view(np.float32)  # Bits of the id itself are its row.
    for part in np.array_split(np.arange(len(ids)), 3):
        server.push("t", ids[part], [rows[part]])
    order = rng.permutation(len(ids))
    parts, found_NP = server.pull("t", ids[order], [2])
    assert found_NP.all() and np.array_equal(parts[0].view(np.uint32), halves[order])


# ---- register_io -----------------------------------------------------------------------------------------------------


def test_a_registered_plugin_is_a_scheme(libraries, no_plugins):
    register_io(libraries["memory"], timeout=LONG)
    server = open_server("memory-io://any thing?password=secret")
    server.push("t", IDS, [np.ones((3, 2), np.float32)])
    assert server.pull("t", IDS, [2])[1].all()
    assert "memory-io" in server.name and "secret" not in server.name
    server.close()
    with pytest.raises(ValueError, match=r"memory://, .*memory-io://; got other://; register_io"):
        open_server("other://secret")


def test_the_same_type_again_is_ignored_with_a_warning(libraries, no_plugins):
    register_io(libraries["hostile"])
    with pytest.warns(UserWarning, match="hostile:// is the plugin .* already; .* was ignored"):
        register_io(str(libraries["hostile"]))


def test_a_plugin_may_take_the_place_of_memory_and_of_no_other_server(no_plugins, tmp_path):
    text = MEMORY_IO.read_text().replace('"io_plugin.h"', f'"{MEMORY_IO.parent}/io_plugin.h"')
    for scheme in ("memory", "file"):
        (tmp_path / f"{scheme}.c").write_text(text.replace('"memory-io"', f'"{scheme}"'))
        compile_plugin(tmp_path / f"{scheme}.c", tmp_path / f"{scheme}.so")
    register_io(tmp_path / "memory.so")
    assert isinstance(server := open_server("memory://a"), PluginServer)
    server.close()
    with pytest.warns(UserWarning, match="file:// is a server of oneemb's own already"):
        register_io(tmp_path / "file.so")


def test_what_is_no_plugin_is_told(tmp_path, no_plugins):
    with pytest.raises(ServerError, match="lacks IO_type, IO_Initialize, IO_Finalize, IO_Pull, IO_Push"):
        register_io(compile_plugin(HOSTILE_IO, tmp_path / "nothing.so", "-DNO_TYPE", "-DNO_FUNCTIONS"))
    with pytest.raises(ServerError, match="lacks IO_type;"):
        register_io(compile_plugin(HOSTILE_IO, tmp_path / "no_type.so", "-DNO_TYPE"))
    for option, text in (("-DNULL_TYPE", r"IO_type None"), ("-DBAD_TYPE", r"IO_type b'no scheme://'")):
        with pytest.raises(ServerError, match=text):
            register_io(compile_plugin(HOSTILE_IO, tmp_path / f"{option}.so", option))
    (tmp_path / "text.so").write_text("no library")
    for path in (tmp_path / "text.so", tmp_path / "absent.so"):
        with pytest.raises(ServerError, match=f"{path} could not be loaded"):
            register_io(path)
    with pytest.raises(ValueError, match="timeout must be above 0"):
        register_io(tmp_path / "absent.so", timeout=0)
    assert servers._plugins == {}


# ---- hostile plugins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("short", "part 0 of row 5 of table 't' must have 12 bytes, has 8"),
        ("long", "part 0 of row 5 of table 't' must have 12 bytes, has 16"),
        ("odd", "part 0 of row 5 of table 't' must have 12 bytes, has 7"),
        ("offset", "a value at offset 3, part 0; offsets must be below 3"),
        ("huge-offset", "a value at offset 4294967295, part 0"),
        ("part", "a value at offset 0, part 2; offsets must be below 3 and parts below 2"),
        ("null-data", "part 0 of row 5 of table 't' came as 12 bytes at NULL"),
        ("other-twice", "part 0 of row 7 of table 't' came twice, with two values"),
        ("then-missing", "part 1 of row 5 of table 't' came twice, with two values"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_it(hostile, mode, text):
    with pytest.raises(ServerError, match=text):
        hostile(mode).pull("t", IDS, [3, 3])


@pytest.mark.parametrize("mode", ["good", "same-twice", "threads", "completes-twice", "other-context"])
def test_an_answer_that_is_odd_and_right_is_taken(hostile, mode):
    server = hostile(mode)
    ids = np.arange(-20_000, 20_000) if mode == "threads" else IDS
    parts, found_NP = server.pull("t", ids, [3, 3])
    if mode == "other-context":
        assert not found_NP[0].any()
    else:
        assert found_NP.all() and all(map(np.array_equal, parts, rows_of(ids)))
    server.push("t", ids, parts)
    if mode == "completes-twice":  # While nobody waits, and the arrays are the caller's.
        hostile.loaded.let_go()
        hostile.loaded.wait_until_gone()
        assert all(map(np.array_equal, parts, rows_of(ids)))
        assert server.pull("t", ids, [3, 3])[1].all()


def test_what_was_not_given_is_not_found_and_zero(hostile):
    parts, found_NP = hostile("some").pull("t", IDS, [3, 3])
    assert found_NP.tolist() == [[True, True], [False, False], [True, True]]
    assert not parts[0][1].any() and not parts[1][1].any()


def test_a_row_may_lack_its_weights_and_have_its_state(hostile):
    parts, found_NP = hostile("no-state").pull("t", IDS, [3, 3])
    assert found_NP.tolist() == [[False, True]] * 3
    assert not parts[0].any() and parts[1].tolist() == [[1, 2, 3]] * 3


def test_a_plugin_that_never_answers_runs_into_the_timeout_and_what_it_may_read_is_kept(hostile):
    server = hostile("never", SOON)
    with pytest.raises(ServerTimeoutError, match=r"not answered IO_Pull of 3 rows of table 't' within 0.2 s.* 1 of"):
        server.pull("t", IDS, [3, 3])
    with pytest.raises(ServerTimeoutError, match=r"IO_Push of 3 rows .* 2 of its calls are open, whose \d+ bytes stay"):
        server.push("t", IDS, rows_of(IDS))
    server.close()
    assert hostile.count("finalized") == 1


def test_a_late_answer_reaches_nothing_and_finds_what_it_reads(hostile):
    server, open_before = hostile("late", SOON), set(plugin_calls.unanswered)
    asked = IDS.copy()
    with pytest.raises(ServerTimeoutError):
        server.pull("a table", asked, [3, 3])
    asked[:] = 0
    gc.collect()
    (number,) = set(plugin_calls.unanswered) - open_before
    assert plugin_calls.unanswered[number].kept is not None
    parts, found_NP = server.pull("t", IDS + 1, [3, 3])
    taken = [np.full(size, 666) for size in range(1, 50) for _ in range(200)]  # whatever was freed too early
    hostile.loaded.let_go()
    hostile.loaded.wait_until_gone()
    del taken
    assert set(plugin_calls.unanswered) == open_before
    assert found_NP.all() and all(map(np.array_equal, parts, rows_of(IDS + 1)))
    assert (ctypes.c_char * 64).in_dll(hostile.loaded, "seen_table").value == b"a table"
    assert (ctypes.c_int64 * 4).in_dll(hostile.loaded, "seen_ids")[:3] == IDS.tolist()
    ids, rows = IDS.copy(), [np.array([[1], [2], [3]], np.float32), np.zeros((3, 2), np.float32)]
    with pytest.raises(ServerTimeoutError, match=r"1 of its calls are open"):  # The pull has ended since.
        server.push("t", ids, rows)
    ids[:], rows[0][:] = 0, 0  # The caller's arrays are not the plugin's.
    hostile.loaded.let_go()
    hostile.loaded.wait_until_gone()
    assert (ctypes.c_int64 * 4).in_dll(hostile.loaded, "seen_ids")[:2] == [5001, 7000]


def test_a_plugin_that_does_not_return_keeps_nobody_waiting(hostile):
    server = hostile("stuck", SOON)
    open_before = set(plugin_calls.unanswered)
    with pytest.raises(ServerTimeoutError, match="has not answered IO_Pull"):
        server.pull("t", IDS, [3, 3])
    with pytest.raises(ServerTimeoutError, match="has not been asked for IO_Push .* has not returned from an earlier"):
        server.push("t", IDS, rows_of(IDS))
    assert len(plugin_calls.unanswered.keys() - open_before) == 1  # Nothing of what the plugin has not seen is kept.
    with pytest.raises(ServerTimeoutError, match="IO_Finalize"):
        server.close()
    assert hostile.count("finalized") == 0 and hostile.count("asked") == 1
    hostile.loaded.let_go()
    for thread in threading.enumerate():
        if thread.name == "oneemb-plugin":
            thread.join(LONG)
    assert set(plugin_calls.unanswered) == open_before
    assert (hostile.count("finalized"), hostile.count("asked")) == (1, 1)  # The push that was given up was never made.


def test_an_instance_that_does_not_begin_is_an_error(hostile):
    with pytest.raises(ServerError, match="IO_Initialize returned NULL"):
        hostile("null")
    with pytest.raises(ServerTimeoutError, match="IO_Initialize"):
        hostile("stuck-initialize", SOON)
    hostile.loaded.let_go()


def test_an_instance_is_ended_once_when_closed_or_dropped(hostile):
    server = PluginServer(hostile.plugin, "good", LONG)
    server.close()
    server.close()
    assert hostile.count("finalized") == 1
    with pytest.raises(ServerError, match="is closed; open it again"):
        server.pull("t", IDS, [3])
    server = PluginServer(hostile.plugin, "good", LONG)
    server.pull("t", IDS, [3])
    del server
    gc.collect()
    assert hostile.count("finalized") == 2


def test_an_exception_in_a_callback_is_raised_by_the_call(hostile, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no room")

    server = hostile("good")
    monkeypatch.setattr("oneemb.storage.remote.plugin_server._Pull.take", fail)
    with pytest.raises(MemoryError, match="no room"):
        server.pull("t", IDS, [3, 3])
    monkeypatch.undo()
    assert server.pull("t", IDS, [3, 3])[1].all()


def test_a_forked_child_is_told_to_open_its_own_server(hostile):
    server = hostile("good")
    server.pull("t", IDS, [3, 3])

    def child():
        with pytest.raises(ServerError, match="forked child .* open the server in the child"):
            server.pull("t", IDS, [3, 3])
        with pytest.raises(ServerError, match="forked child"):
            server.push("t", IDS, rows_of(IDS))
        server.close()
        return hostile.count("finalized") == 0

    assert ended_well(in_child(child)) is True
    assert server.pull("t", IDS, [3, 3])[1].all()


def test_a_process_that_ends_ends_its_instances(libraries):
    code = f"""
import ctypes
import weakref
from oneemb.storage.remote.servers import open_server, register_io
library = ctypes.CDLL({str(libraries["hostile"])!r})
weakref.finalize(library, lambda: print(finalized.value))  # made first: it runs last
finalized = ctypes.c_int.in_dll(library, "finalized")
register_io({str(libraries["hostile"])!r})
server = open_server("hostile://good")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_what_c_cannot_hold_is_refused(hostile):
    with pytest.raises(ValueError, match="character 0"):
        hostile("a\0b")
    server = hostile("good")
    with pytest.raises(ValueError, match=r"parts must be float32 of shape \[3, width\], got float64"):
        server.push("t", IDS, [np.zeros((3, 3))])
