"""Megatron-style parallelism for ms-swift's ordinary trainers. See the README."""
import importlib
from typing import Any

__version__ = '0.1.0'

_EXPORTS = {
    'TrainerConfig': 'arguments',
    'PretrainConfig': 'arguments',
    'sft_main': 'pipelines.sft',
    'pt_main': 'pipelines.sft',
    'SwiftModel': 'pipelines.sft',
}


def __getattr__(name: str) -> Any:
    """Names that need ms-swift are imported when they are used: it takes ten seconds."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(f'{__name__}.{_EXPORTS[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
