"""Runs dense modules through torch.compile or as CUDA graphs, or unchanged if that fails.

Invariant: a module that cannot be compiled or captured gives one warning with the reason, and no step fails.

A replay copies its inputs into the buffers of the capture, and writes outputs and gradients into buffers of the
capture. So a module is captured only if a step calls it once and runs one backward pass: a second replay would
overwrite the results of the first. The rest of a step is not captured, since its shapes depend on the number of unique
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
"""Number of calls of a module with one kind of inputs before the module is captured for that kind."""

CAPTURES_MAX = 4
"""Largest number of kinds of inputs for which a module is captured; each capture has memory of its own."""

# Seconds to wait until no thread prepares a batch: no other thread may launch anything during a capture.
_PATIENCE_S = 10.0
_TRIES = 3

Call = Callable[..., Any]
"""A module, or a function in its place. Any: a user's module may return anything."""


class DenseCompiler:
    """Makes compiled or captured functions that run in place of modules.

    Args:
        compiles: whether modules go through torch.compile at their first call, for any batch size.
        captures: whether modules are captured as CUDA graphs if they can be.
    """

    def __init__(self, compiles: bool = True, captures: bool = False) -> None:
        self._compiles = compiles
        self._captures = captures
        self._compiled: dict[int, tuple[torch.nn.Module, Call]] = {}
        self._captured: dict[int, _Captured] = {}
        self._warned: set[str] = set()

    def refuse_second_pass(self) -> None:
        """Capture no module any more, since a step is about to run its second backward pass.

        Raises:
            BuildError: a module is captured already, and would lose the gradients of the first pass.
        """
        if any(captured.replays for captured in self._captured.values()):
            raise BuildError(
                f"build must run one backward pass if modules are replayed as CUDA graphs, which keep the gradients of"
                f" one pass; build runs several backward passes{user_line()}; set config.cuda_graph = False"
            )
        for captured in self._captured.values():
            captured.give_up("build runs several backward passes")

    @contextlib.contextmanager
    def in_place_of(self, root: torch.nn.Module, why_not_captured: str = "") -> Iterator[None]:
        """Block in which calls of dense modules run the functions that `of` returns.

        Args:
            root: module whose outermost submodules without an embedding are the dense modules.
            why_not_captured: reason against a capture; "" = modules may be captured.
        """
        modules = list(dense_modules(root))
        calls: dict[torch.nn.Module, int] = dict.fromkeys(modules, 0)

        def call_of(module: torch.nn.Module) -> Call:
            def run(*args: object, **kwargs: object) -> object:
                calls[module] += 1
                why = why_not_captured or ("build calls it more than once" if calls[module] > 1 else "")
                here = module._compiled_call_impl
                module._compiled_call_impl = None  # so that a call within runs the module itself
                try:
                    result = self.of(module, why)(*args, **kwargs)
                finally:
                    module._compiled_call_impl = here
                building = building_now()
                if building is not None and building.trace is not None:
                    building.trace.called(module, args, kwargs, result)
                return result

            return _InPlace(module, run)

        before = {module: module._compiled_call_impl for module in modules}
        if building_now() is None:  # perhaps an interrupt has left an `_InPlace` there
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
        """The function to call in place of the module.

        Args:
            why_not_captured: reason against a capture; "" = the module may be captured.
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
                # If the module itself raises, this call raises the same error.
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
    """Function that replaces a module while `build` runs. Outside of `build`, if an interrupt has left it in place, it
    calls the module."""

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
        """Result of `call`, the module or its compiled form, from a replay if there is a capture for such inputs."""
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
        # Copies: the next replay overwrites the buffers, but the caller may keep a step's result.
        return torch.utils._pytree.tree_map(_cloned, self._graphs[kind](*args))

    def _why_not(self, args: Sequence[Any], kwargs: dict[str, object]) -> str:
        if kwargs or not all(isinstance(arg, torch.Tensor) for arg in args):
            return "takes other arguments than tensors, in order"
        if not all(map(on_gpu, [*args, *self._module.parameters()])):
            return "is not on a GPU, or its inputs are not"
        return ""

    def _kind(self, args: tuple[torch.Tensor, ...]) -> Hashable:
        """Kind of the inputs: a capture may be replayed for inputs of an equal kind (shapes, addresses of parameters,
        autocast)."""
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
            if not may:  # a later call tries again
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
    def replays(self) -> bool:
        """Whether recorded CUDA graphs are replayed instead of running the module."""
        return bool(self._graphs) and not self._given_up

    def give_up(self, why: str) -> None:
        """Run the module without CUDA graphs from now on, and warn with the reason `why`."""
        if self._given_up:
            return
        self._given_up = True
        self._warn(f"{type(self._module).__name__} runs without one: {why}")


class _Call(torch.nn.Module):
    """Module that runs `call`, with `module` as submodule. torch changes `forward` of the captured module, so this one
    is captured and `module` stays unchanged."""

    def __init__(self, module: torch.nn.Module, call: Call):
        super().__init__()
        self.module = module
        self._call = (call,)  # in a tuple, so that the parameters of a module in `call` do not count twice

    def forward(self, *args: object) -> object:
        return self._call[0](*args)


def dense_modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules below `root` that hold no embedding; elements of ModuleLists and ModuleDicts, not the
    lists and dicts."""
    for module in root.children():
        if embeddings_in(module) or isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            if not is_embedding(module):
                yield from dense_modules(module)
        else:
            yield module


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device with CUDA graphs."""
    return tensor.is_cuda


def _cloned(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Block that restores buffers and random number generators at its end, since a capture runs the module a few
    times."""
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
    """Block in which captures have the mode "thread_local", so that other threads, such as an evaluation, may allocate.

    In torch's default mode, allocations of other threads fail. `make_graphed_callables` has no argument for the mode,
    so torch.cuda.graph is replaced for the block; one thread captures at a time.
    """
    before = torch.cuda.graph
    torch.cuda.graph = functools.partial(before, capture_error_mode="thread_local")  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.cuda.graph = before  # type: ignore[misc]


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Block without autocast's cache: weights that autocast has cast must not outlive the capture that cast them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
