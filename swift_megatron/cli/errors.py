"""Says what a user can mend, once on each node, and ends the process: the only place that does."""
import os
import sys
import time
from typing import NoReturn

from ..errors import UserError

RUN_FOLDER = 'SWIFT_MEGATRON_RUN_FOLDER'  # environment variable: a folder that the processes of a node share
STEP_SECONDS, LONGEST_SECONDS = .5, 4.  # of waiting for another process to speak


def _speaks() -> bool:
    """Whether this process tells the fault: of several of a node that find one, the first.

    The launcher gives its processes a folder for this. Under a bare torchrun the lower rank speaks, and is the only one
    to, because the launcher stops the others when the first process ends.
    """
    folder = os.environ.get(RUN_FOLDER)
    if folder is None:
        if os.environ.get('LOCAL_RANK', '0') != '0':
            time.sleep(min(STEP_SECONDS * int(os.environ['LOCAL_RANK']), LONGEST_SECONDS))
        return True
    try:
        os.close(os.open(os.path.join(folder, 'fault'), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def fail(error: UserError) -> NoReturn:
    """One sentence for each fault, from one process of the node alone, and exit status 2."""
    if _speaks():
        for fault in error.faults:
            sys.stderr.write(f'swift-megatron: error: {fault}\n')
        sys.stderr.flush()
    else:
        time.sleep(STEP_SECONDS)  # whose exit the launcher sees first, and stops the others, has spoken
    sys.exit(2)
