"""Each rank holds, reads and needs memory for its own slices of a checkpoint, and for nothing else.

A failure means that a model which should fit on the cards does not, that the host runs out of memory while it loads, or
that some number of the checkpoint is not where the plain model has it.
"""
import json
import math
import os
import pytest
import shutil
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from typing import Any

from swift_megatron.checkpoint.full import save_full_model
from swift_megatron.mesh import ParallelMesh
from swift_megatron.model import loading
from swift_megatron.model.build import build_model
from swift_megatron.sharding import spec_of
from tests.architectures import small_config
from tests.harness import launch
from tests.tiny_models import FAMILIES, FFN, HEAD, WIDE_HEAD, Case, load_config, make_checkpoint

WIDE = {'qwen3', 'mistral', 'gemma2', 'gemma3_text', 'glm4'}  # heads of WIDE_HEAD


def rank_of(size: int, rank: int) -> ParallelMesh:
    """The mesh as one rank sees it; loading runs no collective, so that one process can load for all."""
    return ParallelMesh(tensor_parallel_size=size, rank=rank)


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """A checkpoint of each family, 9 query and 3 key/value heads, vocabulary 127."""
    directory = tmp_path_factory.mktemp('checkpoints')
    return {family: make_checkpoint(case_of(family), str(directory / family)) for family in FAMILIES}


def case_of(family: str, **changes: Any) -> Case:
    return Case(family=family, **{**dict(heads=9, key_value_heads=3), **changes})


# 9 query and 3 key/value heads by hand: heads of each rank
HEADS = {2: ([6, 3], [2, 1]), 3: ([3, 3, 3], [1, 1, 1])}
VOCABULARY = {2: [64, 63], 3: [43, 42, 42]}
NEURONS = {2: [48, 48], 3: [32, 32, 32]}


def elements_by_hand(family: str, size: int, rank: int) -> int:
    """Parameters of two layers and untied embeddings; replicated are norms and the biases of row-parallel layers."""
    hidden, head = 9 * HEAD, WIDE_HEAD if family in WIDE else HEAD
    queries, key_values = (head * counts[rank] for counts in HEADS[size])
    neurons, vocabulary = NEURONS[size][rank], VOCABULARY[size][rank]
    attention = hidden * (queries + 2 * key_values) + queries * hidden
    biases = queries + 2 * key_values
    mlp = 3 * hidden * neurons
    norms = 2 * hidden
    if family == 'llama':  # biases everywhere
        attention += biases + hidden
        mlp += 2 * neurons + hidden
    elif family == 'qwen2':
        attention += biases
    elif family == 'qwen3':
        norms += 2 * head
    elif family in ('gemma2', 'glm4'):
        norms = 4 * hidden
        attention += biases if family == 'glm4' else 0
    elif family == 'gemma3_text':
        norms = 4 * hidden + 2 * head
    elif family == 'olmo2':
        norms += queries + key_values
    elif family == 'granite':
        attention += biases + hidden
    elif family == 'cohere':  # one norm of the input; norms with a weight for each own head
        norms = hidden + queries + key_values
    elif family == 'starcoder2':  # two linears with biases, norms with biases
        attention += biases + hidden
        mlp = 2 * hidden * neurons + neurons + hidden
        norms = 4 * hidden
    final = 2 * hidden if family == 'starcoder2' else hidden
    return 2 * (attention + mlp + norms) + final + 2 * vocabulary * hidden


@pytest.mark.parametrize('size', HEADS)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_rank_holds_its_ranges_and_the_norms(checkpoints, family, size):
    """A layer would be held whole on every rank: no memory saved."""
    for rank in range(size):
        model = build_model(
            load_config(checkpoints[family], case_of(family)), rank_of(size, rank), directory=checkpoints[family])
        held = sum(p.untyped_storage().nbytes()
                   for p in model.parameters())  # a slice that keeps the whole alive counts whole
        assert held == 4 * elements_by_hand(family, size, rank), rank


def test_nothing_stays_mapped(checkpoints, tmp_path):
    """Overwriting or moving the checkpoint during the run would change the weights, or kill the process."""
    directory = str(shutil.copytree(checkpoints['phi3'], tmp_path / 'copy'))
    config = load_config(directory, case_of('phi3'))
    models = [build_model(config, rank_of(2, rank), directory=directory) for rank in (0, 1)]
    with open('/proc/self/maps', encoding='utf-8') as file:
        assert not [line for line in file if directory in line]
    assert all(parameter.is_contiguous() for model in models for parameter in model.parameters())


