"""Configurations and the commands that the README shows pass the launcher's checks, and name what exists.

A failure means that a user who copies from the documents gets an error.
"""
import pytest
import re
import shlex
import yaml
from pathlib import Path

from swift_megatron import compatibility
from swift_megatron.cli.flags import expand_file, parallel_fields, read_values
from swift_megatron.cli.main import METHODS
from swift_megatron.config import ParallelFields

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / 'configs').glob('*.yaml'))
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def commands() -> list[list[str]]:
    """The README's command lines: indented ones, continued over backslashes."""
    text = README.replace('\\\n', ' ')
    lines = [line.strip() for line in text.splitlines() if line.startswith('    ')]
    return [
        shlex.split(line, comments=True) for line in lines if 'swift-megatron ' in line or 'swift_megatron ' in line
    ]


def check(argv: list[str]) -> None:
    values = read_values(expand_file(argv))
    fields = parallel_fields(values)
    assert fields.faults(fields.model_parallel_size) == []
    assert compatibility.faults(values) == []


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.name)
def test_every_configuration(path):
    """It parses, its first line launches it, its comment says what it is for, and its sizes are legal."""
    text = path.read_text(encoding='utf-8')
    first = text.splitlines()[0]
    assert first == f'# swift-megatron sft configs/{path.name}'
    assert isinstance(yaml.safe_load(text), dict)
    check([str(path)])


def test_readme_commands(monkeypatch):
    """Every command of the README names a method, files that exist and sizes that are legal."""
    monkeypatch.chdir(ROOT)
    shown = commands()
    assert len(shown) >= 6
    for words in shown:
        start = next(i for i, word in enumerate(words) if word in ('swift-megatron', 'swift_megatron'))
        method, argv = words[start + 1], words[start + 2:]
        assert method in METHODS, words
        if method != 'export':
            check([word for word in argv if word != 'my.yaml'])


def test_readme_lists_the_fields():
    """The table of fields has those that this release acts on, with their defaults."""
    table = set(re.findall(r'^\| `(\w+)`', README, re.MULTILINE))
    not_yet = {'sequence_parallel', 'overlap_communication', 'zero_stage'}
    assert {name for name in table if hasattr(ParallelFields, name) or name == 'num_micro_batches'} == \
        set(ParallelFields.__dataclass_fields__) - not_yet


def test_readme_scripts_exist():
    """Scripts and folders that the README names are there."""
    for name in re.findall(r'`?(scripts/[\w./]+\w)', README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r'^\| `([\w/.]+)`(?:, `([\w/.]+)`)*', README, re.MULTILINE):
        for part in filter(None, name):
            assert hasattr(
                ParallelFields,
                part) or part in ParallelFields.__dataclass_fields__ or (ROOT / 'swift_megatron' / part).exists(), part
