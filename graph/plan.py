"""Compiles the lookups that a step of `build` was seen to make, as one ordered list of passes.

    recorded -> lower_embeddings -> [merge_embeddings] -> share_unique
             -> split_prepare       in two halves, of which the first may run while the step before computes

Invariant: whatever passes run, the rows are those of eager mode.
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
from oneemb.graph.passes.split_prepare import split_prepare
from oneemb.graph.recorder import Profile
from oneemb.graph.tape import Tape, version_of
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore

Merged = dict[tuple[EmbeddingStore, ...], MergedStore]
"""Merged stores by their members."""


class AfterPass(NamedTuple):
    """The graph after one pass."""

    name: str
    stage: str
    graph: fx.Graph


@dataclass(eq=False)
class Plan:
    """The lookups of a step, compiled.

    Args:
        whole: the lookups of a batch, from its values.
        prepare: the half that may run ahead, from the values too.
        lookup: the other half, from the results of the first one.
        history: the graph as recorded and after each pass.
        constants: the names of the tensors from outside the batch that the first half reads.
        others: lookups of a step that cannot be made ahead.
        find: the object that a name of the graph stands for.
    """

    whole: Executor
    prepare: Executor
    lookup: Executor
    history: list[AfterPass]
    constants: Sequence[str]
    others: int
    find: Find

    def run_ahead(self, values: Sequence[Any], announcement: ops.Announced, profile: Profile | None) -> list[Any]:
        """Run the first half for the values of a batch, and return its results.

        Args:
            announcement: of the batch, for the lookups of ranks.
        """
        prepared: list[Any] = self.prepare(self._inputs(values, announcement), profile)
        return prepared

    def _inputs(self, values: Sequence[Any], announcement: ops.Announced | None = None) -> Sequence[Any]:
        return [*values, announcement] if self.announces else values

    @functools.cached_property
    def announces(self) -> bool:
        """Whether lookups are announced to other ranks."""
        return any(node.target is ops.announce for node in self.prepare.graph.nodes)

    @property
    def recorded(self) -> fx.Graph:
        """The lookups as they were recorded."""
        return self.history[0].graph

    @functools.cached_property
    def only_embedding(self) -> str:
        """Name of the embedding that is looked up; "" where there are several lookups, or none.

        Such a lookup is planned for the loop that prepares it ahead; otherwise it is made in its line of `build`.
        """
        lookups = planned_in(self.whole.graph)
        return lookups[0].embedding if len(lookups) == 1 else ""

    def versions(self) -> list[tuple[int, int]]:
        """Equal readings mean that the tensors which the first half reads have not changed."""
        return [(id(tensor), version_of(tensor)) for tensor in map(self.find, self.constants)]

    def expect(self, values: Sequence[Any], prepared: Sequence[Any] | None, profile: Profile | None) -> list[Expected]:
        """The lookups that `build` is expected to make of a batch.

        Args:
            values: of the batch.
            prepared: results of the first half for them; None = it did not run.
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
        return [self.whole, self.prepare, self.lookup]

    def as_module(self, name: str) -> fx.GraphModule:
        """The lookups in one piece, to look at."""
        graph = copy_graph(self.whole.graph)
        graph.set_codegen(_CodeOfLookups())
        targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        return fx.GraphModule({target: self.find(target) for target in targets}, graph, name)


class _CodeOfLookups(fx.graph.CodeGen):
    """Code in which the records of lookups have their names."""

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [(kind.__name__, kind) for kind in (Lookup, ops.MergedLookup, ops.LookupOnRanks)]


def compile_plan(
    tape: Tape,
    root: torch.nn.Module,
    embeddings: Embeddings,
    trainers: Sequence[StepOptimizer],
    merged: Merged,
    *,
    inserts: bool,
) -> Plan:
    """Compile the lookups that a tape has recorded.

    Args:
        root: the graph.
        embeddings: of the graph when the tape was made: `build` may have exchanged them since.
        trainers: the optimizers that train them.
        merged: the merged stores made so far.
        inserts: whether lookups may insert rows and get a gradient.
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
    executors = Executor(graph, find), Executor(prepare, find, "prepare"), Executor(lookup, find)
    return Plan(*executors, history, list(tape.constants), tape.others, find)


def _members(
    embeddings: Embeddings, trainers: Sequence[StepOptimizer], merged: Merged
) -> tuple[dict[str, Member], dict[str, MergedStore]]:
    """Stores that can be merged, by the names that the graph has for them, and their merged stores.

    Those on the host whose rows are alike and are trained by one group of one optimizer, whether they are looked up or
    not: so every plan of these modules merges the same.
    """
    alike: dict[Hashable, list[str]] = {}
    for name, embedding in embeddings.items():
        store = embedding.store
        if not store.backend.merges or not embedding.training or not embedding.ranks.alone or store.engine is not None:
            continue
        trained: list[Hashable] = []
        for i, trainer in enumerate(trainers):
            if (rows := trainer.rows_of(store)) is not None:
                groups = {id(group) for group in rows[1]}  # where tables have groups of their own, they are not merged
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
    """Gives the merged stores, the stores of embeddings, and the constants of a tape: buffers are read by their names,
    since another tensor may be put in their place."""
    stores: dict[str, object] = {f"{name}.store": embedding.store for name, embedding in embeddings.items()}
    stores |= {f"{name}.ranks": embedding.ranks for name, embedding in embeddings.items()}
    named = {id(buffer): name for name, buffer in root.named_buffers()}
    buffers = {name: named[id(tensor)] for name, tensor in constants.items() if id(tensor) in named}
    fixed = {**stores, **objects, **{name: value for name, value in constants.items() if name not in buffers}}

    owner = weakref.ref(root)  # A graph holds its plans: it should be gone, with its paths, when it is dropped.

    def find(name: str) -> object:
        if name not in buffers:
            return fixed[name]
        graph = owner()
        assert graph is not None, "its plans are used by itself alone"
        return graph.get_buffer(buffers[name])

    return find
