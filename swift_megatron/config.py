"""The parallel fields and their rules. Needs no torch: the launcher checks them before it starts processes."""
import json
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Mapping, Optional


class ConfigError(ValueError):
    """Input that cannot be run; the message lists every fault, each with the value, the rule and what to type instead."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__('; '.join(faults))
        self.faults = faults


def _help(text: str) -> dict[str, str]:
    return {'help': text}


@dataclass
class ParallelFields:
    """How a model is spread over processes.

    d, the number of model replicas, is the number of processes divided by tensor_parallel_size x pipeline_parallel_size.
    Samples per optimizer step = per_device_train_batch_size x num_micro_batches x gradient_accumulation_steps x d.
    """
    tensor_parallel_size: int = field(
        default=1, metadata=_help('Ranks that share every layer (t). At most the number of query heads.'))
    pipeline_parallel_size: int = field(
        default=1, metadata=_help('Stages that share the layer stack (p). Only 1 in this release.'))
    num_micro_batches: Optional[int] = field(
        default=None,
        metadata=_help('Micro-batches that a step is cut into (m); per_device_train_batch_size is the size of one. '
                       'Default: pipeline_parallel_size.'))
    sequence_parallel: bool = field(
        default=False, metadata=_help('Shard activations between the parallel regions along the sequence. Only false in '
                                      'this release.'))
    overlap_communication: bool = field(
        default=False, metadata=_help('Run tensor-parallel collectives beside matrix products. Only false in this release.'))
    pipeline_schedule: Literal['1f1b', 'gpipe', 'interleaved_1f1b'] = field(
        default='1f1b', metadata=_help('Order of the micro-batches on the stages. Only 1f1b in this release.'))
    virtual_pipeline_size: int = field(
        default=1, metadata=_help('Model chunks per stage for interleaved_1f1b (v). Only 1 in this release.'))
    pipeline_layers: Optional[str] = field(
        default=None, metadata=_help("Decoder layers per stage by hand, as in '9,9,8,6'. Not in this release."))
    zero_stage: Optional[int] = field(
        default=None, metadata=_help('1 shards optimizer states over the replicas, 0 does not. Only 0 in this release.'))

    @property
    def micro_batches(self) -> int:
        """m, with its default."""
        return self.pipeline_parallel_size if self.num_micro_batches is None else self.num_micro_batches

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model (t x p)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def faults(self, num_processes: int, model: Optional[Mapping[str, Any]] = None) -> list[str]:
        """Everything that is wrong with the fields, one sentence each.

        Args:
            num_processes: All processes of the run, over all nodes.
            model: The content of the model's config.json, where it is at hand.
        """
        faults = [
            f'--{name} {value!r} has to be a whole number of at least 1'
            for name in ('tensor_parallel_size', 'pipeline_parallel_size', 'num_micro_batches', 'virtual_pipeline_size')
            if (value := getattr(self, name)) is not None and not _is_count(value)
        ]
        if faults:
            return faults
        faults += self._not_available()
        t, p = self.tensor_parallel_size, self.pipeline_parallel_size
        if num_processes % (t * p):
            faults.append(f'{num_processes} processes are no multiple of tensor_parallel_size x pipeline_parallel_size = '
                          f'{t} x {p} = {t * p}: start {_multiples(t * p, num_processes)} processes (NPROC_PER_NODE x NNODES) '
                          f'or choose sizes whose product divides {num_processes}')
        if model is not None:
            faults += self._model_faults(model)
        return faults

    def _not_available(self) -> list[str]:
        """Fields whose machinery this release does not have."""
        faults = []
        for spec in fields(ParallelFields):
            value = getattr(self, spec.name)
            if spec.name in ('tensor_parallel_size', 'num_micro_batches') or value == spec.default:
                continue
            if spec.name == 'zero_stage' and value == 0:
                continue
            default = 0 if spec.name == 'zero_stage' else spec.default
            remedy = 'leave it out' if default is None else f'leave it out or set it to {str(default).lower()}'
            faults.append(f'--{spec.name} {value} is not available in this release: {remedy}')
        return faults

    def _model_faults(self, model: Mapping[str, Any]) -> list[str]:
        heads = model.get('num_attention_heads')
        if isinstance(heads, int) and self.tensor_parallel_size > heads:
            return [f'--tensor_parallel_size {self.tensor_parallel_size} is more than the {heads} query heads of this model: '
                    f'legal values are 1 to {heads}']
        return []


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _multiples(size: int, near: int) -> str:
    lower = near // size * size
    return ' or '.join(str(n) for n in (lower, lower + size) if n)


def read_model_config(model: Optional[str]) -> Optional[dict[str, Any]]:
    """The config.json of a local model directory, None for hub names and unreadable files (found out later)."""
    path = os.path.join(os.path.expanduser(model or ''), 'config.json')
    if not model or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding='utf-8') as file:
            return json.load(file)
    except (OSError, json.JSONDecodeError):
        return None
