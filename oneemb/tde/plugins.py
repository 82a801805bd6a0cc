"""Parameter servers in shared libraries, and the op by which scripts register them."""

from typing import Any

from torch import library

__all__ = ["register_io"]

_library = library.Library("tde", "FRAGMENT")
_library.define("register_io(str path) -> ()")


def register_io(path: str) -> None:
    """Let URLs name the parameter server in a shared library, whose `IO_type` is their scheme.

    `torch.ops.tde.register_io` is the same.

    Args:
        path: of the library.

    Raises:
        ServerError: it cannot be loaded, or is no such plugin.
    """
    from oneemb.storage.remote import servers

    register: Any = getattr(servers, "register_io", None)
    if register is None:
        raise NotImplementedError("this version of oneemb has no parameter servers in shared libraries")
    register(path)


_library.impl("register_io", register_io, "CompositeExplicitAutograd")
