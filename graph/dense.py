"""Runs dense modules through torch.compile or as CUDA graphs; where that fails, as they are.

Invariant: a module that cannot be compiled or captured costs one warning, which gives the reason, and no step.

A replay copies its inputs into the buffers of the capture, and writes its outputs and gradients where those of the
capture are. So a module is captured only if a step calls it once and runs one backward pass: a second replay would
overwrite what the first one gave. The rest of a step is not captured, since its shapes follow the number of unique
keys.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from oneemb.graph.build_error import BuildError, user_line
from oneemb.graph.building import building_now
from oneemb.graph.modules import embeddings_in, is_embedding
from oneemb.graph.streams import capture_gate
from oneemb.storage.locking.signals_deferred import signals_deferred

WARM_STEPS = 3
"""Calls of a module with inputs of one kind before they are captured."""

CAPTURES_MAX = 4
"""Kinds of inputs that are captured for a module; each holds memory of its own."""

# Seconds to wait until no thread is preparing a batch: none may launch anything during a capture.
_PATIENCE_S = 10.0
_TRIES = 3

Call = Callable[..., Any]
"""A module, or a call in its place. Any: a user's module may give anything."""


class DenseCompiler:
    """Makes compiled calls that run in the place of modules.

    Args:
        compiles: each goes through torch.compile at its first call, for any batch size.
        captures: modules that allow it are captured as CUDA graphs.
    """

    def __init__(self, compiles: bool = True, captures: bool = False) -> None:
        self._compiles = compiles
        self._captures = captures
        self._compiled: dict[int, tuple[torch.nn.Module, Call]] = {}
        self._captured: dict[int, _Captured] = {}
        self._warned: set[str] = set()

    def refuse_second_pass(self) -> None:
        """A step is about to run its second backward pass: capture nothing.

        Raises:
            BuildError: a module has been captured, and would lose the gradients of the first pass.
        """
        if any(captured.is_used for captured in self._captured.values()):
            raise BuildError(
                f"build runs several backward passes{user_line()}, and a module that is replayed as a CUDA graph keeps"
                " the gradients of one; set config.cuda_graph = False"
            )
        for captured in self._captured.values():
            captured.give_up("build runs several backward passes")

    @contextlib.contextmanager
    def in_place_of(self, root: torch.nn.Module, why_not_captured: str = "") -> Iterator[None]:
        """Block in which calls of dense modules run the results of `of`.

        Args:
            root: the module whose outermost submodules without an embedding are meant.
            why_not_captured: reason against a capture; empty = there is none.
        """
        modules = list(_dense_modules(root))
        calls: dict[torch.nn.Module, int] = dict.fromkeys(modules, 0)

        def call_of(module: torch.nn.Module) -> Call:
            def run(*args: object, **kwargs: object) -> object:
                calls[module] += 1
                why = why_not_captured or ("build calls it more than once" if calls[module] > 1 else "")
                here = module._compiled_call_impl
                module._compiled_call_impl = None  # inside, the module itself is called
                try:
                    return self.of(module, why)(*args, **kwargs)
                finally:
                    module._compiled_call_impl = here

            return _InPlace(module, run)

        before = {module: module._compiled_call_impl for module in modules}
        if building_now() is None:  # an interrupt has left an `_InPlace` there
            before = {module: None if isinstance(call, _InPlace) else call for module, call in before.items()}
        try:
            for module in modules:
                if before[module] is None:  # not compiled by the user
                    module._compiled_call_impl = call_of(module)  # as Module.compile does
            yield
        finally:
            with signals_deferred:
                for module, call in before.items():
                    module._compiled_call_impl = call

    def of(self, module: torch.nn.Module, why_not_captured: str = "") -> Call:
        """The function to call in the module's place.

        Args:
            why_not_captured: reason against a capture; empty = there is none.
        """
        if self._compiles and id(module) not in self._compiled:
            self._compiled[id(module)] = module, self._first_call(module)
        call = self._compiled[id(module)][1] if self._compiles else module
        if not self._captures:
            return call
        if id(module) not in self._captured:
            self._captured[id(module)] = _Captured(module, lambda why: self._warn("cuda_graph", why))
        captured = self._captured[id(module)]
        if why_not_captured:
            captured.give_up(why_not_captured)
            return call
        return lambda *args, **kwargs: captured.run(call, args, kwargs)

    def _first_call(self, module: torch.nn.Module) -> Call:
        compiled: Call = torch.compile(module, dynamic=True)

        def call(*args: object, **kwargs: object) -> object:
            try:
                result = compiled(*args, **kwargs)
            except Exception as error:
                # An error of the module itself is raised here again, as the module raises it.
                result = module(*args, **kwargs)
                why = (str(error).strip().splitlines() or [""])[0]
                name = type(module).__name__
                self._warn(
                    "compile_dense",
                    f"torch.compile cannot compile {name}, which runs as it is: {type(error).__name__}: {why}",
                )
                self._compiled[id(module)] = module, module
                return result
            self._compiled[id(module)] = module, compiled
            return result

        return call

    def _warn(self, option: str, why: str) -> None:
        if option not in self._warned:
            warnings.warn(f"config.{option}: {why}", stacklevel=3)
        self._warned.add(option)


