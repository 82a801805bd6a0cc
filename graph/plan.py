"""Compiles the recorded lookups of a step by an ordered list of passes.

    recorded -> lower_embeddings -> [merge_embeddings] -> share_unique
             -> split_prepare       two halves; the first may run while the step before computes
             -> split_keys          of the first half: the keys, then the prefetch of their rows

Invariant: with any passes, lookups return the same rows as in eager mode.
"""

import functools
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from oneemb.graph import ops
from oneemb.graph.arguments import Lookup, Planned
from oneemb.graph.building import Expected
from oneemb.graph.executor import Executor, Find
from oneemb.graph.modules import Embeddings
from oneemb.graph.ops.op import check_stage
from oneemb.graph.ops.update import StepOptimizer
from oneemb.graph.passes import copy_graph, planned_in
from oneemb.graph.passes.lower_embeddings import lower_embeddings
from oneemb.graph.passes.merge_embeddings import Member, merge_embeddings
from oneemb.graph.passes.share_unique import share_unique
from oneemb.graph.passes.split_keys import split_keys
from oneemb.graph.passes.split_prepare import split_prepare
from oneemb.graph.recorder import Profile
from oneemb.graph.tape import Tape, version_of
from oneemb.storage.coming_batches import ComingBatches
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore

Merged = dict[tuple[EmbeddingStore, ...], MergedStore]
"""{members: merged store of them}."""


class AfterPass(NamedTuple):
    """The graph after one pass."""

    name: str
    stage: str
    graph: fx.Graph


@dataclass(eq=False)
class LookupPlan:
    """The compiled lookups of a step.

    Args:
        whole: runs all lookups of a batch; its inputs are the batch's values.
        prepare: the half that may run ahead; its inputs are the batch's values.
        keys, rows: run the two parts of `prepare`, one after the other.
        lookup: runs the other half; its inputs are the results of `rows`.
        history: the graph as recorded and after each pass.
        constants: names of the tensors from outside the batch that `prepare` reads.
        others: number of lookups of a step that cannot be made ahead.
        find: returns the object with a name in the graph.
    """

    whole: Executor
    prepare: fx.Graph
    keys: Executor
    rows: Executor
    lookup: Executor
    history: list[AfterPass]
    constants: Sequence[str]
    others: int
    find: Find

    def find_keys(
        self, values: Sequence[Any], announcement: ops.Announced | None, profile: Profile | None
    ) -> list[Any]:
        """Results of the first part of the first half, the keys, for the values of a batch.

        Args:
            announcement: the announcement of the batch, for lookups of rows that ranks share.
        """
        found: list[Any] = self.keys(self._inputs(values, announcement), profile)
        return found

    def prefetch(self, found: Sequence[Any], profile: Profile | None) -> list[Any]:
        """Results of the first half for the results of `find_keys`: known rows are read and pinned."""
        prepared: list[Any] = self.rows(found, profile)
        return prepared

    def add_coming(self, found: Sequence[Any]) -> list[tuple[ComingBatches, int]]:
        """Tell the stores the keys of a coming batch, results of `find_keys`. Returns the number of the batch in each
        store that uses the keys."""
        inputs = [node for node in self.rows.graph.nodes if node.op == "placeholder"]
        numbers: list[tuple[ComingBatches, int]] = []
        for node in self.rows.graph.nodes:
            if node.target is ops.prefetch:
                store, keys = node.args
                numbers += ops.add_coming(self.find(store.target), found[inputs.index(keys)])
        return numbers

    def _inputs(self, values: Sequence[Any], announcement: ops.Announced | None = None) -> Sequence[Any]:
        return [*values, announcement] if self.announces else values

    @functools.cached_property
    def announces(self) -> bool:
        """Whether lookups are announced to other ranks."""
        return any(node.target is ops.announce for node in self.prepare.nodes)

    @property
    def recorded(self) -> fx.Graph:
        """The lookups as they were recorded."""
        return self.history[0].graph

    @functools.cached_property
    def only_embedding(self) -> str:
        """Name of the embedding of the plan's single lookup; "" = the plan has several lookups, or none.

        Only loops that prepare batches ahead run such a plan. In other calls, the line of `build` makes the lookup.
        """
        lookups = planned_in(self.whole.graph)
        return lookups[0].embedding if len(lookups) == 1 else ""

    def versions(self) -> list[tuple[int, int]]:
        """(id, version) of each constant that the first half reads. While the result is equal, no constant has
        changed."""
        return [(id(tensor), version_of(tensor)) for tensor in map(self.find, self.constants)]

    def expect(self, values: Sequence[Any], prepared: Sequence[Any] | None, profile: Profile | None) -> list[Expected]:
        """The lookups that `build` is expected to make for a batch.

        Args:
            values: values of the batch.
            prepared: results of the first half for these values; None = it did not run.
        """
        if prepared is None:
            return self._expected(self.whole(self._inputs(values), profile))
        return self._expected(self.lookup(prepared, profile))

    def _expected(self, found: Iterable[Planned]) -> list[Expected]:
        expected = []
        for planned in found:
            store: EmbeddingStore = self.find(f"{planned.embedding}.store")
            expected.append(Expected(planned, store.changes, store.backend.waits))
        return expected

    def executors(self) -> list[Executor]:
        """Executors of the plan."""
        return [self.whole, self.keys, self.rows, self.lookup]

    def as_module(self, name: str) -> fx.GraphModule:
        """All lookups as one fx.GraphModule, for people to read."""
        graph = copy_graph(self.whole.graph)
        graph.set_codegen(_CodeOfLookups())
        targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        return fx.GraphModule({target: self.find(target) for target in targets}, graph, name)


