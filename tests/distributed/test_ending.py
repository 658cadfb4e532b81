"""How processes end: groups before the interpreter, and one voice for a fault.

A failure means that a run that has written everything ends with an error, because threads of groups outlive the
interpreter; or that a user waits for, or reads several times, what is wrong.
"""
import json
import os
import pytest
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

from .ending import WAYS

ROOT = Path(__file__).resolve().parents[2]
STATUS = {'success': 0, 'refusal': 2, 'error': 1, 'interrupt': -2, 'user': 0}


def python(*arguments: str, **variables: Optional[str]) -> subprocess.Popen:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo', **variables}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
    """Exit status and left threads, by way and rank."""
    folder = tmp_path_factory.mktemp('ended')
    process = python('-m', 'tests.distributed.ending', str(folder))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    statuses = json.loads((folder / 'statuses.json').read_text())
    return {name: (status, json.loads((folder / f'{name}.json').read_text())) for name, status in statuses.items()}


@pytest.mark.parametrize('rank', [0, 1])
@pytest.mark.parametrize('way', WAYS)
def test_groups_end_before_the_interpreter(ended, way, rank):
    """A failure means that threads of groups run while the interpreter is taken apart; or that the package takes away
    groups that a user's program started, which shows that the threads are seen at all.
    """
    status, threads = ended[f'{way}-{rank}']
    assert status == STATUS[way]
    assert bool(threads) == (way == 'user'), threads


FAULT = ('from swift_megatron.cli.errors import fail; from swift_megatron.errors import ConfigError; '
         "fail(ConfigError(['wrong']))")


def test_one_process_tells_a_fault(tmp_path):
    """A failure means that a fault is told by all processes, or by none, or only after half a minute."""
    start = time.time()
    processes = [
        python('-c', FAULT, LOCAL_RANK=str(rank), SWIFT_MEGATRON_RUN_FOLDER=str(tmp_path)) for rank in (1, 2, 3)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert sorted(errors) == ['', '', 'swift-megatron: error: wrong\n']
    assert [process.returncode for process in processes] == [2, 2, 2]
    alone = python('-c', FAULT, LOCAL_RANK='3')  # under a bare torchrun
    assert alone.communicate(timeout=60)[1] == 'swift-megatron: error: wrong\n'
    assert time.time() - start < 15
