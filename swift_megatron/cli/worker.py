"""One process of a run: `python -m swift_megatron.cli.worker sft --name value ...`, started by torchrun."""
import sys

from ..config import ConfigError
from .main import fail


def run(method: str, flags: list[str]) -> int:
    """Runs the pipeline; input that cannot be run ends with one sentence, everything else with its traceback."""
    from swift.cli.utils import try_use_single_device_mode
    try_use_single_device_mode()
    from ..model.decoder import StageError
    from ..model.plan import PlanError
    from ..pipelines.sft import pt_main, sft_main
    try:
        {'sft': sft_main, 'pt': pt_main}[method](flags)
    except ConfigError as error:
        fail(error)
    except (PlanError, StageError) as error:
        fail(ConfigError([str(error)]))
    return 0


def print_help(method: str) -> None:
    """ms-swift's arguments, without the parallel fields that stand above."""
    import argparse
    from dataclasses import fields
    from swift.utils.utils import _patch_get_type_hints
    from transformers import HfArgumentParser

    from ..arguments import PretrainConfig, TrainerConfig
    from ..config import ParallelFields
    with _patch_get_type_hints():
        parser = HfArgumentParser([{'sft': TrainerConfig, 'pt': PretrainConfig}[method]], add_help=False)
    own = {spec.name for spec in fields(ParallelFields)}
    for action in parser._actions:
        if action.dest in own:
            action.help = argparse.SUPPRESS
    parser.print_help()


if __name__ == '__main__':
    sys.exit(run(sys.argv[1], sys.argv[2:]))