class _CodeOfLookups(fx.graph.CodeGen):
    """Code generator that knows the classes of results and of lookups by name; torch 2.9 does not name them itself."""

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [(kind.__name__, kind) for kind in (Planned, Lookup, ops.MergedLookup, ops.LookupOnRanks)]


def compile_plan(
    tape: Tape,
    root: torch.nn.Module,
    embeddings: Embeddings,
    trainers: Sequence[StepOptimizer],
    merged: Merged,
    *,
    inserts: bool,
) -> LookupPlan:
    """Compile the lookups that a tape has recorded.

    Args:
        root: the graph module.
        embeddings: embeddings of the graph when the tape was made; `build` may have replaced them since.
        trainers: optimizers that train the embeddings.
        merged: merged stores made so far; new ones are added.
        inserts: whether lookups may insert rows and get gradients.
    """
    history: list[AfterPass] = []

    def keep(name: str, stage: str, graph: fx.Graph) -> fx.Graph:
        check_stage(graph, stage, embeddings)
        history.append(AfterPass(name, stage, graph))
        return graph

    graph = keep("record", "recorded", tape.graph())
    graph = keep("lower_embeddings", "lowered", lower_embeddings(graph, embeddings, inserts=inserts))
    members, objects = _members(embeddings, trainers, merged)
    if members:
        graph = keep("merge_embeddings", "lowered", merge_embeddings(graph, members))
    graph = keep("share_unique", "lowered", share_unique(graph))
    prepare, lookup = split_prepare(graph)
    keep("split_prepare, prepare", "prepare", prepare)
    keep("split_prepare, lookup", "lookup", lookup)
    find = _finder(root, embeddings, objects, tape.constants)
    keys, rows = (Executor(part, find, "prepare") for part in split_keys(prepare))
    whole, lookup_half = Executor(graph, find), Executor(lookup, find)
    return LookupPlan(whole, prepare, keys, rows, lookup_half, history, list(tape.constants), tape.others, find)


def _members(
    embeddings: Embeddings, trainers: Sequence[StepOptimizer], merged: Merged
) -> tuple[dict[str, Member], dict[str, MergedStore]]:
    """({name of a store in the graph: its place in a merged store}, {name: merged store}).

    Stores are merged if they are on the host, their rows have the same format, and one param group trains them. Stores
    without a lookup count too, so that all plans of these modules merge the same stores. These stores are not merged:

    - stores on a GPU: a loop takes one slab, and the slabs of several stores are several arrays there;
    - stores in eval mode: merging saves time where rows are pinned (`reserve`) and updated, and a lookup in eval mode
      reads its rows at once (`peek`), without pins and without an update;
    - stores of ranks: one exchange has all their lookups already (`announce`), rows are copies that the owners send, in
      new arrays in each step, and the gradients of each embedding go to the owners first;
    - stores with a policy: `MergedStore` pins the rows that it finds without a call of their stores, but a policy
      engine has to count each use, and may give one key several slots (temporary rows).
    """
    alike: dict[Hashable, list[str]] = {}
    for name, embedding in embeddings.items():
        store = embedding.store
        if not store.backend.merges or not embedding.training or not embedding.ranks.alone or store.engine is not None:
            continue
        trained: list[Hashable] = []
        for i, trainer in enumerate(trainers):
            if (rows := trainer.rows_of(store)) is not None:
                groups = {id(group) for group in rows[1]}  # A store whose tables have several groups is not merged.
                trained += [i, rows[0].name, groups.pop() if len(groups) == 1 else id(store)]
        kind = store.format, embedding.key_type, embedding.padding_idx, tuple(trained)
        alike.setdefault(kind, []).append(name)
    members: dict[str, Member] = {}
    objects: dict[str, MergedStore] = {}
    for names in alike.values():
        if len(names) < 2:
            continue
        group = [embeddings[name] for name in names]
        stores = tuple(embedding.store for embedding in group)
        if stores not in merged:
            tables, titles = [embedding.num_tables for embedding in group], [embedding.name for embedding in group]
            merged[stores] = MergedStore(stores, tables, titles)
        store_name = f"merged_{len(objects)}"
        objects[store_name] = merged[stores]
        for name, first_table in zip(names, objects[store_name].first_table_M1.tolist(), strict=False):
            members[f"{name}.store"] = Member(store_name, first_table)
    return members, objects


def _finder(
    root: torch.nn.Module, embeddings: Embeddings, objects: Mapping[str, object], constants: Mapping[str, torch.Tensor]
) -> Find:
    """Function that returns a store, the ranks of an embedding, a merged store or a constant of the tape by its name. A
    constant that is a buffer of `root` is read anew each time, since the user may replace the buffer."""
    stores: dict[str, object] = {f"{name}.store": embedding.store for name, embedding in embeddings.items()}
    stores |= {f"{name}.ranks": embedding.ranks for name, embedding in embeddings.items()}
    named = {id(buffer): name for name, buffer in root.named_buffers()}
    buffers = {name: named[id(tensor)] for name, tensor in constants.items() if id(tensor) in named}
    fixed = {**stores, **objects, **{name: value for name, value in constants.items() if name not in buffers}}

    owner = weakref.ref(root)  # weak, since a graph holds its plans: no cycle may keep a dropped graph alive

    def find(name: str) -> object:
        if name not in buffers:
            return fixed[name]
        graph = owner()
        assert graph is not None, "its plans are used by itself alone"
        return graph.get_buffer(buffers[name])

    return find
