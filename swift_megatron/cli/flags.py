"""Flags and YAML/JSON files as `swift` takes them, read without importing it."""
import json
import os
import yaml
from dataclasses import MISSING, fields
from typing import Any

from ..config import ParallelFields
from ..errors import ConfigError


def expand_file(argv: list[str]) -> list[str]:
    """`argv` with a leading YAML or JSON file turned into flags; its ENV section goes to the environment.

    Raises:
        ConfigError: if the file does not exist or holds no mapping.
    """
    if not argv or not argv[0].endswith(('.json', '.yaml', '.yml')):
        return list(argv)
    path = argv[0]
    if not os.path.isfile(path):
        raise ConfigError([f"there is no file '{path}'"])
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file) if path.endswith('.json') else yaml.safe_load(file)
    except (ValueError, yaml.YAMLError) as error:  # no JSON, no YAML, no UTF-8
        raise ConfigError([f"'{path}' cannot be read: {error}".replace('\n', ' ')]) from error
    if not isinstance(content, dict):
        raise ConfigError([f"'{path}' has to hold 'name: value' lines, one for each argument"])
    os.environ['SWIFT_CONFIG_FILE'] = path
    variables = content.pop('ENV', None) or {}
    if not isinstance(variables, dict):
        raise ConfigError([f"ENV in '{path}' has to hold 'NAME: value' lines, one for each variable"])
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))
    flags: list[str] = []
    for name, value in content.items():
        if isinstance(value, list):
            flags += [f'--{name}', *map(str, value)]
        else:
            flags += [f'--{name}', json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)]
    return flags + argv[1:]


def read_values(argv: list[str]) -> dict[str, Any]:
    """Flag name -> value, typed as YAML would; a list for several words, True for none. The last of several wins."""
    values: dict[str, Any] = {}
    name = None
    words: list[str] = []
    for word in [*argv, '--']:
        if not word.startswith('--'):
            words.append(word)
            continue
        if name is not None:
            values[name] = _typed(words)
        name, equals, value = word[2:].partition('=')
        name, words = name.replace('-', '_'), [value] if equals else []
    return values


def _typed(words: list[str]) -> Any:
    if not words:
        return True
    typed = []
    for word in words:
        try:
            typed.append(yaml.safe_load(word))
        except yaml.YAMLError:
            typed.append(word)
    return typed[0] if len(typed) == 1 else typed


def parallel_fields(values: dict[str, Any]) -> ParallelFields:
    """The parallel fields among the flags."""
    own = {spec.name: values[spec.name] for spec in fields(ParallelFields) if spec.name in values}
    return ParallelFields(**{name: _numeric(value) for name, value in own.items()})


def _numeric(value: Any) -> Any:
    return None if value in ('None', 'null') else value


def describe_fields() -> str:
    """Help text of the parallel fields."""
    lines = ['parallel fields:']
    for spec in fields(ParallelFields):
        default = '' if spec.default in (None, MISSING) else f' (default: {spec.default})'
        lines.append(f'  --{spec.name}{default}\n        {spec.metadata["help"]}')
    return '\n'.join(lines)
