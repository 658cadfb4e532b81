"""Putting PEFT adapters on a partitioned model: new ones, and ones from a file.

PEFT takes foreign layers through `LoraConfig._register_custom_module`; everything else (target matching, names, config,
`modules_to_save`) is PEFT's.
"""
import os
import torch
import torch.distributed as dist
import warnings
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import CONFIG_NAME

from ..config import ConfigError
from ..mesh import ParallelMesh
from ..sharding import record_parameters
from ..tensor_parallel.embedding import VocabParallelEmbedding
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .layers import ColumnParallelLoraLinear, RowParallelLoraLinear, VocabParallelLoraEmbedding
from .state import check_complete, saved_tensors, tensor_names

CUSTOM_MODULES = {
    ColumnParallelLinear: ColumnParallelLoraLinear,
    RowParallelLinear: RowParallelLoraLinear,
    VocabParallelEmbedding: VocabParallelLoraEmbedding,
}

# Fields of PEFT's config that change what an adapter computes, or how it is trained, in ways of their own.
OTHER_MATHS = ('trainable_token_indices', 'alora_invocation_tokens', 'use_qalora', 'use_bdlora', 'arrow_config',
               'velora_config', 'monteclora_config', 'megatron_config')


def unsupported(config: LoraConfig) -> list[str]:
    """What a LoRA config asks for that adapters on partitioned layers do not do, one sentence each; empty if
    nothing.
    """
    if not isinstance(config, LoraConfig):
        return [f'adapters of type {config.peft_type.value} are not supported: only LoRA is']
    faults = []
    if config.use_dora:
        faults.append('use_dora=True (DoRA) is not supported: train with --use_dora false')
    if config.init_lora_weights not in (True, False, 'gaussian'):
        faults.append(f'init_lora_weights={config.init_lora_weights!r} needs the whole weight matrix and is not '
                      "supported: use --init_weights true, false or gaussian")
    if config.lora_bias:
        faults.append('lora_bias=True is not supported: train with it off')
    if getattr(config, 'target_parameters', None):
        faults.append('target_parameters (adapters on bare parameters) is not supported: use target_modules')
    if config.layer_replication:
        faults.append('layer_replication is not supported: remove it')
    faults += [
        f'{name}={value!r} is not supported: train without it' for name in OTHER_MATHS
        if (value := getattr(config, name, None))
    ]
    return faults


def untrainable(config: LoraConfig) -> list[str]:
    """The same for training: a head whose adapter is the embedding's, transposed, is no layer of its own."""
    faults = unsupported(config)
    if getattr(config, 'ensure_weight_tying', False):
        faults.append('ensure_weight_tying=True is not supported: merge this adapter with swift-megatron export '
                      '--merge_lora true and train a new one')
    return faults


def read_adapter_config(directory: str) -> PeftConfig:
    """The config of a PEFT directory.

    Raises:
        ConfigError: if there is none, or it cannot be read.
    """
    path = os.path.join(directory, CONFIG_NAME)
    if not os.path.isfile(path):
        raise ConfigError([
            f"'{directory}' holds no {CONFIG_NAME}: give a checkpoint-N folder of a LoRA run, or copy the file to this "
            'node'
        ])
    try:
        return PeftConfig.from_pretrained(directory)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"'{path}' cannot be read ({error!r}): copy the folder again"]) from error


def adapter_faults(directory: str) -> list[str]:
    """Why the adapters in a PEFT directory cannot be loaded, one sentence each; empty if they can."""
    try:
        config = read_adapter_config(directory)
    except ConfigError as error:
        return error.faults
    return [f"'{directory}': {fault}" for fault in untrainable(config)]


def _prepared(config: LoraConfig) -> LoraConfig:
    faults = untrainable(config)
    if faults:
        raise ConfigError(faults)
    config._register_custom_module(CUSTOM_MODULES)
    return config


def _same_random_state(mesh: ParallelMesh) -> None:
    """Every process draws the adapters with the numbers of process 0, whatever it drew before."""
    if mesh.world_size > 1:
        state = [torch.random.get_rng_state()]
        dist.broadcast_object_list(state, src=0)
        torch.random.set_rng_state(state[0])


def add_lora(model: torch.nn.Module, config: LoraConfig, mesh: ParallelMesh) -> PeftModel:
    """New adapters on a partitioned model, initialised with the numbers that the unsharded model would draw.

    Raises:
        ValueError: if the config asks for what is not supported.
    """
    _same_random_state(mesh)
    peft_model = get_peft_model(model, _prepared(config))
    record_parameters(peft_model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    return peft_model


def load_lora(model: torch.nn.Module, directory: str, mesh: ParallelMesh, *, is_trainable: bool = True) -> PeftModel:
    """Adapters from a PEFT directory, each rank keeping its slices.

    Raises:
        ConfigError: if the adapter is of a kind that is not supported, or incomplete.
    """
    config, names = _prepared(LoraConfig.from_pretrained(directory)), tensor_names(directory)
    config.inference_mode = not is_trainable
    with warnings.catch_warnings():  # modules of other pipeline stages are on the meta device and stay there
        warnings.filterwarnings('ignore', message='.*copying from a non-meta parameter.*')
        warnings.filterwarnings('ignore', message='Found missing adapter keys.*')  # an error below
        try:
            peft_model = PeftModel.from_pretrained(model, directory, is_trainable=is_trainable, config=config)
        except KeyError as error:  # PEFT looks up what modules_to_save name without asking
            raise ConfigError([
                f"'{directory}' lacks {error} of the adapter's modules_to_save: it is not a complete adapter of this "
                'configuration; give another checkpoint folder'
            ]) from error
    check_complete(saved_tensors(peft_model), names, directory)
    record_parameters(peft_model, rank=mesh.tensor_rank, size=mesh.tensor_parallel_size)
    return peft_model
