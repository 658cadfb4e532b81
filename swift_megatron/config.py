"""The parallel fields and their rules. Needs no torch: the launcher checks them before it starts processes."""
import json
import os
from dataclasses import dataclass, field
from typing import Any, Literal, Mapping, Optional

SCHEDULES = ('1f1b', 'gpipe', 'interleaved_1f1b')


def _help(text: str) -> dict[str, str]:
    return {'help': text}


@dataclass
class ParallelFields:
    """How a model is spread over processes.

    d, the number of model replicas, is the number of processes divided by tensor_parallel_size x
    pipeline_parallel_size. Samples per optimizer step = per_device_train_batch_size x num_micro_batches x
    gradient_accumulation_steps x d.
    """
    tensor_parallel_size: int = field(
        default=1, metadata=_help('Ranks that share every layer (t). At most the number of query heads.'))
    pipeline_parallel_size: int = field(
        default=1, metadata=_help('Stages that share the layer stack (p). At most the number of layers.'))
    num_micro_batches: Optional[int] = field(
        default=None,
        metadata=_help('Micro-batches that a step is cut into (m); per_device_train_batch_size is the size of one. '
                       'Default: pipeline_parallel_size.'))
    sequence_parallel: bool = field(
        default=False,
        metadata=_help('Shard activations between the parallel regions along the sequence. Only false in '
                       'this release.'))
    overlap_communication: bool = field(
        default=False,
        metadata=_help('Run tensor-parallel collectives beside matrix products. Only false in this release.'))
    pipeline_schedule: Literal['1f1b', 'gpipe', 'interleaved_1f1b'] = field(
        default='1f1b', metadata=_help('Order of the micro-batches on the stages: 1f1b, gpipe or interleaved_1f1b.'))
    virtual_pipeline_size: int = field(default=1, metadata=_help('Model chunks per stage for interleaved_1f1b (v).'))
    pipeline_layers: Optional[str] = field(
        default=None, metadata=_help("Decoder layers per stage by hand, as in '9,9,8,6'. Default: balanced by cost."))
    zero_stage: Optional[int] = field(
        default=None,
        metadata=_help('1 shards optimizer states over the replicas, 0 does not. Only 0 in this release.'))

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
        countable = not faults
        faults += self._not_available()
        if not countable:
            return faults
        faults += self._pipeline_faults()
        t, p = self.tensor_parallel_size, self.pipeline_parallel_size
        if num_processes % (t * p):
            faults.append(
                f'{num_processes} processes are no multiple of tensor_parallel_size x pipeline_parallel_size = '
                f'{t} x {p} = {t * p}: start {_multiples(t * p, num_processes)} processes (NPROC_PER_NODE x NNODES) '
                f'or choose sizes whose product divides {num_processes}')
        if model is not None:
            faults += self._model_faults(model)
        return faults

    def _not_available(self) -> list[str]:
        """Fields whose machinery this release does not have."""
        return [
            f'--{name} {value} is not available in this release: leave it out or set it to {str(default).lower()}'
            for name, default in (('sequence_parallel', False), ('overlap_communication', False), ('zero_stage', 0))
            if (value := getattr(self, name)) not in (None, default)
        ]

    def _pipeline_faults(self) -> list[str]:
        schedule, v = self.pipeline_schedule, self.virtual_pipeline_size
        faults = []
        if schedule not in SCHEDULES:
            faults.append(f'--pipeline_schedule {schedule} does not exist: use {", ".join(SCHEDULES)}')
        if v > 1 and schedule != 'interleaved_1f1b':
            faults.append(f'--virtual_pipeline_size {v} needs --pipeline_schedule interleaved_1f1b')
        if v == 1 and schedule == 'interleaved_1f1b':
            faults.append('--pipeline_schedule interleaved_1f1b needs --virtual_pipeline_size of at least 2')
        if self.pipeline_parallel_size == 1:
            faults += [
                f'--{name} {getattr(self, name)} needs --pipeline_parallel_size of at least 2'
                for name, default in (('virtual_pipeline_size', 1), ('pipeline_layers', None))
                if getattr(self, name) != default
            ]
        return faults

    def _model_faults(self, model: Mapping[str, Any]) -> list[str]:
        faults = []
        heads, layers = model.get('num_attention_heads'), model.get('num_hidden_layers')
        if isinstance(heads, int) and self.tensor_parallel_size > heads:
            faults.append(
                f'--tensor_parallel_size {self.tensor_parallel_size} is more than the {heads} query heads of this '
                f'model: legal values are 1 to {heads}')
        stages = self.pipeline_parallel_size * self.virtual_pipeline_size
        if isinstance(layers, int) and stages > layers:
            faults.append(
                f'--pipeline_parallel_size {self.pipeline_parallel_size} x --virtual_pipeline_size '
                f'{self.virtual_pipeline_size} = {stages} stages are more than the {layers} layers of this model: '
                f'legal values are 1 to {layers} stages')
        elif isinstance(layers, int) and self.pipeline_layers is not None:
            try:
                layers_by_hand(self.pipeline_layers, layers, stages)
            except ValueError as error:
                faults.append(f'--pipeline_layers {error}')
        return faults


def layers_by_hand(text: str, num_layers: int, num_stages: int) -> list[int]:
    """'9,9,8,6' -> [9, 9, 8, 6].

    Raises:
        ValueError: if it is no list of positive numbers, of the wrong length or the wrong sum; the message says which.
    """
    words = [word.strip() for word in str(text).split(',')]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"'{text}' has to be whole numbers of at least 1 with commas between them, as in 9,9,8,6")
    counts = [int(word) for word in words]
    if len(counts) != num_stages:
        raise ValueError(f"'{text}' has {len(counts)} numbers, but there are {num_stages} stages "
                         '(pipeline_parallel_size x virtual_pipeline_size)')
    if sum(counts) != num_layers:
        raise ValueError(f"'{text}' adds up to {sum(counts)}, but the model has {num_layers} layers")
    return counts


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _multiples(size: int, near: int) -> str:
    lower = near // size * size
    return ' or '.join(str(n) for n in (lower, lower + size) if n)


def read_model_config(model: Any) -> Optional[dict[str, Any]]:
    """The config.json of a local model directory, None for all else: hub names, unreadable files (found out later)."""
    path = os.path.join(os.path.expanduser(model), 'config.json') if model and isinstance(model, str) else ''
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
