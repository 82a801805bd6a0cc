"""What the tests of the row updates share: the tables of cases, a slab of known bits, the oracles, the checks.

An oracle holds weights and state of all rows apart from any slab and steps the touched ones. There are two kinds:
a class of torch.optim, whose step runs on a dense parameter and is then undone on the rows that were not touched;
and a formula in float64 NumPy, written from the reference. Neither imports the code under test.
"""

import numpy as np
import torch

from oneemb.kernels.host_backend import HostBackend
from oneemb.kernels.threads import Threads
from oneemb.storage.rows.row_format import RowFormat
from tests.support.pairwise import diagonal

STEPS = 50
SLOTS = 24
SPARE_WORDS = 3

DIMS = [
    1,  # every slice is one element
    3,  # less than any vector; in half width an odd last weight shares its word with padding
    7,  # one short of a vector of 8
    16,  # whole vectors and one cache line
    64,  # the usual one
    65,  # whole vectors and one left over; no row but the first is aligned
    128,  # several times the unrolled loop
]

# Relative to max(|expected|, 1) for weights: equal float32 up to the order of roundings. In half width the weights
# are rounded after each step, and a float32 that lies one ulp off may be rounded the other way.
DTYPES = {
    "float32": 1e-6,
    "float16": 2.0**-9,
    "bfloat16": 2.0**-6,
}

CASES = diagonal(list(DTYPES), DIMS, (1, 2))


class SmallShares(Threads):
    """Threads that split even a few rows, and count the shares they ran."""

    def __init__(self, count):
        super().__init__(count)
        self.shares = 0

    def run(self, loop, size, *args, share_min=1):
        self.shares += self.shares_of(size, share_min)
        super().run(loop, size, *args, share_min=share_min)


THREADS = {1: SmallShares(1), 2: SmallShares(2)}


def to_bits(weight, dtype):
    """The weights' bits as they lie in a slab; the conversion is torch's."""
    x = torch.from_numpy(np.asarray(weight, np.float32))
    if dtype == "float16":
        return x.half().view(torch.int16).numpy().view(np.uint16)
    if dtype == "bfloat16":
        return x.bfloat16().view(torch.int16).numpy()
    return x.numpy()


def rounded(weight, dtype):
    """The weights after a trip through their dtype, in the array's own type."""
    x = torch.from_numpy(np.ascontiguousarray(weight))
    return x.to(getattr(torch, dtype)).to(x.dtype).numpy()


class Slab:
    """Rows in a slab that is otherwise full of random bits: weights, padding, state, spare words."""

    def __init__(self, dim, dtype, initial_state, seed, slots=SLOTS):
        rng = np.random.default_rng(seed)
        self.dim, self.dtype = dim, dtype
        self.format = RowFormat(dim, dtype, None, tuple(initial_state))
        width = self.format.row_width + SPARE_WORDS
        self.row_SW = rng.integers(0, 1 << 32, (slots, width), np.uint32).view(np.float32)
        self.weight_SX = self.format.weights(self.row_SW)
        self.state_begin = self.format.state_begin
        weight_SD = rounded(rng.normal(0, 1, (slots, dim)).astype(np.float32), dtype)
        self.weight_SX[:, :dim] = to_bits(weight_SD, dtype)
        self.state_SK[:] = np.asarray(initial_state, np.float32)

    @property
    def weight_SD(self):
        bits = np.ascontiguousarray(self.weight_SX[:, : self.dim])
        if self.dtype == "float32":
            return bits
        return torch.from_numpy(bits.view(np.int16)).view(getattr(torch, self.dtype)).float().numpy()

    @property
    def state_SK(self):
        return self.row_SW[:, self.state_begin : self.state_begin + self.format.state_width]

    def bytes_outside(self, slot_U):
        """Every byte of the slab that an update of these rows has no business with."""
        copy = Slab.__new__(Slab)
        copy.__dict__.update(self.__dict__)
        copy.row_SW = self.row_SW.copy()
        copy.weight_SX = self.format.weights(copy.row_SW)
        copy.weight_SX[slot_U, : self.dim] = 0
        copy.row_SW[slot_U, self.state_begin : self.state_begin + self.format.state_width] = 0
        return copy.row_SW.tobytes()


class TorchOracle:
    """An optimizer of torch on a dense float32 parameter, its step undone on the rows that were not touched.

    make([parameter]) -> optimizer; keys: the names of its state in the order of the row's.
    """

    state_slack = 1

    def __init__(self, make, keys, *, sparse=False):
        self.make, self.keys, self.sparse = make, keys, sparse

    def start(self, weight_SD, state_SK):
        self.param = torch.nn.Parameter(torch.from_numpy(weight_SD.copy()))
        self.optimizer = self.make([self.param])

    @property
    def weight_SD(self):
        return self.param.detach().numpy()

    @weight_SD.setter
    def weight_SD(self, value):
        self.param.data.copy_(torch.from_numpy(value))

    @property
    def state_SK(self):
        state = self.optimizer.state[self.param]
        return np.concatenate([state[key].numpy() for key in self.keys], axis=1) if self.keys else None

    def step(self, step, slot_U, grad_UD):
        # torch adds a sparse tensor on all its threads however small it is: a millisecond each on a busy machine.
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._step(slot_U, grad_UD)
        finally:
            torch.set_num_threads(count)

    def _step(self, slot_U, grad_UD):
        slots, grads = torch.from_numpy(slot_U), torch.from_numpy(grad_UD)
        if self.sparse:
            self.param.grad = torch.sparse_coo_tensor(slots[None], grads, self.param.shape, check_invariants=True)
            self.optimizer.step()
            return
        state = self.optimizer.state[self.param]
        weight = self.param.detach().clone()
        before = {key: state[key].clone() if key in state else torch.zeros_like(weight) for key in self.keys}
        self.param.grad = torch.zeros_like(weight).index_copy_(0, slots, grads)
        self.optimizer.step()
        untouched = torch.ones(len(weight), dtype=torch.bool).index_fill_(0, slots, False)
        self.param.data[untouched] = weight[untouched]
        for key in self.keys:
            state[key][untouched] = before[key][untouched]


