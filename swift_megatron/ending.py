"""How a process of a run ends: its groups first, while the interpreter is whole.

A group has threads of its own, and connections that other processes read from. torch leaves both to the end of the
process, when the interpreter has stopped and libraries are torn down in any order.
"""
import atexit
import faulthandler
import gc
import sys
import torch.distributed as dist
from contextlib import contextmanager
from typing import Iterator

SECONDS = 10  # that destroying the groups may take; operations without an end (a peer is gone) could hold it up


@contextmanager
def groups_end_with_process() -> Iterator[None]:
    """The groups that are started inside, if there were none before, are destroyed when the process ends.

    By `atexit`, so on every way out on which Python has a say: success, refusal, error and Ctrl-C. A signal that kills
    (SIGTERM from the launcher) ends threads and connections at once, with the process. Groups that a user's program
    started before are the user's.
    """
    theirs = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not theirs:
            atexit.register(end_groups)


def end_groups() -> None:
    """Destroys all groups, in torch's order, and what holds them; leaves the process with status 1 if that hangs."""
    if not dist.is_initialized():
        return
    for name in ('last_type', 'last_value', 'last_traceback', 'last_exc'):  # an error's frames hold the model
        if hasattr(sys, name):
            setattr(sys, name, None)
    gc.collect()  # trainer and model lie in cycles; their modules know the groups
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    try:
        dist.destroy_process_group()
        gc.collect()
    finally:
        faulthandler.cancel_dump_traceback_later()
