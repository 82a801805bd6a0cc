"""What the tape follows, and what it gives up. Whatever it has recorded changes nothing when it is run again."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx

from oneemb.graph.arguments import Lookup
from oneemb.graph.building import Building
from oneemb.graph.executor import Executor
from oneemb.graph.inputs import Signature
from oneemb.graph.passes import copy_graph, output_of
from oneemb.graph.tape import Tape
from oneemb.graph.text import graph_text


class Recording:
    """A function of a batch, recorded: it is given `look_up` to ask for rows of ids, and the batch.

    Attributes:
        asked: the ids of every lookup it made, copied.
    """

    def __init__(self, function, *batch):
        self._signature = Signature(lambda *batch: None)
        values, structure = self._signature.flatten(batch, {})
        self.tape = Tape(values, list(structure.names()))
        self.asked = []
        Building({}, tape=self.tape).call(function, self._look_up, *batch)
        self.others = self.tape.others
        self.graph = self.tape.graph()
        self.graph.lint()

    def _look_up(self, ids, **others):
        self.asked.append(ids.detach().clone())
        return self.tape.lookup("a", Lookup(ids, **others), lambda: torch.ones(3))

    def lookups(self):
        """The arguments of each lookup that was recorded."""
        return [node.kwargs for node in self.graph.nodes if node.op == "call_module"]

    def replay(self, *batch):
        """The ids of the lookups that were recorded, of another batch."""
        graph = copy_graph(self.graph)
        output = output_of(graph)
        output.args = (tuple(node.kwargs["ids"] for node in output.args[0]),)
        for node in reversed(list(graph.nodes)):
            if node.op == "call_module":
                graph.erase_node(node)
        return list(Executor(graph, self.tape.constants.__getitem__)(self._signature.flatten(batch, {})[0]))


def ids_of(rows, seed=0):
    return torch.randint(100, (rows, 4), generator=torch.Generator().manual_seed(seed))


def asked_by(function, *batch):
    """The ids that a function asks for, without a tape."""
    asked = []

    def look_up(ids, **others):
        asked.append(ids.detach().clone())
        return torch.ones(3)

    function(look_up, *batch)
    return asked


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- what is followed ------------------------------------------------------------------------------------------------

FOLLOWED = {
    "as it is": lambda x: x,
    "slices": lambda x: x[1:, ::2][..., 0],
    "an element": lambda x: x[0, 1],
    "a mask": lambda x: x[x > 50],
    "indices": lambda x: x[x[:, 0].argsort()],
    "arithmetic": lambda x: (5 - x * 2 + x // 3 - (-x)) % 1000,
    "reversed operators": lambda x: 7 + 3 * x + (1000 // (x + 1)) + 2 ** (x % 3) + 5 % (x + 1),
    "bits": lambda x: (x & 7) | (x ^ 3) << 2 >> 1 | ~x,
    "comparisons": lambda x: ((x < 3) | (x >= 7) | (x == 5) | (x != 4) | (x <= 0) | (x > 90)).long(),
    "dtypes": lambda x: x.float().mul(1.5).to(torch.int64).to(dtype=torch.int32).long(),
    "cat": lambda x: torch.cat([x, x[:, :1] + 1], dim=1),
    "stack of a list of tuples": lambda x: torch.stack([part for part in x.unbind(1)], 1),
    "a tuple": lambda x: torch.unique(x, return_inverse=True)[1],
    "a named tuple": lambda x: x.sort(1).indices,
    "split": lambda x: x.split(2, dim=1)[1],
    "iteration": lambda x: next(iter(x)),
    "a size of the batch": lambda x: x.reshape(x.shape[0], -1),
    "sizes among others": lambda x: x.reshape([x.shape[0], 2, 2]),
    "len": lambda x: x.view(len(x), -1),
    "a property": lambda x: x.T.mT,
    "where": lambda x: torch.where(x > 50, x, -x),
    "clamp": lambda x: x.clamp(min=3, max=50),
    "a function of torch.nn": lambda x: torch.nn.functional.pad(x, (1, 1), value=3),
    "an array": lambda x: torch.as_tensor(x.numpy()),
    "a list": lambda x: torch.tensor(x.tolist()),
    "an array of the tensor": lambda x: torch.tensor(x.numpy()),
    "bucketize": lambda x: torch.bucketize(x, x[0].sort().values),
    "a copy": lambda x: x.clone().contiguous().detach(),
    "new ones": lambda x: torch.zeros_like(x) + torch.ones_like(x) + x.new_full((1,), 3),
    "an op of aten": lambda x: torch.ops.aten.add(x, x),
    "expand": lambda x: x[:, :1].expand(-1, 7),
    "a size in a slice": lambda x: x[: x.size(0)],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_ids_are_known_of_another_batch_of_another_size(name):
    function = FOLLOWED[name]

    def build(look_up, x):
        look_up(function(x))

    recording = Recording(build, ids_of(6))
    assert recording.others == 0 and not recording.tape.constants, graph_text(recording.graph)
    for rows in (6, 9, 1):
        batch = ids_of(rows, rows)
        before = batch.clone()
        assert same(recording.replay(batch), asked_by(build, batch))
        assert torch.equal(batch, before)


@dataclass
class Pair:
    first: torch.Tensor
    second: list


def test_leaves_of_a_nested_batch_are_followed():
    def build(look_up, batch):
        look_up(batch["pair"].first + batch["pair"].second[1])
        look_up(batch["all"][0][1] * batch["scale"])

    def batch(rows):
        x = ids_of(rows, rows)
        return {"pair": Pair(x, [x, x + 1]), "all": [(x, x * 2)], "scale": rows + 50}

    recording = Recording(build, batch(6))
    for rows in (6, 8):
        assert same(recording.replay(batch(rows)), asked_by(build, batch(rows)))


def test_arrays_and_lists_of_a_batch_are_followed():
    def build(look_up, array, numbers):
        look_up(torch.as_tensor(array) + 1)
        look_up(torch.tensor(numbers[0]) * 2)

    recording = Recording(build, np.arange(5), [np.arange(3)])
    assert recording.others == 0
    assert same(recording.replay(np.arange(7), [np.arange(4)]), asked_by(build, np.arange(7), [np.arange(4)]))


def test_all_arguments_of_a_lookup_are_noted():
    def build(look_up, ids, offsets, scales):
        look_up(ids, table_ids=offsets[1:] % 2, offsets=offsets, per_sample_weights=scales * 2, pooling="sum")
        look_up(ids, pooling="max")

    recording = Recording(build, torch.arange(4), torch.tensor([0, 2, 4]), torch.rand(4))
    one, other = ({key: str(value) for key, value in lookup.items()} for lookup in recording.lookups())
    no_columns = {"columns": "None", "per_sample_weights": "None", "ids": "batch_0"}
    mul = {"per_sample_weights": "mul", "pooling": "sum"}
    assert one == no_columns | mul | {"table_ids": "remainder", "offsets": "batch_1"}
    assert other == no_columns | {"table_ids": "None", "offsets": "None", "pooling": "max"}


def test_nothing_is_recorded_that_no_lookup_needs():
    def build(look_up, x):
        x.float().sum()
        rows = look_up(x + 1)
        look_up((rows * 2).long())
        (x * torch.rand(4)).sum()

    recording = Recording(build, ids_of(3))
    assert recording.others == 1 and not recording.tape.constants
    assert graph_text(recording.graph).splitlines()[1:-1] == [
        "add = batch_0.add(1)",
        "a = a(ids=add, table_ids=None, offsets=None, columns=None, per_sample_weights=None, pooling='sum')",
    ]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.reshape(x.shape[0] * 4), lambda x: x + int(x.max()), lambda x: x[: 3 if x[0, 0] > 50 else 4]],
    ids=["a computed size", "a number of the batch", "a branch"],
)
def test_a_wrong_guess_differs_or_raises(function):
    def build(look_up, x):
        look_up(function(x))

    recording = Recording(build, ids_of(6))
    batch = ids_of(9, 2) + 100
    before = batch.clone()
    try:
        assert not same(recording.replay(batch), asked_by(build, batch))
    except RuntimeError as error:
        assert "shape" in str(error)
    assert torch.equal(batch, before)


# ---- what is given up ------------------------------------------------------------------------------------------------

LEARNED = torch.ones(4, requires_grad=True)

GIVEN_UP = {
    "rows": lambda x, rows: x + rows.long()[0],
    "a parameter": lambda x, rows: (x * LEARNED).long(),
    "a gradient": lambda x, rows: (x.float().requires_grad_() * 2).detach().long(),
    "what was computed of neither": lambda x, rows: x + torch.arange(4),
    "random numbers": lambda x, rows: x + torch.randint_like(x, 9),
    "dropout": lambda x, rows: torch.nn.functional.dropout(x.float()).long(),
    "dropout of nothing": lambda x, rows: torch.nn.functional.dropout(x[:0].float()).long(),
    "random numbers of nothing": lambda x, rows: torch.randint_like(x[:0], 9),
    "a sample": lambda x, rows: torch.multinomial(x.float() + 1, 2),
    "a change in place": lambda x, rows: x.add_(1),
    "a change by an operator": lambda x, rows: x.__iadd__(1),
    "a change by an index": lambda x, rows: x.__setitem__(0, 3) or x,
    "a change of a view": lambda x, rows: x[0].add_(1) is None or x,
    "a change of its base": lambda x, rows: [x[0], x.add_(1)][0],
    "a change of a copy": lambda x, rows: x.clone().mul_(2),
    "a change by out": lambda x, rows: torch.add(x, 1, out=x),
    "out": lambda x, rows: torch.add(x, 1, out=torch.empty_like(x)),
    "a function of Python": lambda x, rows: x.clone().apply_(lambda one: one + 1),
    "an activation in place": lambda x, rows: torch.nn.functional.relu(x, inplace=True),
    "a fill": lambda x, rows: torch.zeros_like(x).fill_(3),
    "shared memory": lambda x, rows: x.share_memory_(),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_ids_that_are_not_known_before(name):
    def build(look_up, x):
        rows = look_up(x[:, :1] * 2)
        look_up(GIVEN_UP[name](x, rows))

    recording = Recording(build, ids_of(6))
    assert recording.others == 1, graph_text(recording.graph)
    batch = ids_of(9, 1)
    before, random, shared = batch.clone(), torch.get_rng_state(), batch.is_shared()
    assert same(recording.replay(batch), [before[:, :1] * 2])
    assert torch.equal(batch, before) and torch.equal(torch.get_rng_state(), random) and batch.is_shared() == shared


def test_pooling_by_weights_that_are_not_known():
    def build(look_up, x):
        rows = look_up(x)
        look_up(x, per_sample_weights=rows)
        look_up(x, per_sample_weights=LEARNED)

    recording = Recording(build, ids_of(3))
    assert recording.others == 0
    assert [lookup.get("pooling") for lookup in recording.lookups()] == ["sum", None, None]
    assert all(lookup["per_sample_weights"] is None for lookup in recording.lookups()[1:])


# ---- tensors from outside --------------------------------------------------------------------------------------------


def test_a_tensor_from_outside_is_read_at_each_run():
    table = torch.arange(100)

    def build(look_up, x):
        look_up(table[x])

    recording = Recording(build, ids_of(5))
    assert list(recording.tape.constants.values()) == [table]
    table += 7
    assert same(recording.replay(ids_of(8, 2)), asked_by(build, ids_of(8, 2)))
    old, table = table, torch.arange(100) * 3  # exchanged: the guess is wrong
    assert same(recording.replay(ids_of(8, 2)), [old[ids_of(8, 2)]])


STATEFUL = {
    "index_add_": lambda buffer, x: buffer.index_add_(0, x[:, 0], torch.ones_like(x[:, 0])),
    "scatter_add_": lambda buffer, x: buffer.scatter_add_(0, x[:, 0], x[:, 1]),
    "copy_": lambda buffer, x: buffer[:4].copy_(x[0]),
    "an index": lambda buffer, x: buffer.__setitem__(x[:, 0], 3),
    "index_put_": lambda buffer, x: buffer.index_put_((x[:, 0],), x[:, 1], accumulate=True),
    "out": lambda buffer, x: torch.add(x[0], 1, out=buffer[:4]),
    "an operator": lambda buffer, x: buffer[:4].__iadd__(x[0]),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_buffer_that_is_changed_by_the_batch_is_changed_once(name):
    buffer = torch.zeros(100, dtype=torch.long)

    def build(look_up, x):
        given_back = STATEFUL[name](buffer, x)
        look_up(buffer[x])
        look_up(x + (0 if given_back is None else given_back.sum()))

    recording = Recording(build, ids_of(5))
    before = buffer.clone()
    recording.replay(ids_of(7, 1))
    assert torch.equal(buffer, before) and before.any()


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_changed_once(training):
    norm = torch.nn.BatchNorm1d(4, affine=False).train(training)

    def build(look_up, x):
        look_up((norm(x.float()) * 10).long())

    recording = Recording(build, ids_of(6))
    before = norm.running_mean.clone(), norm.running_var.clone()
    assert before[0].any() == training
    recording.replay(ids_of(6, 1))
    assert torch.equal(norm.running_mean, before[0]) and torch.equal(norm.running_var, before[1])


def test_functions_that_need_a_gradient_are_not_run_again():
    called = []

    def build(look_up, x, w):
        w.register_hook(lambda grad: called.append(1))
        look_up(x)
        look_up(torch.autograd.grad((w * 2).sum(), w)[0].long())

    w = torch.rand(3, requires_grad=True)
    recording = Recording(build, ids_of(3), w)
    assert recording.others == 1 and len(called) == 1
    recording.replay(ids_of(3), torch.rand(3, requires_grad=True))
    assert len(called) == 1 and w.grad is None


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_ids_are_followed_in_inference_mode():
    def build(look_up, x):
        look_up(x[:, 0] % 7)
        y = x + 1
        look_up(y)
        y.add_(1)
        look_up(y)

    with torch.inference_mode():
        for x in (ids_of(5), torch.ones(5, 4, dtype=torch.long)):
            recording = Recording(build, x)
            assert recording.others == 1
            assert same(recording.replay(ids_of(7, 1)), asked_by(build, ids_of(7, 1))[:2])


def test_what_torch_compile_compiles_is_left_alone():
    compiled = []

    def backend(module, example):
        compiled.append(module)
        return module.forward

    f = torch.compile(lambda x: x * 2 + 1, backend=backend, fullgraph=True)

    def build(look_up, x):
        f(x)
        look_up(x + 1)

    recording = Recording(build, ids_of(5))
    assert len(compiled) == 1 and same(recording.replay(ids_of(7, 1)), [ids_of(7, 1) + 1])


def test_a_nested_tape_and_an_error_leave_no_mode_behind():
    class Stop(Exception):
        pass

    def build(look_up, x):
        Recording(lambda look_up, x: look_up(x + 1), x)
        look_up(x + 1)
        raise Stop

    with pytest.raises(Stop):
        Recording(build, ids_of(3))
    assert torch._C._len_torch_function_stack() == 0


# ---- any program -----------------------------------------------------------------------------------------------------

OPS = [
    lambda a, b: a + b[:1],
    lambda a, b: a * 3 - b.sum(),
    lambda a, b: a[1:],
    lambda a, b: a[:, :2].repeat(1, 2),
    lambda a, b: a.T.reshape(-1, 4),
    lambda a, b: torch.cat([a, b]),
    lambda a, b: a[a[:, 0] > b[0, 0]],
    lambda a, b: a.view(-1, 4),
    lambda a, b: a.float().to(torch.int64),
    lambda a, b: a.sort(0).values,
    lambda a, b: torch.tensor(a.tolist()).reshape(-1, 4),
    lambda a, b: torch.as_tensor(a.numpy()),
    lambda a, b: a.data,
    lambda a, b: a.expand(a.shape[0], 4),
    lambda a, b: a.add_(1),
    lambda a, b: a.data.mul_(2),
    lambda a, b: a[0].zero_().expand(3, 4),
    lambda a, b: a.copy_(b[:1]),
    lambda a, b: torch.add(a, b[:1], out=torch.empty_like(a)),
    lambda a, b: torch.mul(a, 2, out=a),
    lambda a, b: a.__setitem__(0, b[0]) or a,
    lambda a, b: a.index_add_(0, torch.zeros(1, dtype=torch.long), b[:1]),
    lambda a, b: torch.randint_like(a, 50),
    lambda a, b: a + torch.nn.functional.dropout(b.float()).long()[:1],
    lambda a, b: a.unsqueeze_(0).squeeze_(0),
    lambda a, b: a.numpy().__iadd__(1) is None or a,
    lambda a, b: a.detach().clone().resize_(2, 4),
    lambda a, b: torch.where(a > 3, a, b[:1]),
    lambda a, b: torch.from_numpy(a.numpy().copy()),
    lambda a, b: a.fill_(int(b.max())),
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 30), st.integers(0, 30), st.booleans()), max_size=9
    ),
    st.integers(1, 6),
)
def test_a_replay_changes_nothing_and_draws_nothing(steps, rows):
    outside = torch.arange(8).reshape(2, 4)

    def build(look_up, x, y):
        values = [x, y, outside]
        for op, i, j, asks in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            try:
                value = OPS[op](a, b)
            except (RuntimeError, IndexError):  # these shapes do not go together
                continue
            values.append(value if value.ndim == 2 else value.reshape(-1, 4))
            if asks:
                look_up(values[-1])

    recording = Recording(build, ids_of(3), ids_of(3, 1))
    constants = list(recording.tape.constants.values())
    x, y = ids_of(rows, 2), ids_of(rows, 3)
    kept = [tensor.clone() for tensor in (x, y, outside, *constants)]
    random = torch.get_rng_state()
    try:
        recording.replay(x, y)
    except Exception:
        pass  # A guess may fail: `build` makes its lookups then.
    assert all(torch.equal(a, b) for a, b in zip((x, y, outside, *constants), kept, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_what_is_recorded_can_be_shown():
    """Of every function that is followed: as text, and as the code of a module."""
    for function in FOLLOWED.values():
        recording = Recording(lambda look_up, x, function=function: look_up(function(x)), ids_of(6))
        text = graph_text(recording.graph)
        module = torch.nn.Module()
        module.a = torch.nn.Identity()
        assert "a = a(ids=" in text and "forward" in fx.GraphModule(module, recording.graph).code