class _InPlace:
    """Call in the place of a module while `build` runs. If an interrupt has left it there, it calls the module."""

    def __init__(self, module: torch.nn.Module, run: Call):
        self._module, self._run = module, run

    def __call__(self, *args: object, **kwargs: object) -> object:
        module = self._module
        return (module._call_impl if building_now() is None else self._run)(*args, **kwargs)


class _Captured:
    """A module's CUDA graphs, one for each kind of inputs."""

    def __init__(self, module: torch.nn.Module, warn: Callable[[str], None]):
        self._module = module
        self._warn = warn
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Call] = {}
        self._given_up = False
        self._tries = 0

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        """Result of `call`, which is the module or its compiled form."""
        if self._given_up or not (self._module.training and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        if why := self._why_not(args, kwargs):
            self.give_up(why)
            return call(*args, **kwargs)
        kind = self._kind(args)
        if kind not in self._graphs:
            self._calls[kind] = self._calls.get(kind, 0) + 1
            if self._calls[kind] <= WARM_STEPS or not self._capture(kind, call, args):
                return call(*args, **kwargs)
        # The next replay writes the buffers again; the result of a step is the caller's.
        return torch.utils._pytree.tree_map(_cloned, self._graphs[kind](*args))

    def _why_not(self, args: Sequence[Any], kwargs: dict[str, object]) -> str:
        if kwargs or not all(isinstance(arg, torch.Tensor) for arg in args):
            return "takes other arguments than tensors, in order"
        if not all(map(on_gpu, [*args, *self._module.parameters()])):
            return "is not on a GPU, or its inputs are not"
        return ""

    def _kind(self, args: tuple[torch.Tensor, ...]) -> Hashable:
        """Equal where a captured graph may be replayed: shapes, and where parameters lie."""
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        inputs = tuple((arg.shape, arg.dtype, arg.device, arg.requires_grad) for arg in args)
        return autocast, inputs, tuple((p.data_ptr(), p.requires_grad) for p in self._module.parameters())

    def _capture(self, kind: Hashable, call: Call, args: tuple[torch.Tensor, ...]) -> bool:
        if len(self._graphs) == CAPTURES_MAX:
            self._warn(
                f"{type(self._module).__name__} is called with inputs of more than {CAPTURES_MAX} shapes; those beyond"
                " run without one. Give batches one size (drop_last=True)"
            )
            return False
        samples = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
        with capture_gate.capturing(_PATIENCE_S) as may:
            if not may:  # perhaps at a later call
                self._tries += 1
                if self._tries == _TRIES:
                    self.give_up("batches were being prepared whenever it was to be captured")
                return False
            try:
                with _unchanged(self._module), _without_autocast_cache(), _allocations_of_others_allowed():
                    self._graphs[kind] = torch.cuda.make_graphed_callables(_Call(self._module, call), samples)
            except Exception as error:
                self.give_up(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
                return False
        return True

    @property
    def is_used(self) -> bool:
        """Whether a graph is replayed."""
        return bool(self._graphs) and not self._given_up

    def give_up(self, why: str) -> None:
        """Run the module as it is from now on."""
        if self._given_up:
            return
        self._given_up = True
        self._warn(f"{type(self._module).__name__} runs without one: {why}")


class _Call(torch.nn.Module):
    """A module called through something else; a graph of it leaves the module as it was."""

    def __init__(self, module: torch.nn.Module, call: Call):
        super().__init__()
        self.module = module
        self._call = (call,)  # in a tuple, since a module may be in `call` too and its parameters count once

    def forward(self, *args: object) -> object:
        return self._call[0](*args)


def _dense_modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules below a module that hold no embedding; of lists and dicts, their elements."""
    for module in root.children():
        if embeddings_in(module) or isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            if not is_embedding(module):
                yield from _dense_modules(module)
        else:
            yield module


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is where graphs can be captured."""
    return tensor.is_cuda


def _cloned(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Buffers and random numbers are afterwards as they were: capturing runs the module a few times."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


@contextlib.contextmanager
def _allocations_of_others_allowed() -> Iterator[None]:
    """Capture in mode "thread_local", so that other threads, such as one that evaluates, may allocate meanwhile.

    In torch's default mode their allocations fail. `make_graphed_callables` has no argument for the mode, so
    torch.cuda.graph is replaced for a time; one thread captures at a time.
    """
    before = torch.cuda.graph
    torch.cuda.graph = functools.partial(before, capture_error_mode="thread_local")  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.cuda.graph = before  # type: ignore[misc]


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Weights that autocast has narrowed must not outlive the capture they were narrowed in."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
