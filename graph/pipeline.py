"""The whole compilation, as one ordered list of passes, with a check of the graph after each.

    traced -> [scale_losses] -> lower_embeddings -> [merge_embeddings] -> share_unique -> [place_shuffles]
           -> remove_dead -> insert_updates or hold_lookups
           -> fuse_lookup                  a step in one piece, for a call
           -> split_prepare                the same step in two halves, for a loop that prepares batches ahead

Summing gradients and updating rows need no pass to become one: `reduce_grads` gives segments, which `update` sums row
by row on their way into the optimizer; only clipping asks for the sums.

Invariant: whatever passes run, in one piece or in two, the numbers are those of eager mode.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from oneemb.graph.build_error import BuildError
from oneemb.graph.dense import DenseCompiler
from oneemb.graph.executor import Executor, Find
from oneemb.graph.inputs import Structure
from oneemb.graph.modules import Embeddings, embeddings_in
from oneemb.graph.ops.accumulate import Held
from oneemb.graph.ops.update import Scheduler, StepOptimizer
from oneemb.graph.passes.drop_training import drop_training
from oneemb.graph.passes.fuse_lookup import fuse_lookup
from oneemb.graph.passes.hold_lookups import hold_lookups
from oneemb.graph.passes.insert_updates import insert_updates
from oneemb.graph.passes.lower_embeddings import lower_embeddings
from oneemb.graph.passes.merge_embeddings import Member, merge_embeddings
from oneemb.graph.passes.place_shuffles import place_shuffles
from oneemb.graph.passes.remove_dead import remove_dead
from oneemb.graph.passes.scale_losses import scale_losses
from oneemb.graph.passes.share_unique import share_unique
from oneemb.graph.passes.split_prepare import split_prepare
from oneemb.graph.spec import check_stage, is_backward
from oneemb.graph.text import graph_text
from oneemb.graph.tracer import trace
from oneemb.storage.embedding_store import EmbeddingStore
from oneemb.storage.merged_store import MergedStore

__all__ = ["AfterPass", "Plan", "Recipe", "compile_plan"]

Pass = Callable[[fx.Graph], fx.Graph]

_CLIPS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)


@dataclass(frozen=True)
class Recipe:
    """What a compilation depends on beside `build` itself.

    Args:
        optimizers: each with its scheduler of the learning rate, or None, in the order in which they step.
        max_norms: for each optimizer, what the norm of its gradients is clipped to; None = it does not clip.
        scaler: a torch.amp.GradScaler that scales every loss; None = `build` does, or nothing does.
        trains: whether there is an update; otherwise nothing is inserted and no gradient is made.
        held: where lookups of micro-batches are kept; None = every call updates.
        dense: what runs dense modules; None = they run as they are.
        updates: whether this call ends with the update of all micro-batches since the last one.
        merged: the merged stores made so far, by their members. Plans of one graph share them, since lookups that are
            accumulated cross plans.
        ranks: ranks that share the rows, each with its own store; embeddings are then not merged.
    """

    optimizers: Sequence[tuple[StepOptimizer, Scheduler | None]] = ()
    max_norms: Sequence[float | None] = ()
    scaler: torch.amp.GradScaler | None = None
    trains: bool = True
    held: Held | None = None
    dense: DenseCompiler | None = None
    updates: bool = True
    merged: dict[tuple[EmbeddingStore, ...], MergedStore] = field(default_factory=dict)
    ranks: int = 1


@dataclass(frozen=True)
class AfterPass:
    """The graph after one pass."""

    name: str
    stage: str
    graph: fx.Graph


@dataclass
class Plan:
    """A compiled step: in one piece and, if some of it can run ahead, in two halves."""

    whole: Executor
    prepare: Executor | None
    compute: Executor | None
    make_module: Callable[[], fx.GraphModule]
    history: list[AfterPass] = field(default_factory=list)
    """The graph as traced and after each pass."""
    buffers: list[str] = field(default_factory=list)
    """Tensors of the module that the first half reads."""
    find: Find | None = None
    """The object that a name of the graph stands for."""
    prepared: str = ""
    """What the first half makes, as text. Plans with equal first halves share what they have prepared."""

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """The step in one piece, to look at. Made when it is asked for: torch.fx keeps its code for ever."""
        return self.make_module()

    def buffer_versions(self) -> list[tuple[int, int]]:
        """Equal readings mean that the tensors which the first half reads have not changed."""
        assert self.find is not None
        return [(id(tensor), tensor._version) for tensor in map(self.find, self.buffers)]

    def executors(self) -> list[Executor]:
        """Those there are."""
        return [executor for executor in (self.whole, self.prepare, self.compute) if executor is not None]


def compile_plan(root: torch.nn.Module, recipe: Recipe, structure: Structure | None = None) -> Plan:
    """Compile `root.build`, called with values in this structure.

    Raises:
        BuildError: `build` cannot be traced, never calls backward, or trains an embedding that has no optimizer.
    """
    embeddings = embeddings_in(root)
    steppers: list[object] = []
    for optimizer, scheduler in recipe.optimizers:
        steppers += [optimizer, optimizer.optimizer, *([] if scheduler is None else [scheduler])]
    traced = trace(root, structure, steppers)
    objects: dict[str, object] = dict(traced.objects)
    for i, (optimizer, scheduler) in enumerate(recipe.optimizers):
        objects |= {f"optimizer_{i}": optimizer, f"lr_scheduler_{i}": scheduler}
    objects |= {"held": recipe.held, "grad_scaler": recipe.scaler}
    members: dict[str, Member] = {}
    if recipe.trains:
        _check_trains(traced.graph, embeddings, recipe)
        members, merged = _members(traced.graph, embeddings, recipe)
        objects |= merged
    find = _finder(root, objects)

    history: list[AfterPass] = []

    def keep(name: str, stage: str, graph: fx.Graph) -> fx.Graph:
        check_stage(graph, stage, embeddings)
        history.append(AfterPass(name, stage, graph))
        return graph

    graph = keep("trace", "traced", traced.graph)
    for name, stage, apply in _passes(root, embeddings, recipe, members):
        graph = keep(name, stage, apply(graph))
    buffers = {name for name, _ in root.named_buffers(remove_duplicate=False)}
    split = split_prepare(graph, buffers)
    halves = [keep(f"split_prepare, {half[0]}", *half) for half in zip(("prepare", "compute"), split, strict=True)]
    whole = keep("fuse_lookup", "trained", fuse_lookup(graph)) if recipe.trains else graph
    ahead = any(node.op not in ("placeholder", "output") for node in halves[0].nodes)
    run = _running(find, recipe, graph)
    prepare, compute = (Executor(half, run, name) for half, name in zip(halves, ("prepare", "compute"), strict=True))
    return Plan(
        Executor(whole, run),
        prepare if ahead else None,
        compute if ahead else None,
        lambda: _as_module(whole, find, type(root).__name__),
        history,
        [str(node.target) for node in halves[0].nodes if node.op == "get_attr" and node.target in buffers],
        find,
        graph_text(halves[0]),
    )


class _Step(NamedTuple):
    """A pass, and the stage of the graph after it."""

    name: str
    stage: str
    apply: Pass


def _passes(
    root: torch.nn.Module, embeddings: Embeddings, recipe: Recipe, members: Mapping[str, Member]
) -> list[_Step]:
    """In the order in which they run."""
    names = [
        (f"optimizer_{i}", None if scheduler is None else f"lr_scheduler_{i}")
        for i, (_, scheduler) in enumerate(recipe.optimizers)
    ]
    buffers = {name for name, _ in root.named_buffers(remove_duplicate=False)}
    held = None if recipe.held is None else "held"

    def lower(graph: fx.Graph) -> fx.Graph:
        return lower_embeddings(graph, embeddings, inserts=recipe.trains)

    def merge(graph: fx.Graph) -> fx.Graph:
        return merge_embeddings(graph, members, buffers=buffers, every=held is not None)

    def update(graph: fx.Graph) -> fx.Graph:
        trains = {
            f"{name}.store": f"optimizer_{i}"
            for name, embedding in embeddings.items()
            for i, (optimizer, _) in enumerate(recipe.optimizers)
            if optimizer.rows_of(embedding.store)
        }
        trains |= {member.merged: trains[store] for store, member in members.items() if store in trains}
        norms = {name: norm for (name, _), norm in zip(names, recipe.max_norms, strict=False) if norm is not None}
        merged = {store: member.merged for store, member in members.items()}
        return insert_updates(graph, names, trains=trains, max_norms=norms, held=held, merged=merged)

    passes = []
    if recipe.trains and recipe.scaler is not None:
        passes.append(_Step("scale_losses", "traced", lambda graph: scale_losses(graph, "grad_scaler")))
    passes.append(_Step("lower_embeddings", "lowered", lower))
    if members:
        passes.append(_Step("merge_embeddings", "lowered", merge))
    passes.append(_Step("share_unique", "lowered", share_unique))
    if recipe.ranks > 1:
        passes.append(_Step("place_shuffles", "lowered", lambda graph: place_shuffles(graph, recipe.ranks)))
    if not recipe.trains:
        passes.append(_Step("drop_training", "compute", drop_training))
        passes.append(_Step("remove_dead", "compute", remove_dead))
    else:
        passes.append(_Step("remove_dead", "lowered", remove_dead))
        if recipe.updates:
            passes.append(_Step("insert_updates", "trained", update))
        else:
            passes.append(_Step("hold_lookups", "trained", lambda graph: hold_lookups(graph, "held")))
    return passes


def _members(
    graph: fx.Graph, embeddings: Embeddings, recipe: Recipe
) -> tuple[dict[str, Member], dict[str, MergedStore]]:
    """Which stores can be merged, by the names that the graph has for them, and what they are merged in.

    Those on the host whose rows are alike and are trained by one group of one optimizer, whether they are looked up or
    not: so every graph of these modules merges the same.
    """
    clips = [set(node.all_input_nodes) for node in graph.nodes if node.op == "call_function" and node.target in _CLIPS]
    clipped = [{str(node.target) for node in nodes} for nodes in clips]
    alike: dict[Hashable, list[str]] = {}
    for name, embedding in embeddings.items():
        store = embedding.store
        if not store.loops.merges or recipe.ranks > 1:
            continue
        trained: list[Hashable] = []
        for i, (optimizer, _) in enumerate(recipe.optimizers):
            if (rows := optimizer.rows_of(store)) is not None:
                trained += [i, rows[0].name, id(rows[1])]
        clipped_by = tuple(f"{name}.weight" in names for names in clipped)
        kind = store.format, embedding.key_type, embedding.padding_idx, tuple(trained), clipped_by
        alike.setdefault(kind, []).append(name)
    members: dict[str, Member] = {}
    merged: dict[str, MergedStore] = {}
    for names in alike.values():
        if len(names) < 2:
            continue
        group = [embeddings[name] for name in names]
        stores = tuple(embedding.store for embedding in group)
        if stores not in recipe.merged:
            tables, titles = [embedding.num_tables for embedding in group], [embedding.name for embedding in group]
            recipe.merged[stores] = MergedStore(stores, tables, titles)
        store_name = f"merged_{len(merged)}"
        merged[store_name] = recipe.merged[stores]
        for name, first_table in zip(names, merged[store_name].first_table_M1.tolist(), strict=False):
            members[f"{name}.store"] = Member(store_name, first_table)
    return members, merged


def _running(find: Find, recipe: Recipe, graph: fx.Graph) -> Find:
    """`find`, with compiled modules in the place of dense ones."""
    dense = recipe.dense
    if dense is None:
        return find
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    why = ""
    if recipe.held is not None:
        why = "gradients are accumulated over several calls"
    elif sum(map(is_backward, graph.nodes)) > 1:
        why = "build runs several backward passes"

    def find_compiled(name: str) -> object:
        found = find(name)
        if not isinstance(found, torch.nn.Module):
            return found
        return dense.of(found, why or ("build calls it more than once" if called.count(name) > 1 else ""))

    return find_compiled


def _finder(root: torch.nn.Module, objects: Mapping[str, object]) -> Find:
    def find(name: str) -> object:
        if name in objects:
            return objects[name]
        found: object = root
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return find


def _as_module(graph: fx.Graph, find: Find, name: str) -> fx.GraphModule:
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    return fx.GraphModule({target: find(target) for target in targets}, graph, name)


def _check_trains(graph: fx.Graph, embeddings: Embeddings, recipe: Recipe) -> None:
    backward = [node for node in graph.nodes if is_backward(node)]
    if recipe.optimizers and not backward:
        raise BuildError("build must call loss.backward(), since the graph has an optimizer; add it, or call eval()")
    clipped = ""
    for node in graph.nodes:
        if node in backward and clipped:
            raise BuildError(
                f"build calls backward{node.meta.get('line', '')} after it has clipped{clipped}; gradients that come"
                " then would not be clipped, and those of rows not used: call backward on every loss first, then clip"
            )
        if node.op == "call_function" and node.target in _CLIPS:
            clipped = node.meta.get("line", "") or " before"
            if not recipe.updates or recipe.held is not None:
                raise BuildError(
                    f"build clips{clipped}, while gradients are accumulated over several calls; clip their sum with"
                    " add_optimizer(..., clip_grad_norm=)"
                )
        module = embeddings.get(str(node.target)) if node.op == "call_module" else None
        if module is None or not backward or not module.training or not module.weight.requires_grad:
            continue
        if not any(optimizer.rows_of(module.store) for optimizer, _ in recipe.optimizers):
            raise BuildError(
                f"embedding {module.name!r} is looked up in build and no optimizer of the graph trains it; give its"
                " parameters to add_optimizer, or freeze it with requires_grad_(False)"
            )
