"""A folder that gets its name when it is complete, on disk, and takes the place of an older one without a gap to lose.

A folder X is written as `_writing-X` beside it, synced, and renamed. An older X is moved to `_replaced-X` first and
deleted last. No listing of checkpoints (`checkpoint-*`) and no upload to a hub (which leaves `_*` out) takes these
names for a checkpoint. What a kill can leave, and what `clean` makes of it:

    before the renames      X old,    _writing-X part or whole       -> X old
    between the renames     no X,     _writing-X whole, _replaced-X  -> X new
    after the renames       X new,    _replaced-X whole or part      -> X new
    while X is deleted      no X,     _deleted-X whole or part       -> no X

Several processes may write into one folder, on one disk or on one disk per node: `begin` tells on which of them the
folder was made, and that process names it. Needs no torch.
"""
import contextlib
import errno
import os
import re
import shutil
from dataclasses import dataclass
from typing import Collection, Sequence

WRITING, REPLACED, DELETED = '_writing-', '_replaced-', '_deleted-'
CHECKPOINT = re.compile(r'checkpoint-\d+')
STATE_FILE = 'trainer_state.json'  # the Trainer's state, the last file of a checkpoint


def _beside(path: str, prefix: str) -> str:
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, prefix + name)


def replaced_folder(path: str) -> str:
    """Where the folder that had this name lies while another takes its place."""
    return _beside(path, REPLACED)


@dataclass(frozen=True)
class AtomicFolder:
    """A folder in the making.

    Args:
        path: Its name once it is complete.
    """
    path: str

    @property
    def staging(self) -> str:
        """Where to write until then."""
        return _beside(self.path, WRITING)

    def begin(self) -> bool:
        """Makes the folder to write into; False if another process of this disk has made it already."""
        os.makedirs(os.path.dirname(self.staging), exist_ok=True)
        try:
            os.mkdir(self.staging)
        except FileExistsError:
            return False
        return True

    def publish(self) -> None:
        """Gives the folder its name; an older one of that name is gone afterwards. For the process whose `begin` was
        True, once all files are written and synced.
        """
        sync(self.staging, recursive=False)
        parent, aside = os.path.dirname(self.staging), replaced_folder(self.path)
        if os.path.lexists(self.path):
            os.rename(self.path, aside)
        os.rename(self.staging, self.path)
        sync(parent, recursive=False)
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: str, *, recursive: bool = True) -> None:
    """Waits until a file or folder, and with `recursive` all below it, is on the disk."""
    if recursive and os.path.isdir(path):
        for entry in os.scandir(path):
            if not entry.is_symlink():
                sync(entry.path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not os.path.isdir(path) or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # some file systems have nothing to sync for a folder
    finally:
        os.close(descriptor)


def settle(path: str) -> None:
    """Puts right what killed processes left of making, replacing or deleting one folder. Several processes may do so at
    once.
    """
    writing, replaced = _beside(path, WRITING), _beside(path, REPLACED)
    for source in (writing, replaced) if os.path.lexists(replaced) else ():
        if not os.path.lexists(path):
            with contextlib.suppress(OSError):  # another process was first
                os.rename(source, path)
    for leftover in (writing, replaced, _beside(path, DELETED)):
        shutil.rmtree(leftover, ignore_errors=True)


def clean(parent: str) -> None:
    """`settle` for all that lies in a folder."""
    for name in os.listdir(parent) if os.path.isdir(parent) else []:
        for prefix in (WRITING, REPLACED, DELETED):
            if name.startswith(prefix):
                settle(os.path.join(parent, name.removeprefix(prefix)))


def remove(path: str) -> None:
    """Deletes a folder; killed half-way, what is left does not bear its name."""
    aside = _beside(path, DELETED)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def rotate(ordered: Sequence[str], limit: int, keep: Collection[str]) -> None:
    """Deletes the oldest checkpoints until `limit` are left.

    Args:
        ordered: Folders from old to new; those that are no complete checkpoints are neither counted nor deleted.
        limit: How many to leave; no limit if below 1.
        keep: Those to leave in any case (the one just written, the best one).
    """
    if limit < 1:
        return
    kept = {os.path.realpath(path) for path in keep}
    complete = [path for path in ordered if is_complete(path)]
    surplus = len(complete) - max(limit, len(kept))
    for path in complete:
        if surplus > 0 and os.path.realpath(path) not in kept:
            remove(path)
            surplus -= 1


def is_complete(path: str) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return CHECKPOINT.fullmatch(os.path.basename(path)) is not None and os.path.isfile(os.path.join(path, STATE_FILE))
