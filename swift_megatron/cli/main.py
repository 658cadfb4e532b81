"""`swift-megatron sft|pt ...`: checks what can be checked without torch, then starts the processes.

The number of processes on this node is NPROC_PER_NODE if set, else t x p; NNODES, NODE_RANK, MASTER_ADDR and
MASTER_PORT are ms-swift's variables for several nodes. Under torchrun (RANK is set) this process is one of them
already.
"""
import os
import socket
import sys
import tempfile
from typing import NoReturn, Optional

from .. import compatibility
from ..config import read_model_config
from ..errors import ConfigError, UserError
from .errors import RUN_FOLDER, fail
from .flags import describe_fields, expand_file, parallel_fields, read_values

TRAINING = {'sft': 'supervised fine-tuning', 'pt': 'pre-training'}
METHODS = {**TRAINING, 'export': 'merging an adapter into its base'}
USAGE = f"""usage: swift-megatron {{{'|'.join(METHODS)}}} [FILE.yaml|FILE.json] [--name value ...]

Runs ms-swift's trainers on models that are split over processes. All arguments of `swift sft` / `swift pt` keep their
names and meanings; `swift-megatron sft --help` lists them after the parallel fields.

swift-megatron export --merge_lora true --adapters CHECKPOINT [--model DIR] [--output_dir DIR]
                      [--merge_into checkpoint|dequantized]
"""


def _is_count(text: str) -> bool:
    return text.isdigit() and int(text) > 0


def check_flags(argv: list[str], nodes: int) -> int:
    """Checks the flags and returns the number of processes for this node.

    Raises:
        ConfigError: with everything that is wrong.
    """
    values = read_values(argv)
    fields = parallel_fields(values)
    given = os.environ.get('NPROC_PER_NODE')
    faults = []
    if given is not None and not _is_count(given):
        faults.append(f'NPROC_PER_NODE={given} has to be a whole number of at least 1')
        given = None
    try:
        local = int(given) if given else max(1, -(-fields.model_parallel_size // nodes))
    except TypeError:  # a size that is no number, reported below
        local = 1
    model = values.get('model') or values.get('model_id')
    faults += fields.faults(local * nodes, read_model_config(model))
    faults += compatibility.model_faults(model, read_model_config(model))
    faults += compatibility.faults(values)
    if faults:
        raise ConfigError(faults)
    return local


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return str(listener.getsockname()[1])


def _torchrun(arguments: list[str]) -> int:
    """Runs torchrun in this process. Its own report of a failure is left out: the failing rank's traceback stands
    above.
    """
    import logging
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    logging.getLogger('torch.distributed.elastic').setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix='swift-megatron-') as folder:
            os.environ[RUN_FOLDER] = folder
            torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:
            sys.stderr.write(
                f'swift-megatron: rank {rank} failed first, with exit status {failure.exitcode}; the others were '
                'stopped. Its traceback stands above.\n')
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def start(method: str, argv: list[str]) -> int:
    """Starts the processes of one node and waits for them; the exit status."""
    flags = expand_file(argv)
    if 'RANK' in os.environ:  # under torchrun
        from .worker import run
        return run(method, flags)
    nodes = os.environ.get('NNODES', '1').partition(':')[0]
    if not _is_count(nodes):
        raise ConfigError([f'NNODES={os.environ["NNODES"]} has to be a whole number of at least 1'])
    nodes = int(nodes)
    local = check_flags(flags, nodes)
    if local * nodes == 1:
        from .worker import run
        return run(method, flags)
    options = ['--nproc_per_node', str(local)]
    for name in ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT'):
        if name in os.environ:
            options += [f'--{name.lower()}', os.environ[name]]
    if nodes == 1 and 'MASTER_PORT' not in os.environ:
        options += ['--master_port', _free_port()]
    return _torchrun([*options, '-m', 'swift_megatron.cli.worker', method, *flags])


def export(argv: list[str]) -> int:
    """Runs `export` in this process; the exit status."""
    from ..pipelines.export import ExportConfig, export_main
    for line in export_main(ExportConfig.from_values(read_values(expand_file(argv)))):
        sys.stdout.write(f'{line}\n')
    return 0


def main(argv: Optional[list[str]] = None) -> NoReturn:
    """The console script."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ('-h', '--help'):
        sys.stdout.write(f'{USAGE}\n{describe_fields()}\n')
        sys.exit(0 if argv else 2)
    method, rest = argv[0], argv[1:]
    try:
        if method not in METHODS:
            raise ConfigError([f"there is no command '{method}': use {' or '.join(METHODS)}"])
        if method == 'export':
            if '-h' in rest or '--help' in rest:
                sys.stdout.write(USAGE)
                sys.exit(0)
            sys.exit(export(rest))
        if '-h' in rest or '--help' in rest:
            sys.stdout.write(f'{USAGE}\n{describe_fields()}\n\nAll other arguments, from ms-swift:\n\n')
            sys.stdout.flush()
            from .worker import print_help
            print_help(method)
            sys.exit(0)
        sys.exit(start(method, rest))
    except UserError as error:
        fail(error)


if __name__ == '__main__':
    main()
