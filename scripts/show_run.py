#!/usr/bin/env python3
"""Shows what a LoRA run of `swift-megatron sft` did: the loss at its start and end, and answers before and after it.

    python scripts/show_run.py --model work/models/SmolLM2-135M-Instruct --run work/output/quickstart-...

The adapter is loaded by plain transformers and peft, in one process, as anybody would who is given it.
"""
import argparse
import json
import re
import torch
from pathlib import Path
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

QUESTIONS = ('What is a computer?', )


def losses(run: Path) -> list[tuple[int, float]]:
    """The logged training losses as (step, loss); each is the mean since the one before."""
    with open(run / 'logging.jsonl', encoding='utf-8') as file:
        rows = [json.loads(line) for line in file]
    return [(int(row['global_step/max_steps'].split('/')[0]), row['loss']) for row in rows if 'loss' in row]


def last_checkpoint(run: Path) -> Path:
    """The checkpoint of the highest step.

    Raises:
        FileNotFoundError: there is none.
    """
    matches = ((re.fullmatch(r'checkpoint-(\d+)', path.name), path) for path in run.iterdir())
    checkpoints = {int(match[1]): path for match, path in matches if match}
    if not checkpoints:
        raise FileNotFoundError(f'no checkpoint in {run}')
    return checkpoints[max(checkpoints)]


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, max_new_tokens: int) -> str:
    """The greedy answer to one user message."""
    # The model's own chat template adds a system message, which the template `chatml` of the training run does not.
    prompt = f'<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n'
    inputs = tokenizer(prompt, return_tensors='pt').to(model.device)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs['input_ids'].shape[1]:], skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', type=Path, required=True, help='the model that was trained')
    parser.add_argument('--run', type=Path, required=True, help='output folder of the run, with logging.jsonl')
    parser.add_argument('--question', nargs='+', default=QUESTIONS, help='what to ask')
    parser.add_argument('--max_new_tokens', type=int, default=40)
    args = parser.parse_args()

    logging.disable_progress_bar()
    logged = losses(args.run)
    adapter = last_checkpoint(args.run)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    before = [answer(base, tokenizer, question, args.max_new_tokens) for question in args.question]
    tuned = PeftModel.from_pretrained(base, adapter).eval()
    after = [answer(tuned, tokenizer, question, args.max_new_tokens) for question in args.question]

    for step, loss in (logged[0], logged[-1]):
        print(f'loss at step {step}: {loss:.3f}')
    for question, old, new in zip(args.question, before, after):
        print(f'question: {question}\n  before: {old}\n  after:  {new}')
    print(f'adapter: {adapter}')


if __name__ == '__main__':
    main()
