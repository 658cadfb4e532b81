"""What a LoRA adapter changes in its base: W -> (W or its trained copy) + s B A, tensor by tensor.

Which tensors an adapter's files have to hold, their shapes and their scalings are what PEFT makes of its config on the
model, which may be on the meta device: nothing is decided by names.

O output, I input features, R rank, V vocabulary, H hidden size.
"""
import os
import torch
import warnings
from dataclasses import dataclass, field
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, load_peft_weights
from safetensors import SafetensorError
from transformers import PreTrainedModel
from typing import Callable, Optional

from ..errors import MergeError
from ..lora.inject import read_adapter_config, unsupported

PREFIX = 'base_model.model.'
ADAPTER = 'default'
START_ALONE = ('eva', 'orthogonal', 'mica')  # initialisations that leave the base as it is
AGAIN = 'copy the whole checkpoint folder again'


@dataclass
class Change:
    """What becomes of one tensor of the base.

    Args:
        copy: The trained tensor that stands in its place (modules_to_save, biases), if there is one.
        delta: s B A in float32, computed when it is needed, if it has adapters.
    """
    copy: Optional[torch.Tensor] = None
    delta: Optional[Callable[[], torch.Tensor]] = None

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The changed tensor, in the base's dtype."""
        whole = tensor if self.copy is None else self.copy
        if self.delta is not None:
            whole = whole.float() + self.delta()
        return whole.to(tensor.dtype)


@dataclass(kw_only=True)
class Ends:
    """The embedding and the head of a causal LM by the names of their weights."""
    embedding: str
    head: str
    tied: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> 'Ends':
        names = {module: path for path, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        return cls(
            embedding=f'{names[embedding]}.weight', head=f'{names[head]}.weight', tied=head.weight is embedding.weight)


@dataclass(kw_only=True)
class _Expected:
    """Tensors of an adapter's file, by name: those it has to have, and the base's own that PEFT may store with them."""
    shapes: dict[str, tuple[int, ...]]
    ends: dict[str, str] = field(default_factory=dict)  # name in the file -> parameter


def read_changes(directory: str, model: PreTrainedModel, ends: Ends) -> dict[str, Change]:
    """Parameter -> what the adapter in a PEFT directory does to it.

    Args:
        directory: The adapter.
        model: Its base, best on the meta device. PEFT's layers are put into it.
        ends: The model's embedding and head.

    Raises:
        ConfigError: if it is no LoRA adapter that can be merged, incomplete, or another model's.
    """
    config = _plain_lora(directory)
    weights = _read_weights(directory)
    try:
        with warnings.catch_warnings():  # on ties, and on bases without a name
            warnings.simplefilter('ignore')
            peft_model = get_peft_model(model, config, adapter_name=ADAPTER)
    except ValueError as error:
        raise MergeError(f"'{directory}' does not fit the base model ({error}): it belongs to another model") from error
    expected = _expected(peft_model, ends)
    _check(weights, expected, directory)
    changes: dict[str, Change] = {}
    for name, tensor in weights.items():
        if name in expected.ends:  # the base's own tensor, which both ends hold if they are tied
            for end in {ends.embedding, ends.head} if ends.tied else {expected.ends[name]}:
                changes.setdefault(end, Change(copy=tensor))
    for name, tensor in weights.items():
        if name not in expected.ends and '.lora_' not in name:
            changes[name.replace('.base_layer.', '.')] = Change(copy=tensor)
    for path, layer in _lora_layers(peft_model):
        changes.setdefault(f'{path}.weight', Change()).delta = _delta(path, layer, weights)
    return changes


def _plain_lora(directory: str) -> LoraConfig:
    config = read_adapter_config(directory)
    if getattr(config, 'init_lora_weights', True) in START_ALONE:
        config.init_lora_weights = True
    faults = [fault.partition(':')[0] for fault in unsupported(config)]
    if faults:
        raise MergeError(f"'{directory}' is no plain LoRA adapter: {'; '.join(faults)}; merge it with swift export "
                         '--merge_lora true')
    return config


def _read_weights(directory: str) -> dict[str, torch.Tensor]:
    if not any(os.path.isfile(os.path.join(directory, name)) for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        raise MergeError(f"'{directory}' holds no {SAFETENSORS_WEIGHTS_NAME}: {AGAIN}")
    try:
        weights = load_peft_weights(directory, device='cpu')
    except SafetensorError as error:
        raise MergeError(f"'{directory}/{SAFETENSORS_WEIGHTS_NAME}' cannot be read ({error}): {AGAIN}") from error
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}


def _lora_layers(peft_model: PeftModel) -> list[tuple[str, LoraLayer]]:
    return [(path, module) for path, module in peft_model.get_base_model().named_modules()
            if isinstance(module, LoraLayer)]


def _expected(peft_model: PeftModel, ends: Ends) -> _Expected:
    state = get_peft_model_state_dict(peft_model, adapter_name=ADAPTER, save_embedding_layers=False)
    shapes = {name.removeprefix(PREFIX): tuple(tensor.shape) for name, tensor in state.items()}
    stored = {
        name: end
        for end in (ends.embedding, ends.head)
        for name in (end, f'{end.removesuffix(".weight")}.base_layer.weight') if name not in shapes
    }
    return _Expected(shapes=shapes, ends=stored)


def _check(weights: dict[str, torch.Tensor], expected: _Expected, directory: str) -> None:
    foreign = [name for name in weights if name not in expected.shapes and name not in expected.ends]
    if foreign:
        raise MergeError(
            f"'{directory}' changes '{foreign[0]}', which its config on this base does not: it belongs to another model"
        )
    missing = [name for name in expected.shapes if name not in weights]
    if missing:
        raise MergeError(f"'{directory}' lacks {len(missing)} of the {len(expected.shapes)} tensors that its config "
                         f"names, such as '{missing[0]}': {AGAIN}")
    for name, shape in expected.shapes.items():
        if tuple(weights[name].shape) != shape:
            raise MergeError(
                f"'{name}' has shape {tuple(weights[name].shape)} in '{directory}', but its config on this "
                f'base makes it {shape}: it belongs to another model')


def _delta(path: str, layer: LoraLayer, weights: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    scaling = layer.scaling[ADAPTER]
    if isinstance(layer, Embedding):
        a, b = weights[f'{path}.lora_embedding_A'], weights[f'{path}.lora_embedding_B']
        return lambda: (b.float() @ a.float()).T * scaling  # (H, R) (R, V) -> (V, H)
    if not isinstance(layer, Linear):
        raise MergeError(f"'{path}' has adapters on a {type(layer).__name__}: merge it with swift export "
                         '--merge_lora true')
    a, b = weights[f'{path}.lora_A.weight'], weights[f'{path}.lora_B.weight']
    if layer.fan_in_fan_out:
        return lambda: (b.float() @ a.float()).T * scaling  # (O, R) (R, I) -> (I, O)
    return lambda: (b.float() @ a.float()) * scaling  # (O, R) (R, I) -> (O, I)
