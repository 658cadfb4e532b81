"""Small models with a tokenizer, and small data, made here: what the end-to-end tests train and train on."""
import json
import os
import random
from typing import Any, Iterator

VOCABULARY = 307  # prime: no number of ranks divides it
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
WORDS = ('the a one cat dog bird fish tree house river stone cloud red blue old small quick quiet runs sees finds '
         'takes and but then here there now under over near far').split()


def make_model(directory: str, **case: Any) -> str:
    """A random llama checkpoint (a `tests.tiny_models.Case`) with a tokenizer that fits ms-swift's chatml template."""
    from tests.tiny_models import Case, make_checkpoint
    make_checkpoint(Case(family='llama', vocabulary=VOCABULARY, **case), directory)
    make_tokenizer(directory)
    return directory


def make_tokenizer(directory: str) -> None:
    """A byte-level BPE for which each of WORDS is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([f' {" ".join(WORDS)}'], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token='<|im_start|>',
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        unk_token='<|endoftext|>').save_pretrained(directory)


def _words(generator: random.Random, number: int) -> str:
    return ' '.join(generator.choices(WORDS, k=number))


def rows(number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Dialogues whose answers have 1 to 36 words in no order; every fourth has two turns."""
    generator = random.Random(seed)
    for i in range(number):
        messages = []
        for _ in range(2 if i % 4 == 3 else 1):
            messages += [{
                'role': 'user',
                'content': _words(generator, generator.randint(1, 5))
            }, {
                'role': 'assistant',
                'content': _words(generator, generator.choice([1, 2, 5, 9, 17, 30, 36]))
            }]
        yield {'messages': messages}


def write_rows(path: str, contents: Iterator[dict[str, Any]]) -> str:
    with open(path, 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(row) + '\n' for row in contents)
    return path


def _ragged() -> Iterator[dict[str, Any]]:
    """Four samples with answers of very different lengths."""
    generator = random.Random(3)
    for number in (1, 7, 15, 28):
        yield {
            'messages': [{
                'role': 'user',
                'content': _words(generator, 2)
            }, {
                'role': 'assistant',
                'content': _words(generator, number)
            }]
        }


def _channels() -> Iterator[dict[str, Any]]:
    """Rows of two sources, and some of none."""
    for i, row in enumerate(rows(12, seed=4)):
        yield {**row, **({} if i % 3 == 0 else {'channel': f'source{i % 3}'})}


def _weighted() -> Iterator[dict[str, Any]]:
    """Answers in the form of the ReAct agent, whose parts ms-swift's `react` weighs with 0, 1 and 2."""
    generator = random.Random(5)
    for _ in range(12):
        answer = 'Thought: {} Action: {} Action Input: {} Observation: {} Final Answer: {}'
        yield {
            'messages': [{
                'role': 'user',
                'content': _words(generator, 3)
            }, {
                'role': 'assistant',
                'content': answer.format(*(_words(generator, 2) for _ in range(5)))
            }]
        }


def _texts() -> Iterator[dict[str, Any]]:
    """Plain texts for pre-training."""
    generator = random.Random(6)
    for number in (2, 40, 11, 25, 60, 7, 33, 19):
        yield {'messages': [{'role': 'assistant', 'content': _words(generator, number)}]}


def _drill() -> Iterator[dict[str, Any]]:
    """Short answers, over and over, that a small model has by heart after some steps."""
    for i in range(24):
        yield {
            'messages': [{
                'role': 'user',
                'content': WORDS[i % 3]
            }, {
                'role': 'assistant',
                'content': WORDS[10 + i % 3]
            }]
        }


DATA = {
    'train': rows(46, seed=1),
    'val': rows(11, seed=2),
    'even_val': rows(10, seed=2),
    'ragged': _ragged(),
    'channels': _channels(),
    'weighted': _weighted(),
    'texts': _texts(),
    'drill': _drill(),
}


def make_all(directory: str) -> dict[str, str]:
    """Everything that the tests use; name -> path."""
    paths = {name: write_rows(os.path.join(directory, f'{name}.jsonl'), contents) for name, contents in DATA.items()}
    paths['untied'] = make_model(os.path.join(directory, 'untied'), heads=9, key_value_heads=3, layers=2)
    paths['tied'] = make_model(os.path.join(directory, 'tied'), heads=9, key_value_heads=3, layers=3, tied=True)
    paths['deep'] = make_model(os.path.join(directory, 'deep'), heads=4, key_value_heads=2, layers=5)
    paths['wide'] = make_model(os.path.join(directory, 'wide'), heads=8, key_value_heads=4, layers=2, ffn=256)
    return paths
