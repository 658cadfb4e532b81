"""`sft` and `pt`: ms-swift's pipeline with a partitioned model, own adapters on it, and this package's trainer."""
import os
import torch
import torch.distributed as dist
from datetime import timedelta
from peft import PeftModel
from swift.pipelines.train.pretrain import SwiftPretrain
from swift.pipelines.train.sft import SwiftSft
from swift.pipelines.train.tuner import get_modules_to_save, get_target_modules
from swift.tuners import LoraConfig
from swift.utils import HfConfigFactory, get_current_device, get_logger, seed_everything
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from typing import Any, Optional, Union

from ..arguments import PretrainConfig, TrainerConfig, own_trainer_classes, parse_arguments
from ..checkpoint.layout import split_fault
from ..errors import ConfigError
from ..lora.inject import add_lora, load_lora
from ..mesh import ParallelMesh
from ..model.accounting import owned_elements, unlike_one_card
from ..model.build import build_model
from ..model.precision import agreed_precision
from ..model.stages import follow_embedding, keep_own_stages, split_model
from ..quantization.base import QuantizationConfig
from ..sharding import record_parameters
from .report import layout_report, memory_report

logger = get_logger()


def load_partitioned(config: TrainerConfig, mesh: ParallelMesh) -> tuple[PreTrainedModel, Any]:
    """This rank's part of the model that the config names, with ms-swift's attributes, and the processor."""
    _, processor = config.get_model_processor(load_model=False, download_model=True)
    model_info = processor.model_info
    check_resumed_split(config, model_info.config, mesh)
    model = build_model(
        model_info.config,
        mesh,
        directory=model_info.model_dir,
        dtype=model_info.torch_dtype,
        device=torch.device(get_current_device()),
        trust_remote_code=True,
        chunks=config.virtual_pipeline_size,
        layers_by_hand=config.pipeline_layers,
        quantization=quantization_config(config))
    differing = unlike_one_card(model)
    if differing:
        logger.warning(
            f'{len(differing)} quantised weights, such as {differing[0]}, are cut through blocks of 64 values: they '
            'are quantised after the cut, and differ from those of QLoRA on one card by quantisation error.')
    for name in model.unused_checkpoint_names[:3]:
        logger.warning(f"'{name}' in the checkpoint has no place in the model and was not read.")
    model.model_info, model.model_meta, model.model_dir = model_info, processor.model_meta, model_info.model_dir
    if os.path.isfile(os.path.join(model.model_dir, 'generation_config.json')):
        model.generation_config = GenerationConfig.from_pretrained(model.model_dir)
    HfConfigFactory.set_config_attr(model.config, 'pad_token_id', processor.pad_token_id)
    return model, processor


def check_resumed_split(config: TrainerConfig, model_config: PretrainedConfig, mesh: ParallelMesh) -> None:
    """Whether balanced stages are those that the resumed optimizer states belong to; stages by hand are checked with
    the arguments.

    Raises:
        ConfigError: if they are not, with both splits.
    """
    by_hand = config.pipeline_layers is not None or config.pipeline_parallel_size == 1
    if not config.resume_from_checkpoint or config.resume_only_model or by_hand:
        return
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=True)
    split = split_model(model, mesh, config.virtual_pipeline_size, None)
    faults = split_fault(config.resume_from_checkpoint, split)
    if faults:
        raise ConfigError(faults)


def quantization_config(config: TrainerConfig) -> Optional[QuantizationConfig]:
    """How frozen linears are stored; None for dense ones."""
    if config.quant_method is None:
        return None
    return QuantizationConfig(
        format='int8' if config.quant_bits == 8 else config.bnb_4bit_quant_type,
        double=config.bnb_4bit_use_double_quant,
        compute_dtype=config.bnb_4bit_compute_dtype)


def create_mesh(config: TrainerConfig) -> ParallelMesh:
    """The process grid of the config; the processes of the default group are started already."""
    return ParallelMesh.create(
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        timeout=timedelta(seconds=config.ddp_timeout))


def lora_config(config: TrainerConfig, model: PreTrainedModel) -> LoraConfig:
    """The adapter that ms-swift's arguments describe."""
    return LoraConfig(
        task_type='CAUSAL_LM',
        r=config.lora_rank,
        target_modules=get_target_modules(config, model),
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        bias=config.lora_bias,
        modules_to_save=get_modules_to_save(config, model, config.task_type.upper()),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        lorap_lr_ratio=config.lorap_lr_ratio,
        init_lora_weights=config.init_weights,
        lora_dtype=config.lora_dtype)


def with_adapters(config: TrainerConfig, model: PreTrainedModel, mesh: ParallelMesh) -> PeftModel:
    """New adapters, or those that `--adapters` or `--resume_from_checkpoint` name, on a frozen base."""
    model.requires_grad_(False)
    source = config.resume_from_checkpoint or (config.adapters[0] if config.adapters else None)
    if source is None:
        peft_model = add_lora(model, lora_config(config, model), mesh)
    else:
        peft_model = load_lora(model, source, mesh)
    for parameter in peft_model.parameters():  # torch's gradient scaler refuses float16 gradients
        if parameter.requires_grad and parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()
    return peft_model


