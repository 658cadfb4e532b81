"""Small models with a tokenizer, and small data, made here: what the end-to-end tests train and train on."""
import json
import os
import random
from typing import Any, Iterator

VOCABULARY = 307  # prime: no number of ranks divides it
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
WORDS = ('the a one cat dog bird fish tree house river stone cloud red blue old small quick quiet runs sees finds takes and but '
         'then here there now under over near far').split()


def make_model(directory: str, **case: Any) -> str:
    """A random llama checkpoint (a `tests.tiny_models.Case`) with a tokenizer that ms-swift's chatml template can use."""
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
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([f' {" ".join(WORDS)}'], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token='<|im_start|>', eos_token='<|im_end|>', pad_token='<|endoftext|>',
        unk_token='<|endoftext|>').save_pretrained(directory)


def _words(generator: random.Random, number: int) -> str:
    return ' '.join(generator.choices(WORDS, k=number))


def rows(number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Dialogues whose answers have 1 to 36 words in no order; every fourth has two turns."""
    generator = random.Random(seed)
    for i in range(number):
        messages = []
        for _ in range(2 if i % 4 == 3 else 1):
            messages += [{'role': 'user', 'content': _words(generator, generator.randint(1, 5))},
                         {'role': 'assistant', 'content': _words(generator, generator.choice([1, 2, 5, 9, 17, 30, 36]))}]
        yield {'messages': messages}


def write_rows(path: str, contents: Iterator[dict[str, Any]]) -> str:
    with open(path, 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(row) + '\n' for row in contents)
    return path


def make_all(directory: str) -> dict[str, str]:
    """Everything that the tests use; name -> path."""
    path = {name: os.path.join(directory, name) for name in ('untied', 'tied', 'train.jsonl', 'val.jsonl')}
    make_model(path['untied'], heads=9, key_value_heads=3, layers=2)
    make_model(path['tied'], heads=9, key_value_heads=3, layers=3, tied=True)
    write_rows(path['train.jsonl'], rows(48, seed=1))
    write_rows(path['val.jsonl'], rows(11, seed=2))
    return path