def whole_model(family: str, directory: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=case_of(family).config()._attn_implementation)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('family', FAMILIES)
def test_values_are_those_of_from_pretrained(checkpoints, family, dtype):
    """Rotary frequencies, embedding scales or slices would differ from the plain model's, and so would all outputs."""
    whole = whole_model(family, checkpoints[family], dtype)
    parameters, buffers = dict(whole.named_parameters(remove_duplicate=False)), dict(whole.named_buffers())
    for rank in range(2):
        config = load_config(checkpoints[family], case_of(family), dtype)
        model = build_model(config, rank_of(2, rank), directory=checkpoints[family])
        for name, parameter in model.named_parameters():
            assert parameter.dtype == dtype and torch.equal(parameter, spec_of(parameter).slice(parameters[name])), name
        own = dict(model.named_buffers())
        assert set(own) == set(buffers)
        for name, buffer in buffers.items():
            assert own[name].dtype == buffer.dtype or name.endswith('embed_scale'), name
            assert torch.equal(own[name].to(buffer.dtype), buffer), name
        assert not model.training and model.unused_checkpoint_names == []
        assert not [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]


def test_tied_embeddings_are_one_parameter(tmp_path):
    """The vocabulary would be held twice, and its two copies would be trained apart."""
    directory = make_checkpoint(case_of('llama', tied=True), str(tmp_path))
    model = build_model(load_config(directory, case_of('llama', tied=True)), rank_of(2, 0), directory=directory)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    held = sum(p.numel() for p in model.parameters())
    assert held == elements_by_hand('llama', 2, 0) - 64 * 9 * HEAD
    assert spec_of(model.get_output_embeddings().weight).name == 'model.embed_tokens.weight'


def test_buffers_in_the_checkpoint_are_read_and_written(tmp_path):
    """Constants of Apertus' activation would be reset to their defaults, or be arbitrary memory."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(small_config('apertus'), dtype=torch.float64)
    whole.model.layers[1].mlp.act_fn.beta.fill_(0.75)
    whole.save_pretrained(tmp_path / 'first')
    model = build_model(whole.config, ParallelMesh(), directory=str(tmp_path / 'first'))
    assert model.model.layers[1].mlp.act_fn.beta == 0.75 and model.model.layers[0].mlp.act_fn.beta == 0.5
    os.makedirs(tmp_path / 'second')
    save_full_model(model, str(tmp_path / 'second'), ParallelMesh())
    first, second = (load_file(tmp_path / name / 'model.safetensors') for name in ('first', 'second'))
    assert set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
    del first['model.layers.1.mlp.act_fn.beta']
    save_file(first, tmp_path / 'second' / 'model.safetensors')
    with pytest.raises(ValueError, match="buffer 'beta' of XIELUActivation is not in the checkpoint"):
        build_model(whole.config, ParallelMesh(), directory=str(tmp_path / 'second'))


# ---- What is read ----


class CountingSlice:
    """safetensors' slice, noting which elements are asked for."""

    def __init__(self, inner: Any, name: str, read: dict[str, int]) -> None:
        self.inner, self.name, self.read = inner, name, read

    def get_shape(self) -> list[int]:
        return self.inner.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.inner[index]
        self.read[self.name] = self.read.get(self.name, 0) + part.numel()
        return part


@pytest.fixture
def elements_read(monkeypatch) -> dict[str, int]:
    """Elements read so far, by tensor."""
    read: dict[str, int] = {}

    class CountingFile:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> 'CountingFile':
            self.file.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self.file.__exit__(*exception)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(self.file.get_slice(name), name, read)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.file.get_tensor(name)
            read[name] = read.get(name, 0) + tensor.numel()
            return tensor

    monkeypatch.setattr(loading, 'safe_open', CountingFile)
    return read


