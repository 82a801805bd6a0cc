"""Arguments of CUDA loops: their types, and how they lie in the buffer of a launch.

A **signature** says the type of each argument: "int64[2]" is an array with that many dimensions, in C order; "float32"
a number; ("float32", "bool") a tuple. Loops are compiled and kept for a signature.

In the buffer an array is a record of 64-bit words, as numba lays it out: two unused ones, the number of elements, bytes
of an element, the address, the shape, the strides in bytes. Numbers have their natural alignment, a bool is one byte,
and a tuple is its members one after the other, arrays or numbers too.

Most of a launch's time goes into reading tensors. So the words of a tensor that lives long are read once, by
`with_words`, and lie on the tensor. And a launch that repeats an earlier one with other tensors of the same shapes
writes only their addresses, and the numbers, into the buffer of the earlier one (`refiller_of`); addresses of tensors
with words, only if one of the words is another.
"""

import functools
import struct
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

Signature = tuple[Any, ...]

_FORMS = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float32": "f", "float64": "d", "bool": "?",
}  # fmt: skip
_UNUSED = "16x"

_PYTHON = {bool: "bool", int: "int64", float: "float32"}
"""Types of Python's numbers. A float64 argument is a NumPy number."""
_DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.int16, torch.uint16, torch.bool)
}


def signature_of(args: Sequence[Any]) -> Signature:
    """Types of arguments.

    Raises:
        TypeError: an argument is no tensor in C order, no number and no tuple of these.
    """
    return tuple(map(_kind_of, args))


