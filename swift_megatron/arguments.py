"""`TrainerConfig`: ms-swift's SftArguments with the parallel fields, and the checks before weights are read."""
import argparse
import difflib
import math
import torch
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from swift.arguments import PretrainArguments, SftArguments
from swift.trainers import TrainerFactory
from swift.utils import get_dist_setting, parse_args
from transformers import AutoConfig
from typing import Any, Iterator, NoReturn, Optional

from . import compatibility
from .checkpoint.layout import layout_fault
from .config import ParallelFields, read_model_config
from .ending import groups_end_with_process
from .errors import ConfigError, PlanError
from .lora.inject import adapter_faults
from .model.plan import decoder_plan


@contextmanager
def own_trainer_classes() -> Iterator[None]:
    """ms-swift's factory hands out this package's trainer and training arguments for causal LMs."""
    replaced = {
        'TRAINER_MAPPING': 'swift_megatron.trainers.sft.ParallelSeq2SeqTrainer',
        'TRAINING_ARGS_MAPPING': 'swift_megatron.trainers.arguments.ParallelSeq2SeqTrainingArguments',
    }
    before = {name: dict(getattr(TrainerFactory, name)) for name in replaced}
    try:
        for name, path in replaced.items():
            getattr(TrainerFactory, name)['causal_lm'] = path
        yield
    finally:
        for name, mapping in before.items():
            setattr(TrainerFactory, name, mapping)


@dataclass
class ParallelSftFields(ParallelFields):
    """The parallel fields, accepted spellings, and what has to happen round ms-swift's own `__post_init__`."""
    model_id: Optional[str] = field(default=None, metadata={'help': 'Another spelling of model.'})
    use_flash_attn: Optional[bool] = field(
        default=None, metadata={'help': 'True: another spelling of attn_impl=flash_attn.'})

    def __post_init__(self) -> None:
        self._take_other_spellings()
        num_processes = get_dist_setting()[2]
        given = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        model = read_model_config(self.model)
        faults = self.faults(num_processes, model) + compatibility.faults(given)
        faults += compatibility.model_faults(self.model, model)
        if self.resume_from_checkpoint and not self.resume_only_model and not faults:
            faults += layout_fault(self.resume_from_checkpoint, self)
        if faults:
            raise ConfigError(faults)
        replicas = num_processes // self.model_parallel_size
        if self.gradient_accumulation_steps is None:  # ms-swift's default, with replicas in place of processes
            samples = self.per_device_train_batch_size * replicas * self.micro_batches
            self.gradient_accumulation_steps = max(1, math.ceil(16 / samples))
        if num_processes > 1:
            if not torch.cuda.is_available():
                self.use_cpu = True  # accelerate takes processes on a CPU for separate runs without it
            self.ddp_backend = self.ddp_backend or ('nccl' if torch.cuda.is_available() else 'gloo')
        with own_trainer_classes(), groups_end_with_process():
            super().__post_init__()
        # The Trainer accumulates micro-batches one after the other; a pipeline runs them together.
        self.training_args.num_micro_batches = self.micro_batches
        self.training_args.gradient_accumulation_steps *= self.micro_batches
        self._check_model()

    def _take_other_spellings(self) -> None:
        if self.model_id is not None:
            if self.model is not None and self.model != self.model_id:
                raise ConfigError([f'--model {self.model} and --model_id {self.model_id} differ: give one of them'])
            self.model = self.model_id
        if self.use_flash_attn:
            if self.attn_impl not in (None, 'flash_attn'):
                raise ConfigError([f'--use_flash_attn true and --attn_impl {self.attn_impl} differ: give one of them'])
            self.attn_impl = 'flash_attn'

    def _init_adapters(self) -> None:
        """ms-swift looks the adapter up, on a hub if it is no folder."""
        try:
            super()._init_adapters()
        except (OSError, ValueError) as error:
            raise ConfigError([f"--adapters {self.adapters} cannot be used: {_first_line(error)}"]) from error

    def _init_model_info(self) -> torch.dtype:
        """ms-swift looks the model up, on a hub if it is no folder, and knows its type or not."""
        try:
            return super()._init_model_info()
        except (OSError, ValueError) as error:
            raise ConfigError([f"model '{self.model}' cannot be used: {_first_line(error)}"]) from error

    def _check_model(self) -> None:
        """What the model's own config decides; weights are read later."""
        faults = []
        if self.model_meta.is_multimodal:
            faults.append(f"model '{self.model}' is multimodal, which is not supported: use a text model")
        directory = self.model_info.model_dir
        config = read_model_config(directory) or {}  # ms-swift keeps no config object
        if not faults:  # a hub's config is at hand by now, its weights are not
            faults += compatibility.model_faults(self.model, config) or _plan_faults(directory, self.model)
        if config.get('quantization_config'):
            method = config['quantization_config'].get('quant_method', 'unknown')
            faults.append(f"model '{self.model}' is stored quantised ({method}), which cannot be cut: give the 16-bit "
                          'checkpoint that it was made from, with --quant_method bnb --quant_bits 4')
        faults += self._model_faults(config)
        faults += compatibility.float16_faults(self.tuner_type, str(self.torch_dtype).removeprefix('torch.'))
        if self.tuner_type == 'lora':
            for directory in [self.resume_from_checkpoint] if self.resume_from_checkpoint else self.adapters:
                faults += adapter_faults(directory)
        if faults:
            raise ConfigError(faults)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition('\n')[0]


def _plan_faults(directory: str, model: str) -> list[str]:
    """Why the architecture cannot be split, as far as its config tells."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    except Exception as error:  # whatever the code raises that comes with a model
        return [
            f"the config of model '{model}' cannot be loaded ({type(error).__name__}: {_first_line(error)}): give a "
            'model that this transformers knows'
        ]
    try:
        decoder_plan(config, f"model '{model}' (model_type {config.model_type})")
    except PlanError as error:
        return [str(error)]
    return []


@dataclass
class TrainerConfig(ParallelSftFields, SftArguments):
    """ms-swift's `SftArguments` plus the parallel fields; every argument keeps its name and meaning."""

    def __post_init__(self) -> None:
        ParallelSftFields.__post_init__(self)


@dataclass
class PretrainConfig(ParallelSftFields, PretrainArguments):
    """The same for `pt`: ms-swift's `PretrainArguments` plus the parallel fields."""

    def __post_init__(self) -> None:
        ParallelSftFields.__post_init__(self)


def parse_arguments(config_class: type, argv: Optional[list[str]]) -> Any:
    """An instance of the config class from flags.

    Raises:
        ConfigError: for flags that do not exist, with the nearest that do, and for whatever the config finds wrong.
    """
    known = [spec.name for spec in fields(config_class)]
    for name in _flag_names(argv or []):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
            hint = f': did you mean {" or ".join("--" + n for n in near)}?' if near else ''
            raise ConfigError([f"there is no argument '--{name}'{hint}"])
    with _brief_parser():
        config, rest = parse_args(config_class, argv)
    if rest and not config.ignore_args_error:
        raise ConfigError([f"'{' '.join(rest)}' belongs to no argument"])
    return config


@contextmanager
def _brief_parser() -> Iterator[None]:
    """argparse says in one sentence what is wrong with a value, without pages of usage."""

    def error(_: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ConfigError([message])

    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before


def _flag_names(argv: list[str]) -> list[str]:
    return [word[2:].partition('=')[0].replace('-', '_') for word in argv if word.startswith('--') and len(word) > 2]
