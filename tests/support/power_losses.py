"""Every disk that a loss of power may leave, from one run of the writer."""

import hashlib


def power_losses(fs, write, look, *, torn=2):
    """Run `write()` once, and call `look` with each disk that a loss of power leaves at a call of `fs`, or at the end.

    The disks are the same as from one run for each value of `crash_at` and `half`. Equal disks are looked at once, and
    once more at the end.

    Args:
        fs: The `FaultyFileSystem` that `write` writes to.
        look: Called with (disk, number of the call, whether half of it was done, fate); True where no other disk need
            be looked at. The number after the last call stands for the end.
        torn: As of `FaultyFileSystem.survivors`, whose seed is the number of the call.

    Returns:
        The number of disks that were looked at.
    """
    seen, enough, errors = set(), False, []

    def watch(half, ended=False):
        nonlocal enough, errors
        call = len(fs.calls)
        for fate, disk in [] if enough else fs.survivors(torn, seed=call):
            key = (ended, _digest(disk))
            if key in seen or enough:
                continue
            seen.add(key)
            try:
                enough = look(disk, call, half, fate)
            except BaseException as error:  # `write` has handlers of its own, which must not see it.
                enough, errors = True, [error]

    fs.watch = watch
    try:
        write()
    finally:
        fs.watch = None
    watch(False, ended=True)
    if errors:
        raise errors[0]
    return len(seen)


def _digest(disk):
    """Digest of the names and the contents of a disk."""
    text = hashlib.blake2b(digest_size=16)
    for path, inode in sorted(disk.entries.items()):
        content = getattr(inode, "now", None)
        text.update(f"{path}\0{'directory' if content is None else len(content)}\0".encode())
        text.update(content or b"")
    return text.digest()
