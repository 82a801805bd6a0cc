"""States (nested numbers, strings and tensors) as the bytes of a file.

Invariant: loading bytes runs no code.
"""

import errno
import hashlib
import io
import re
import zipfile
from typing import IO, Any

import torch

_REFUSED = re.compile(r"Unsupported global: GLOBAL (\S+)")
"""The class that torch refuses to load, in the text of its error."""
_REASON = re.compile(r"WeightsUnpickler error: (.*)")
"""The reason in the text of torch's error. The rest of that text advises a load that may run code from the file."""


def to_bytes(state: object) -> bytes:
    """Bytes of a file that holds `state`: nested numbers, strings and tensors."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_bytes(
    file: str | IO[bytes],
    where: str,
    *,
    mmap: bool = False,
    problem: str = "is not a checkpoint of a TrainGraph, or is damaged",
) -> Any:
    """The state in the bytes that `to_bytes` has made; arguments and errors as for `load_state`.
    `problem` is the text of errors."""
    try:
        if not mmap:  # torch compares no checksums.
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} is wrong")
            if not isinstance(file, str):
                file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # Of a damaged file, torch and zipfile raise errors of many classes.
        # In a damaged file torch may seek to before the beginning: EINVAL. Other OSErrors are no sign of damage.
        if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        if found := _REFUSED.search(str(error)):
            raise ValueError(
                f"{where} holds an object of {found[1]}, and only numbers, strings and tensors are read; save these"
                f" alone, such as a state_dict(), or call torch.serialization.add_safe_globals([{found[1]}]) before if"
                " you trust the file"
            ) from error
        reason = found[1] if (found := _REASON.search(str(error))) else str(error) or type(error).__name__
        raise ValueError(f"{where} {problem}: {reason}; take another checkpoint, or save it again") from error


def hash_of(value: Any) -> str:
    """Hash, as text, of a tensor or of another value that a file can hold."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        words = f"{value.dtype} {tuple(value.shape)}".encode()
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:
        words, data = b"", memoryview(to_bytes(value))
    hashed = hashlib.blake2b(words, digest_size=16)
    hashed.update(data)
    return hashed.hexdigest()
