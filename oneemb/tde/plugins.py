"""Parameter servers in shared libraries, and the op by which scripts register them."""

from torch import library

from oneemb.storage.remote import servers

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
    servers.register_io(path)


_library.impl("register_io", register_io, "CompositeExplicitAutograd")