def _kind_of(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        if arg.dtype not in _DTYPES or not arg.is_contiguous():
            raise TypeError(f"a loop takes no tensor of {arg.dtype} with shape {arg.shape} and strides {arg.stride()}")
        return f"{_DTYPES[arg.dtype]}[{arg.dim()}]"
    if isinstance(arg, tuple):
        return signature_of(arg)
    kind = _PYTHON.get(type(arg)) or (arg.dtype.name if isinstance(arg, np.generic) else None)
    if kind not in _FORMS:
        raise TypeError(f"a loop takes no {type(arg).__name__}")
    return kind


def dimensions(kind: str) -> tuple[str, int | None]:
    """Type of elements and number of dimensions of an array; type and None of a number."""
    dtype, bracket, ndim = kind.removesuffix("]").partition("[")
    return (dtype, int(ndim)) if bracket else (dtype, None)


def leaves(some: Sequence[Any]) -> Iterator[Any]:
    """Arguments, or types of a signature, with the members of tuples one by one."""
    for one in some:
        if isinstance(one, tuple):
            yield from leaves(one)
        else:
            yield one


def layout_of(signature: Signature) -> struct.Struct:
    """Layout of the arguments in the buffer, but for the unused words of arrays: they are gaps, filled with zeros."""
    forms = []
    for kind in leaves(signature):
        dtype, ndim = dimensions(kind)
        # A gap has no alignment of its own: "0q" aligns what follows it.
        forms.append(_FORMS[dtype] if ndim is None else "0q" + _UNUSED + "q" * (3 + 2 * ndim))
    return struct.Struct("@" + "".join(forms))


def parameter_bytes(signature: Signature) -> list[int]:
    """Bytes of each parameter of the compiled loop, in order: each word of an array is one, and each number."""
    found = []
    for kind in leaves(signature):
        dtype, ndim = dimensions(kind)
        found += [struct.calcsize(_FORMS[dtype])] if ndim is None else [8] * (5 + 2 * ndim)
    return found


def with_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, with the words of its record. It must be in C order, and keep its shape and its memory."""
    size = tensor.element_size()
    words = (tensor.numel(), size, tensor.data_ptr(), *tensor.shape, *(stride * size for stride in tensor.stride()))
    tensor.launch_words = (_kind_of(tensor), *words)  # type: ignore[attr-defined]
    return tensor


_ADDRESS_OF_WORDS = 3
"""Which of a tensor's words is the address."""


def have_words(args: Sequence[Any]) -> tuple[bool, ...]:
    """Whether each leaf of the arguments is a tensor with words."""
    return tuple(hasattr(leaf, "launch_words") for leaf in leaves(args))


def first_places(args: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf of the arguments, the number of the first leaf that is the same object."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(id(leaf), n) for n, leaf in enumerate(leaves(args)))


Packer = Callable[[Any, Sequence[Any]], bool]


def packer_of(signature: Signature, have_words: Sequence[bool] = ()) -> Packer:
    """Function (buffer, args) that packs arguments if they have the types of `signature`, and returns whether they do.

    Its text is made for the signature: most of a launch's time goes into this function.

    Args:
        have_words: whether each leaf must be a tensor with words; others may be such tensors too. Empty = none must.
    """
    scope: dict[str, Any] = {"pack_into": layout_of(signature).pack_into, "float32": np.float32}
    text = _PackerText(scope, have_words)
    targets = text.targets(signature)
    source = f"""
def pack(buffer, args):
    try:
        {targets} = args
        {"; ".join(text.shapes) or "pass"}
    except (AttributeError, TypeError, ValueError):
        return False
    if {" and ".join(text.checks) or "True"}:
        pack_into(buffer, 0, {", ".join(text.numbers)})
        return True
    return False
"""
    exec(source, scope)
    packer: Packer = scope["pack"]
    return packer


Refiller = types.FunctionType


@functools.cache
def refiller_of(
    signatures: tuple[Signature, ...], have_words: tuple[tuple[bool, ...], ...], firsts: tuple[int, ...]
) -> tuple[Refiller, tuple[tuple[str, ...], ...]]:
    """Make a function that writes other arguments into buffers that hold arguments of these signatures, one each.

    Args:
        have_words: for each signature, whether each leaf must be a tensor with words.
        firsts: result of `first_places`. A tensor that stood at several places is read once if it stands there again.

    Returns:
        The function (arguments of each, known, *views), and the formats of the views of each buffer that it takes, in
        this order. It writes the addresses of arrays, and the numbers; `known.words` are the words whose addresses are
        in the buffers, which it sets. The arrays must have the dtypes and shapes of those in the buffers. It returns
        False, and has written nothing, if a number has another type than in its signature, or a tensor has no words.
    """
    scope: dict[str, Any] = {}
    targets, checks, lines, views = [], [], [], []
    words: list[str] = []
    lines_of_words: list[str] = []
    names: list[str] = []
    for b, signature in enumerate(signatures):
        target, writes = _places(signature, f"a{b}", scope)
        targets.append(target)
        views.append(tuple(sorted({form for _, form, _, _ in writes})))
        for (name, form, at, kinds), has_words in zip(writes, have_words[b], strict=True):
            place, n = f"v{b}_{_NAMES[form]}[{at}]", len(names)
            names.append(name)
            if kinds:
                lines.append(f"{place} = {name}")
                checks.append("(" + " or ".join(f"type({name}) is {kind}" for kind in kinds) + ")")
                continue
            found = f"{name}.launch_words" if has_words else f"{name}.data_ptr()"
            if firsts[n] < n:
                found = f"x{firsts[n]} if {name} is {names[firsts[n]]} else {found}"
            elif n in firsts[n + 1 :]:
                found = f"(x{n} := {found})"
            if has_words:
                lines_of_words.append(f"{place} = words[{len(words)}][{_ADDRESS_OF_WORDS}]")
                words.append(found)
            else:
                lines.append(f"{place} = {found}")
    arguments = "".join(f", v{b}_{_NAMES[form]}" for b, forms in enumerate(views) for form in forms)
    indented, indented_twice = "\n    ", "\n        "
    source = f"""
def refill(args, known{arguments}):
    ({"".join(f"{target}, " for target in targets)}) = args
    try:
        words = {"".join(f"{one}, " for one in words) or "()"}
    except AttributeError:
        return False
    if not ({" and ".join(checks) or "True"}):
        return False
    if words != known.words:
        known.words = None
        {indented_twice.join(lines_of_words)}
        known.words = words
    {indented.join(lines)}
    return True
"""
    exec(source, scope)
    return scope["refill"], tuple(views)


_NAMES = {form: str(number) for number, form in enumerate(_FORMS.values())}
_ADDRESS = 4
"""Which word of an array's record is the address."""


def _places(
    signature: Signature, names: str, scope: dict[str, Any]
) -> tuple[str, list[tuple[str, str, int, list[str]]]]:
    """Where a buffer has the addresses and numbers of arguments.

    Args:
        names: beginning of the names that are made here.
        scope: gets {name of a type: type}.

    Returns:
        The left side of an assignment that gives each array and number a name; and for each of them (name, format,
        place in a view of the buffer of this format, names of the types that a number may have, none for an array).
    """
    writes: list[tuple[str, str, int, list[str]]] = []
    end = 0

    def target(kind: Any) -> str:
        nonlocal end
        if isinstance(kind, tuple):
            return "(" + "".join(f"{target(one)}, " for one in kind) + ")"
        name, (dtype, ndim) = f"{names}_{len(writes)}", dimensions(kind)
        form = _FORMS[dtype] if ndim is None else "q"
        size, kinds = struct.calcsize(form), []
        end += -end % size
        if ndim is None:
            types = [one for one, called in _PYTHON.items() if called == dtype] + [np.dtype(dtype).type]
            kinds = [f"{name}_{k}" for k in range(len(types))]
            scope.update(zip(kinds, types, strict=True))
        writes.append((name, form, end // size + (0 if kinds else _ADDRESS), kinds))
        end += size if kinds else size * (5 + 2 * (ndim or 0))
        return name

    return target(signature), writes


class _PackerText:
    """Parts of a packer's text."""

    def __init__(self, scope: dict[str, Any], have_words: Sequence[bool]):
        self.scope, self._have_words = scope, have_words
        self.shapes: list[str] = []
        self.checks: list[str] = []
        self.numbers: list[str] = []
        self._names = 0

    def targets(self, signature: Signature) -> str:
        """Names of arguments as the left side of an assignment."""
        return "(" + "".join(f"{self._target(kind)}, " for kind in signature) + ")"

    def _target(self, kind: Any) -> str:
        if isinstance(kind, tuple):
            return self.targets(kind)
        self._names += 1
        name = f"a{self._names}"
        dtype, ndim = dimensions(kind)
        if ndim is None:
            self._number(name, dtype)
        elif self._have_words and self._have_words[self._names - 1]:
            self.scope[f"{name}_kind"] = kind
            self.shapes.append(f"({name}_0, *{name}_w) = {name}.launch_words")
            self.checks.append(f"{name}_0 == {name}_kind")
            self.numbers.append(f"*{name}_w")
        else:
            self._array(name, dtype, ndim)
        return name

    def _number(self, name: str, dtype: str) -> None:
        kinds = [kind for kind, called in _PYTHON.items() if called == dtype] + [np.dtype(dtype).type]
        self.scope |= {f"{name}_{k}": kind for k, kind in enumerate(kinds)}
        self.checks.append("(" + " or ".join(f"type({name}) is {name}_{k}" for k in range(len(kinds))) + ")")
        # Rounded here, since `pack_into` refuses a float that rounds to an infinite float32.
        self.numbers.append(f"float32({name})" if dtype == "float32" else name)

    def _array(self, name: str, dtype: str, ndim: int) -> None:
        sizes = [f"{name}_{i}" for i in range(ndim)]
        self.shapes.append("(" + "".join(f"{size}, " for size in sizes) + f") = {name}.shape")
        self.scope[f"{name}_dtype"] = next(torch_dtype for torch_dtype, called in _DTYPES.items() if called == dtype)
        self.checks.append(f"{name}.dtype is {name}_dtype and {name}.is_contiguous()")
        item = struct.calcsize(_FORMS[dtype])
        strides = [" * ".join([*sizes[i + 1 :], str(item)]) for i in range(ndim)]
        self.numbers += [" * ".join(sizes) or "1", str(item), f"{name}.data_ptr()", *sizes, *strides]
