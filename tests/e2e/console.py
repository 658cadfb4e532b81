"""The installed commands, as a user types them."""
import dataclasses
import os
import resource
import subprocess
import sys
import time

from .harness import ROOT

TIMEOUT = 120  # seconds for one command


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a command left on the terminal, and how long it took."""
    exit_code: int
    stdout: str
    stderr: str
    ended: float  # as time.time() tells it
    cpu_seconds: float  # does not depend on what else the machine does, unless commands run beside each other


def command(program: str, *argv: str, timeout: float = TIMEOUT, **environment: str) -> Finished:
    """Runs `swift-megatron` or `torchrun` of this environment, one thread per process and without a hub."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NPROC_PER_NODE', 'NNODES', 'MASTER_ADDR', 'MASTER_PORT')
    }
    variables.update(
        OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', GLOO_SOCKET_IFNAME='lo', PYTHONPATH=str(ROOT), **environment)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run([os.path.join(os.path.dirname(sys.executable), program), *argv],
                             env=variables,
                             text=True,
                             capture_output=True,
                             timeout=timeout,
                             stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Finished(process.returncode, process.stdout, process.stderr, time.time(),
                    after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