@pytest.mark.parametrize('size', HEADS)
@pytest.mark.parametrize('family', ['llama', 'phi3', 'olmo2', 'cohere'])
def test_a_rank_reads_its_own_ranges_once(checkpoints, elements_read, family, size):
    """Eight ranks would read eight whole copies of a 140 GB checkpoint from a shared disk."""
    for rank in range(size):
        elements_read.clear()
        model = build_model(
            load_config(checkpoints[family], case_of(family)), rank_of(size, rank), directory=checkpoints[family])
        assert elements_read == {name: parameter.numel() for name, parameter in model.named_parameters()}
        assert sum(elements_read.values()) == elements_by_hand(family, size, rank)


# ---- Memory ----

BIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=6,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=4096,
    tie_word_embeddings=False,
    dtype='float32')
LARGEST = 4 * 1024 * 4096  # bytes of an MLP matrix, of the embedding, of the head


def status_kib(field: str) -> int:
    with open('/proc/self/status', encoding='utf-8') as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f'{field}:'))


def peak_while_loading(small: str, big: str) -> tuple[int, int]:
    """(bytes of memory that loading takes at its peak, bytes of the rank's parameters)

    A small model is loaded first: code that runs for the first time brings pages of the libraries into the process,
    which are part of the baseline of an import.
    """
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    build_model(load_config(small, case_of('llama')), mesh, directory=small)
    dist.barrier()
    with open('/proc/self/clear_refs', 'w', encoding='utf-8') as file:
        file.write('5')  # VmHWM starts anew
    baseline = status_kib('VmRSS')
    model = build_model(BIG, mesh, directory=big)
    peak = status_kib('VmHWM')
    return 1024 * (peak - baseline), sum(p.numel() * p.element_size() for p in model.parameters())


def test_peak_memory_while_loading(checkpoints, tmp_path):
    """Loading eight slices of a model would take the memory of eight whole models, and be killed.

    At most the own shard, two of the largest tensors (one as mapped from the file, one as its slice is made) and 10 %.
    """
    with torch.device('meta'):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(BIG).named_parameters()}
    total = 4 * sum(map(math.prod, shapes.values()))
    assert 400e6 < total < 450e6 and max(map(math.prod, shapes.values())) * 4 == LARGEST
    save_in_files(shapes, tmp_path)
    for peak, own in launch(4, peak_while_loading, checkpoints['llama'], str(tmp_path)):
        norms = 4 * 13 * 1024
        assert own == (total - norms) // 4 + norms
        assert own <= peak <= 1.1 * (own + 2 * LARGEST), f'{peak / 1e6:.0f} MB for {own / 1e6:.0f} MB'