class Float64Oracle:
    """A formula in float64: rule(w_UD, state_UK, g_UD, step) -> w_UD, state_UK."""

    # A sum such as Ftrl's z rounds to float32 at every step while it is large and may end up small.
    state_slack = 5

    def __init__(self, rule):
        self.rule = rule

    def start(self, weight_SD, state_SK):
        self.weight_SD, self.state_SK = weight_SD.astype(np.float64), state_SK.astype(np.float64)

    def step(self, step, slot_U, grad_UD):
        self.weight_SD[slot_U], self.state_SK[slot_U] = self.rule(
            self.weight_SD[slot_U], self.state_SK[slot_U], grad_UD.astype(np.float64), step
        )


def touched_rows(step, rng, slots=SLOTS):
    """Slots that have a gradient at this step, in random order: all, none, one, some. The last is never touched."""
    if step in (1, STEPS // 2):
        count = slots - 1
    elif step % 10 == 0:
        count = 0
    elif step % 10 == 5:
        count = 1
    else:
        count = int(rng.integers(2, slots - 1))
    return rng.permutation(slots - 1)[:count].astype(np.int64)


def check_update(update, oracle, initial_state, dtype, dim, threads, *, seed=0, close=None):
    """STEPS steps of `update` agree with the oracle, and touch no byte that is not theirs.

    update(weight_SX, row_SW, slot_U, grad_UD, state_begin=, step=, backend=) -> None; close: which columns of the
    state are compared, None = all.
    """
    print(f"seed {seed}")
    rng = np.random.default_rng(seed + 1)
    slab = Slab(dim, dtype, initial_state, seed)
    oracle.start(slab.weight_SD, slab.state_SK)
    runner = THREADS[threads]
    runner.shares = 0
    for step in range(1, STEPS + 1):
        slot_U = touched_rows(step, rng)
        grad_UD = rng.normal(0, 1, (len(slot_U), dim)).astype(np.float32)
        before = slab.bytes_outside(slot_U)
        backend = HostBackend(runner)
        update(slab.weight_SX, slab.row_SW, slot_U, grad_UD, state_begin=slab.state_begin, step=step, backend=backend)
        assert slab.bytes_outside(slot_U) == before, f"step {step} wrote outside its rows"
        oracle.step(step, slot_U, grad_UD)
        oracle.weight_SD = rounded(oracle.weight_SD, dtype)
        assert_close(slab.weight_SD, oracle.weight_SD, DTYPES[dtype], f"weights, step {step}")
    # Steps with fewer than two rows run as one share, the others as many as there are threads.
    assert runner.shares > STEPS if threads > 1 else runner.shares == STEPS
    if dtype != "float32":
        assert (slab.weight_SD != oracle.weight_SD).sum() <= max(1, 0.02 * slab.weight_SD.size)
    columns = slice(None) if close is None else close
    if len(initial_state):
        assert_close(
            slab.state_SK[:, columns], oracle.state_SK[:, columns], oracle.state_slack * DTYPES[dtype], "state"
        )


def assert_close(found, expected, tolerance, what):
    scale = np.maximum(np.abs(expected), 1.0)
    worst = np.max(np.abs(found - expected) / scale, initial=0.0)
    assert worst <= tolerance, f"{what}: {worst:.3g} apart, {tolerance:.3g} allowed"


def check_threads(update, initial_state, dim=16, slots=4000):
    """The same bits for 1, 2 and 3 threads, the shares being those of real batches."""
    results = []
    for count in (1, 2, 3):
        threads = Threads(count)
        slab = Slab(dim, "float32", initial_state, seed=5, slots=slots)
        rng = np.random.default_rng(6)
        for step in range(1, 6):
            slot_U = rng.permutation(slots)[: slots - 100 * step].astype(np.int64)
            grad_UD = rng.normal(0, 1, (len(slot_U), dim)).astype(np.float32)
            update(
                slab.weight_SX, slab.row_SW, slot_U, grad_UD, state_begin=slab.state_begin, step=step,
                backend=HostBackend(threads),
            )  # fmt: skip
        threads.close()
        results.append(slab.row_SW.tobytes())
    assert results[0] == results[1] == results[2]


def check_not_finite(update, initial_state, dim=19):
    """A NaN and an infinite gradient spoil their own rows, visibly, and no other."""
    bad = {2: np.nan, 5: np.inf}
    slabs = {}
    for spoiled in (False, True):
        slab = slabs[spoiled] = Slab(dim, "float32", initial_state, seed=7)
        rng = np.random.default_rng(8)
        for step in range(1, 4):
            slot_U = np.arange(8, dtype=np.int64)
            grad_UD = rng.normal(0, 1, (8, dim)).astype(np.float32)
            if spoiled and step == 2:
                for slot, value in bad.items():
                    grad_UD[slot, 4] = value
            update(
                slab.weight_SX, slab.row_SW, slot_U, grad_UD, state_begin=slab.state_begin, step=step,
                backend=HostBackend(THREADS[1]),
            )  # fmt: skip
    assert np.isfinite(slabs[False].weight_SD).all()
    assert not np.isfinite(slabs[True].weight_SD[list(bad), 4]).any()
    others = [slot for slot in range(SLOTS) if slot not in bad]
    assert slabs[True].row_SW[others].tobytes() == slabs[False].row_SW[others].tobytes()
