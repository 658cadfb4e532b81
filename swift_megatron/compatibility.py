"""Which of ms-swift's own arguments do not go together with partitioned models, and what to type instead.

The rules look at values only, so that the launcher can check the bare flags before it starts processes, and the worker
the parsed arguments again, before weights are read. Needs no torch.
"""
import os
import re
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional


@dataclass(frozen=True)
class Rule:
    """An argument, the values with which it works, and what to do otherwise (after '--name value ')."""
    name: str
    works: Callable[[Any], bool]
    remedy: str


def _off(value: Any) -> bool:
    return not value


def _one_of(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in allowed


def _is_init(value: Any) -> bool:
    return value is None or str(value).lower() in ('true', 'false', 'gaussian')


ELEMENTWISE_OPTIMIZERS = ('adamw_torch', 'adamw_torch_fused', 'sgd', 'adagrad', 'rmsprop', 'adamw_bnb_8bit',
                          'adamw_8bit', 'paged_adamw_32bit', 'paged_adamw_8bit', 'paged_adamw', 'lion_32bit',
                          'lion_8bit', 'paged_lion_32bit', 'paged_lion_8bit')

RULES = (
    Rule('device_map', _off, 'places whole layers on devices and cannot be combined: leave it out and use '
         '--tensor_parallel_size'),
    Rule('max_memory', _off, 'belongs to device_map: leave it out and use --tensor_parallel_size'),
    Rule('deepspeed', _off, 'cannot be combined (ZeRO 2 and 3 shard what is sharded already): leave it out'),
    Rule('deepspeed_autotp_size', _off, 'is DeepSpeed\'s own tensor parallelism: use --tensor_parallel_size instead'),
    Rule('fsdp', _off, 'shards what is sharded already: leave it out and use --tensor_parallel_size'),
    Rule('sequence_parallel_size', _one_of(1),
         'is ms-swift\'s Ulysses parallelism and cannot be combined: leave it out'),
    Rule('use_ray', _off, 'cannot be combined: leave it out'),
    Rule('task_type', _one_of('causal_lm'), 'is not supported: only causal_lm is'),
    Rule('tuner_type', _one_of('lora', 'full'), 'is not supported: use --tuner_type lora or full'),
    Rule('train_type', _one_of('lora', 'full'), 'is not supported: use --tuner_type lora or full'),
    Rule('tuner_backend', _one_of('peft'), 'is not supported: use --tuner_backend peft'),
    Rule('use_swift_lora', _off, 'is not supported: leave it out'),
    Rule('use_dora', _off, '(DoRA) is not supported, it needs the norm of whole weight rows: leave it out'),
    Rule('init_weights', _is_init,
         '(PiSSA, OLoRA, LoftQ, LoRA-GA) factorises whole weights and is not supported: use true, '
         'false or gaussian'),
    Rule('target_parameters', _off, '(adapters on bare parameters) is not supported: use --target_modules'),
    Rule('quant_method', _one_of('bnb'), 'is not supported: use --quant_method bnb --quant_bits 4'),
    Rule('quant_bits', _one_of(4, 8), 'is not supported: use --quant_method bnb with --quant_bits 4 or 8'),
    Rule('new_special_tokens', _off, 'changes the vocabulary after loading: add the tokens to the model folder first'),
    Rule('init_strategy', _off, 'is not supported: load a complete checkpoint'),
    Rule('freeze_parameters_ratio', _off, 'counts parameters on one process: use --freeze_parameters with names'),
    Rule('use_liger_kernel', _off, 'replaces layers and loss by ones for whole models: leave it out'),
    Rule('loss_type', _off, 'computes on whole logits, which no process holds: leave it out'),
    Rule('eval_metric', _off,
         'computes on whole logits, which no process holds: leave it out (loss and token_acc are logged)'),
    Rule('predict_with_generate', _off, 'is not supported in training: use swift infer with the saved adapter'),
    Rule('eval_use_evalscope', _off, 'is not supported in training: use swift eval with the saved adapter'),
    Rule('use_flash_ckpt', _off, 'is not supported: leave it out'),
    Rule('use_galore', _off, 'needs whole gradient matrices: leave it out'),
    Rule('lisa_activated_layers', _off, 'is not supported: leave it out'),
    Rule('optimizer', _one_of('lorap'), 'is not supported: leave it out or use lorap'),
    Rule(
        'optim', _one_of(*ELEMENTWISE_OPTIMIZERS),
        'is not known to work on slices of a matrix: use adamw_torch, sgd, adagrad, '
        'rmsprop, lion_32bit or an 8-bit or paged variant of adamw or lion'),
    Rule('torch_compile', _off, 'is not supported: leave it out'),
    Rule('auto_find_batch_size', _off, 'restarts processes on their own: set --per_device_train_batch_size'),
    Rule('enable_jit_checkpoint', _off,
         'is not supported: leave it out (processes that get a signal at different steps '
         'would wait for each other)'),
    Rule(
        'save_on_each_node', _off, 'is not supported: leave it out (the first process writes the weights, and each '
        'node the states of its own ranks)'),
    Rule('safe_serialization', lambda value: value is None or bool(value), 'is not supported: files are safetensors'),
)


def faults(arguments: Mapping[str, Any]) -> list[str]:
    """What cannot be combined among the given arguments (name -> value), one sentence each."""
    found = [
        f'--{rule.name} {arguments[rule.name]} {rule.remedy}' for rule in RULES
        if rule.name in arguments and not rule.works(arguments[rule.name])
    ]
    if arguments.get('quant_bits') and not arguments.get('quant_method'):
        found.append(f'--quant_bits {arguments["quant_bits"]} does nothing without a method: add --quant_method bnb')
    if arguments.get('quant_method') and not arguments.get('quant_bits'):
        found.append(f'--quant_method {arguments["quant_method"]} needs --quant_bits 4')
    if arguments.get('quant_method') and arguments.get('tuner_type') == 'full':
        found.append('--tuner_type full cannot train a quantised model: use --tuner_type lora')
    found += float16_faults(arguments.get('tuner_type'), arguments.get('torch_dtype'))
    found += _adapter_faults(arguments)
    if arguments.get('label_smoothing_factor') and arguments.get('enable_dft_loss'):
        found.append('--label_smoothing_factor and --enable_dft_loss contradict each other: use one of them')
    return found


def float16_faults(tuner_type: Any, torch_dtype: Any) -> list[str]:
    """Full tuning of float16 weights: torch's scaler cannot unscale gradients that are float16 themselves.

    Args:
        tuner_type: As in the arguments.
        torch_dtype: Name of the weights' dtype, as in the arguments or found in the model's config.
    """
    if tuner_type != 'full' or torch_dtype != 'float16':
        return []
    return [
        '--tuner_type full cannot train float16 weights, whose gradients cannot be unscaled: add --torch_dtype '
        'float32 --fp16 true (float32 weights, float16 products) or --torch_dtype bfloat16'
    ]


def several_adapters(value: Any) -> Optional[str]:
    """A sentence if the value of --adapters names more than one."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return None
    return (f'--adapters {" ".join(map(str, value))} names {len(value)} adapters, of which only one can be used: give '
            'one, and merge the others into the base first, with swift-megatron export --merge_lora true')


def _adapter_faults(arguments: Mapping[str, Any]) -> list[str]:
    """Adapters that a run would start without."""
    adapters = arguments.get('adapters')
    if not adapters:
        return []
    several = several_adapters(adapters)
    if several:
        return [several]
    name = adapters[0] if isinstance(adapters, (list, tuple)) else adapters
    found = []
    folder = os.path.expanduser(str(name))
    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, 'adapter_config.json')):
        found.append(
            f"--adapters '{name}' holds no adapter_config.json: give a checkpoint-N folder of a LoRA run (a whole "
            'model goes to --model)')
    if arguments.get('tuner_type') == 'full':
        found.append(
            f'--adapters {name} does nothing with --tuner_type full, which trains the weights of --model: merge '
            'it first, with swift-megatron export --merge_lora true, and give the merged folder as --model')
    if arguments.get('resume_from_checkpoint'):
        found.append(
            f'--adapters {name} does nothing with --resume_from_checkpoint '
            f'{arguments["resume_from_checkpoint"]}, which goes on with its own adapter: leave one of them out')
    return found


@dataclass(frozen=True)
class _FirstQwen:
    """A size of the first generation, by its hidden size, and what came after it."""
    hidden_size: int
    size: str
    successors: str


FIRST_QWENS = (
    _FirstQwen(2048, '1.8B', 'Qwen/Qwen1.5-1.8B, Qwen/Qwen2.5-1.5B or Qwen/Qwen3-1.7B'),
    _FirstQwen(4096, '7B', 'Qwen/Qwen1.5-7B, Qwen/Qwen2.5-7B or Qwen/Qwen3-8B'),
    _FirstQwen(5120, '14B', 'Qwen/Qwen1.5-14B, Qwen/Qwen2.5-14B or Qwen/Qwen3-14B'),
    _FirstQwen(8192, '72B', 'Qwen/Qwen1.5-72B, Qwen/Qwen2.5-72B or Qwen/Qwen3-32B (the largest dense one)'),
)
FIRST_QWEN_NAME = re.compile(r'(?:.*/)?Qwen-(?:(VL|Audio)|(\d+(?:[._]\d+)?B))(?:-.*)?', re.IGNORECASE)


def model_faults(model: Any, config: Optional[Mapping[str, Any]]) -> list[str]:
    """Why a model cannot be split, as far as its name tells or the content of its config.json, where that is at hand.

    First-generation Qwen is remote code for another transformers, without a plan; ms-swift knows it as `qwen`.
    """
    if config is not None:
        first = config.get('model_type') == 'qwen' or 'QWenLMHeadModel' in (config.get('architectures') or ())
        known = [qwen for qwen in FIRST_QWENS if qwen.hidden_size == config.get('hidden_size')]
    else:
        match = FIRST_QWEN_NAME.fullmatch(model) if isinstance(model, str) else None
        first = match is not None
        size = (match[2] or '7B').replace('_', '.').upper() if match else ''
        known = [qwen for qwen in FIRST_QWENS if qwen.size == size]
    if not first:
        return []
    successors = known[0].successors if known else 'Qwen1.5, Qwen2.5 or Qwen3 of that size'
    return [
        f"model '{model}' is a first-generation Qwen, whose code comes with its weights and cannot be split: use "
        f'{successors}, as they are or their chat forms'
    ]