def save_in_files(shapes: dict[str, torch.Size], directory: Any) -> None:
    """A random checkpoint in files of 100 MB, as real ones are cut, one tensor in memory at a time."""
    weight_map, current, number = {}, {}, 0
    for name, shape in [*shapes.items(), ('', torch.Size())]:
        if current and (not name or sum(t.numel() for t in current.values()) > 25e6):
            save_file(current, directory / f'model-{number}.safetensors', metadata={'format': 'pt'})
            weight_map.update(dict.fromkeys(current, f'model-{number}.safetensors'))
            current, number = {}, number + 1
        if name:
            current[name] = torch.full(shape, 0.01)
    (directory / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
    BIG.save_pretrained(directory)


# ---- Errors ----


def damaged(directory: str, target: Any, change: Any) -> str:
    """A copy of a checkpoint with its tensors changed."""
    shutil.copytree(directory, target)
    tensors = load_file(target / 'model.safetensors')
    change(tensors)
    save_file(tensors, target / 'model.safetensors', metadata={'format': 'pt'})
    return str(target)


def loading_fails(directory: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(load_config(directory, case_of('llama')), rank_of(2, 0), directory=directory)


def test_missing_tensors(checkpoints, tmp_path):
    """A layer would start from arbitrary memory."""

    def change(tensors: dict) -> None:
        del tensors['model.layers.1.self_attn.q_proj.weight'], tensors['model.norm.weight']

    directory = damaged(checkpoints['llama'], tmp_path / 'copy', change)
    loading_fails(
        directory, f"'{directory}' lacks 2 parameters of the model, such as model.layers.1.self_attn.q_proj.weight, "
        'model.norm.weight: it is not a complete checkpoint')


@pytest.mark.parametrize(
    'name, shape',
    [
        ('model.layers.0.mlp.up_proj.weight', (FFN + 2, 9 * HEAD)),  # a cut tensor
        ('model.layers.1.input_layernorm.weight', (7, )),  # a whole one
        ('model.embed_tokens.weight', (128, 9 * HEAD)),  # a padded vocabulary
    ])
def test_wrong_shapes(checkpoints, tmp_path, name, shape):
    """Slices would be cut at the wrong places, silently, since each slice alone has the right shape."""
    directory = damaged(checkpoints['llama'], tmp_path / 'copy',
                        lambda tensors: tensors.update({name: torch.zeros(shape)}))
    loading_fails(
        directory, f"'{name}' has shape \\({', '.join(map(str, shape))},?\\) in '{directory}', but the model's config "
        'makes it .*: config.json and weights do not belong together')


def test_checkpoint_without_safetensors(checkpoints, tmp_path):
    """A .bin checkpoint would be unpickled whole on every rank."""
    directory = shutil.copytree(checkpoints['llama'], tmp_path / 'copy')
    os.replace(directory / 'model.safetensors', directory / 'pytorch_model.bin')
    loading_fails(
        str(directory), f"'{directory}' holds no model.safetensors or model.safetensors.index.json.*"
        'convert them with AutoModelForCausalLM')


def test_file_of_the_index_that_is_not_there(checkpoints, tmp_path):
    """An interrupted download would fail with the name of an internal tensor, not of the file that is missing."""
    directory = shutil.copytree(checkpoints['llama'], tmp_path / 'copy')
    names = list(load_file(directory / 'model.safetensors'))
    os.remove(directory / 'model.safetensors')
    (directory / 'model.safetensors.index.json').write_text(
        json.dumps({'weight_map': dict.fromkeys(names, 'model-00001-of-00002.safetensors')}))
    with pytest.raises(Exception, match='model-00001-of-00002.safetensors'):
        build_model(load_config(str(directory), case_of('llama')), rank_of(2, 0), directory=str(directory))


def test_checkpoint_of_the_bare_decoder(checkpoints, tmp_path):
    """A checkpoint saved without the causal LM's prefix, which plain transformers loads, would be refused."""

    def change(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith('model.')]:
            tensors[name.removeprefix('model.')] = tensors.pop(name)

    directory = damaged(checkpoints['llama'], tmp_path / 'copy', change)
    model = build_model(load_config(directory, case_of('llama')), rank_of(2, 1), directory=directory)
    expected = whole_model('llama', checkpoints['llama']).model.embed_tokens.weight[64:]
    assert torch.equal(model.model.embed_tokens.weight, expected)


def test_unused_tensors_are_named(checkpoints, tmp_path):
    """Weights that the model has no place for, a sign of the wrong architecture, would vanish without a word."""
    directory = damaged(checkpoints['llama'], tmp_path / 'copy',
                        lambda tensors: tensors.update({'model.extra': torch.zeros(3)}))
    model = build_model(load_config(directory, case_of('llama')), rank_of(2, 0), directory=directory)
    assert model.unused_checkpoint_names == ['model.extra']


# ---- And back ----


def save_all(directories: dict[str, str], target: str) -> None:
    mesh = ParallelMesh.create(tensor_parallel_size=dist.get_world_size())
    for family, directory in directories.items():
        os.makedirs(os.path.join(target, family), exist_ok=True)
        dist.barrier()
        model = build_model(load_config(directory, case_of(family)), mesh, directory=directory)
        save_full_model(model, os.path.join(target, family), mesh, max_shard_size='150KB')


def test_saving_gives_the_checkpoint_back(checkpoints, tmp_path):
    """A fully tuned model would be saved with rows lost, twice, or in the wrong order."""
    launch(4, save_all, checkpoints, str(tmp_path))
    for family, directory in checkpoints.items():
        expected = load_file(os.path.join(directory, 'model.safetensors'))
        index = json.loads((tmp_path / family / 'model.safetensors.index.json').read_text())
        files = set(index['weight_map'].values())
        assert len(files) > 2 and files == {
            name
            for name in os.listdir(tmp_path / family) if name.endswith('.safetensors')
        }
        found = {}
        for name in files:
            tensors = load_file(tmp_path / family / name)
            assert all(index['weight_map'][key] == name for key in tensors)
            found.update(tensors)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), family
        assert index['metadata']['total_size'] == 4 * sum(t.numel() for t in found.values())
