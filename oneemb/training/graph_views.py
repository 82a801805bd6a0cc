"""Views of a graph: compiled lookups, table of times, picture and profile."""

from types import EllipsisType
from typing import TYPE_CHECKING

import torch
from torch import fx

from oneemb.embeddings.embedding import embeddings_of
from oneemb.embeddings.summary import rows_line
from oneemb.graph.executor import Executor
from oneemb.graph.ranks import Ranks
from oneemb.graph.recorder import Profile, StepStats, parts_of, parts_table, stats_table
from oneemb.graph.shown import ShownText, aligned, html_of_text
from oneemb.graph.text import graph_text
from oneemb.storage.errors import StorageError
from oneemb.storage.fs import AnyPath, file_path
from oneemb.training.plan_cache import GIVEN_UP, PlanCache

if TYPE_CHECKING:
    from oneemb.graph.picture import Picture


class GraphViews(torch.nn.Module):
    """Part of a graph: the methods that show its lookups and times."""

    _plans: PlanCache
    _stats: StepStats
    _profile: Profile | None = None
    _connected: list[Ranks]
    """Ranks with connections of their own, for the threads of loops."""

    def compiled(self) -> fx.GraphModule:
        """The compiled lookups of the last call, which are made ahead of `build`; `.code` and `.graph` show them.

        The first call whose inputs have a new nesting records how the ids of the lookups follow from the batch. The
        recorded lookups are compiled, and made ahead of `build` in later calls. They are recorded anew if modules are
        replaced, frozen, unfrozen or switched between training and eval mode, if rows move to another device or their
        state gets another width, for inputs of another nesting, and if `build` has looked up other ids.

        Raises:
            RuntimeError: nothing is compiled yet, or `build` has looked up other ids too often.
        """
        return self._plans.plan_of_last_call.as_module(type(self).__name__)

    def _repr_html_(self) -> str:
        text = html_of_text(str(self))
        try:
            return f'<div style="max-width:60em">{self.draw().svg}</div>{text}'
        except (ImportError, RuntimeError):  # Without matplotlib, or before the first call, there is only text.
            return text

    def __str__(self) -> str:
        """Text of the compiled lookups: the half that can run ahead of a step, and the half that runs in the step,
        before `build`."""
        if why := self._plans.why_not_compiled():
            return f"{self!r}\n{why}"
        plan = self._plans.plan_of_last_call
        recorded, lowered = _count_ops(plan.recorded), _count_ops(plan.whole.graph)
        return "\n".join(
            [
                f"{type(self).__name__}: {recorded} op{'s' * (recorded != 1)} recorded, {lowered} compiled",
                _indented("prepare", plan.prepare),
                _indented("lookup", plan.lookup.graph),
                f"build: Python; {plan.others} lookups of ids that are not known before",
            ]
        )

    def explain(self) -> str:
        """Text of tables of times since the graph was made: of the parts of a step, and with one line for each op.

        The parts are "lookup", "dense" (`build` with its backward pass and the lookups that it makes itself, and the
        step of dense parameters), "update" (of rows) and "wait" (of a loop of `run` for its thread, which loads and
        prepares batches).

        The prepare half runs on another thread, at the same time as the compute half, so it costs time only if it takes
        longer. Bytes and GB/s count the rows and gradients that an op must move. For `build` only the time is known; it
        includes the lookups that `build` makes itself.

        The table has the plans of the 16 structures of inputs that were used last, each since its last compilation; a
        line below the table counts plans that were dropped. Another line counts structures for which no lookup is made
        ahead any more, since `build` has looked up other ids than expected too often. With ranks, the last lines count
        this rank's exchanges.
        """
        every = list(self._plans.known.values())
        executors = self._executors()
        parts = parts_table(self._parts(), self._stats.steps)
        text = stats_table(
            [*((executor.half, executor.stats()) for executor in executors), ("compute", self._stats.stats())]
        )
        if self._plans.dropped:
            text += f"\nwithout what {self._plans.dropped} plans have done, which gave way to others"
        if given_up := sum(known.given_up for known in every):
            text += f"\nfor {given_up} of {len(every)} structures of inputs nothing is made ahead: {GIVEN_UP}"
        caches = [("embedding", "step", "hit rate", "rows in cache", "evicted", "written down")]
        errors = []
        for name, embedding in embeddings_of(self).items():
            try:
                stats = embedding.stats()
            except StorageError as error:
                errors.append(f"{name}: {error}")
                continue
            hot = stats.get("device")
            rows, evicted, written_down = (hot["rows"], hot["evicted"], hot["written_down"]) if hot else (0, 0, 0)
            counts = f"{rows:,}", f"{evicted:,}", f"{written_down:,}"
            caches.append((name, f"{stats['step']:,}", f"{stats['hit_rate']:.1%}", *counts))
        return ShownText("\n\n".join([parts, text, "\n".join([aligned(caches), *errors]), *self._explain_ranks()]))

    def _executors(self) -> list[Executor]:
        plans = [known.plan for known in list(self._plans.known.values()) if known.plan is not None]
        return [executor for plan in plans for executor in plan.executors()]

    def _parts(self) -> dict[str, int]:
        """{part of the steps: nanoseconds}."""
        in_steps = [executor for executor in self._executors() if executor.half == "compute"]
        return parts_of(self._stats, [op for executor in in_steps for _, op in executor.stats()])

    def _explain_ranks(self) -> list[str]:
        """[text of a table of this rank's traffic]; [] without ranks."""
        own = [one.ranks for one in embeddings_of(self).values() if not one.ranks.alone]
        if not own:
            return []
        ahead = self._connected
        lines = [(f"rank {own[0].rank} of {own[0].size}", "messages", "MB sent to others", "seconds in exchanges")]
        for where, ranks in (("in steps", own), ("ahead of them", ahead)):
            traffic = [one.traffic for one in ranks]
            messages, sent = sum(one.messages for one in traffic), sum(one.sent_bytes for one in traffic)
            lines.append((where, f"{messages:,}", f"{sent / 1e6:,.1f}", f"{sum(one.seconds for one in traffic):,.2f}"))
        return [aligned(lines)]

    def draw(self, path: AnyPath | EllipsisType = ..., *, passes: bool = False) -> "Picture":
        """Picture of the model: inputs, tables, pooling, other ops, modules and the loss, each with the shape of its
        result in the call that was recorded, and the share of time of each part of the steps, as `explain` has it.

        The picture has the lookups, and what the losses need of `build`; without a loss, what its result needs. Views
        are left out, ops that run one after another are one box, and so are equal boxes. Code that torch does not see,
        such as a compiled function, is the box "other code".

        Args:
            path: file to write; its suffix chooses the format: svg, png or pdf. Left out = no file is written.
            passes: draw the graphs of lookups instead, side by side: as recorded, and after each pass.

        Returns:
            The picture, which notebooks show; `save(path)` writes it, and `svg` is its text.

        Raises:
            TypeError, ValueError: `path` is no path, or its suffix names no format.
            FileNotFoundError: the folder of `path` does not exist.
            ImportError: matplotlib is not installed; the extra `draw` installs it.
            RuntimeError: the graph was not called yet; with `passes`, nothing is compiled, as for `compiled`.
        """
        from oneemb.graph.picture import model_picture, passes_picture

        if not isinstance(passes, bool):
            raise TypeError(f"passes must be True or False, got {passes!r}")
        if path is not ...:
            path = file_path(path, "the picture to write")
        if passes:
            picture = passes_picture(self._plans.plan_of_last_call.history)
        else:
            tables = {name: rows_line(embedding) for name, embedding in embeddings_of(self).items()}
            picture = model_picture(self._plans.boxes_of_last_call, tables, self._parts())
        if path is not ...:
            picture.save(path)
        return picture

    def profile(self, steps: int) -> Profile:
        """Profile that records when each op of the next `steps` steps begins and ends. `print` shows a table, `.save`
        writes a Chrome trace.

        Example: `profile = graph.profile(20)`, run 20 steps, `print(profile)`, `profile.save("trace.json")`.

        Raises:
            ValueError: steps is not an int of at least 1.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an int of at least 1, got {steps!r}")
        self._profile = Profile(steps)
        return self._profile

    def _active_profile(self) -> Profile | None:
        return self._profile if self._profile is not None and not self._profile.done else None


def _count_ops(graph: fx.Graph) -> int:
    return sum(node.op not in ("placeholder", "get_attr", "output") for node in graph.nodes)


def _indented(title: str, graph: fx.Graph) -> str:
    return f"{title}:\n" + "\n".join(f"    {line}" for line in graph_text(graph).splitlines())