def count_parameters(model: nn.Module, mesh: ParallelMesh) -> tuple[int, int]:
    """Parameters and trainable parameters of the whole model, each element once."""
    counts = torch.tensor([owned_elements(model), owned_elements(model, trainable=True)])
    for group in (mesh.tensor_group, mesh.pipeline_group):
        if group is not None:
            counts = counts.to(get_current_device())
            dist.all_reduce(counts, group=group)
    total, trainable = counts.tolist()
    return total, trainable


def autocast_dtype(trainer: Any) -> Optional[torch.dtype]:
    """What accelerate casts products to; None where it does not."""
    device = trainer.args.device.type
    with trainer.accelerator.autocast():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class PartitionedPipeline:
    """What the pipelines of this package share; mixed in before ms-swift's."""
    mesh: ParallelMesh

    def _parse_args(self, args: Optional[Union[list[str], TrainerConfig]] = None) -> TrainerConfig:
        return args if isinstance(args, self.args_class) else parse_arguments(self.args_class, args)

    def _set_seed(self) -> None:
        seed_everything(self.args.seed)  # the same on all ranks: they draw the same adapters and dropout masks

    def _prepare_model_tokenizer(self, **_: Any) -> None:
        self.mesh = create_mesh(self.args)
        self.model, self.processor = load_partitioned(self.args, self.mesh)
        logger.info(f'model_info: {self.model.model_info}')
        self._prepare_generation_config()

    def prepare_model(self, args: TrainerConfig, model: PreTrainedModel, **kwargs: Any) -> nn.Module:
        if args.tuner_type == 'lora':
            model = with_adapters(args, model, self.mesh)
        else:
            model = super().prepare_model(args, model, **kwargs)
        trained = follow_embedding(model)
        if trained is not None:
            logger.info(
                f"The head is the token embedding in this model, and is {'trained' if trained else 'frozen'} with "
                'it: the embedding\'s name decides.')
        keep_own_stages(model, self.mesh)
        record_parameters(model, rank=self.mesh.tensor_rank, size=self.mesh.tensor_parallel_size)
        return model

    def _get_trainer_kwargs(self) -> dict[str, Any]:
        return {**super()._get_trainer_kwargs(), 'mesh': self.mesh}

    def train(self, trainer: Any) -> dict[str, Any]:
        total, trainable = count_parameters(self.model, self.mesh)
        self.train_msg['model_parameter_info'] = (
            f'{type(self.model).__name__}: {total / 1e6:.4f}M Params ({trainable / 1e6:.4f}M Trainable '
            f'[{100 * trainable / total:.4f}%]), over {self.mesh.model_parallel_size} processes.')
        logger.info(f"whole model: {self.train_msg['model_parameter_info']}")
        precision = agreed_precision(self.model, self.mesh, autocast_dtype(trainer))
        for line in [*layout_report(self.args, self.model, self.mesh, trainer.train_dataset), precision.describe()]:
            logger.info(line)
        result = super().train(trainer)
        for line in memory_report(self.model, trainer.optimizer, self.mesh):
            logger.info(line)
        return result

    def run(self) -> dict[str, Any]:
        with own_trainer_classes():
            result = super().run()
        if dist.is_initialized():
            dist.barrier()  # nobody leaves, and takes its connections along, while others have something to do
        return result


class MegatronSft(PartitionedPipeline, SwiftSft):
    """Supervised fine-tuning of a partitioned model."""
    args_class = TrainerConfig


class MegatronPretrain(PartitionedPipeline, SwiftPretrain):
    """Pre-training of a partitioned model."""
    args_class = PretrainConfig


def sft_main(args: Optional[Union[list[str], TrainerConfig]] = None) -> dict[str, Any]:
    """Fine-tunes; flags or a TrainerConfig in, ms-swift's result (checkpoints, metrics, log history) out.

    Raises:
        ConfigError: for input that cannot be run, before weights are read.
    """
    return MegatronSft(args).main()


def pt_main(args: Optional[Union[list[str], PretrainConfig]] = None) -> dict[str, Any]:
    """Pre-trains; as `sft_main`."""
    return MegatronPretrain(args).main()


class SwiftModel:
    """The partitioned model alone, without a trainer."""

    @staticmethod
    def from_pretrained(config: TrainerConfig) -> nn.Module:
        """This rank's part of the model that the config names, with its adapters if the config names some."""
        mesh = create_mesh(config)
        model, _ = load_partitioned(config, mesh)
        model = load_lora(model, config.adapters[0], mesh, is_trainable=False) if config.adapters else model
        keep_own_stages(model, mesh)
        return model
