"""The package's own architecture: imports go down the levels, and files and functions stay small.

A failure means that a piece can no longer be used, or be proven, without the pieces above it: a test of the numbers
would need ms-swift, a check of the flags would need torch.
"""
import ast
import graphlib
import importlib
import pathlib
import pytest
import sys
from typing import Iterator

from tests.harness import launch

PACKAGE = pathlib.Path(__file__).parents[2] / 'swift_megatron'
LEVELS = (
    ('config', 'errors', 'mesh', 'sharding', 'compatibility', 'ending'),
    ('tensor_parallel', 'quantization'),
    ('lora', ),
    ('model', 'optim', 'pipeline_parallel'),
    ('checkpoint', ),
    ('cli', 'pipelines', 'trainers', 'arguments'),
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}
TOP = len(LEVELS) - 1
BITSANDBYTES = pathlib.PurePath('quantization/bnb.py')  # the one file that imports it
ENTRY_POINTS = {'__init__', '__main__'}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob('*.py'))
NAMES = [str(path) for path in FILES]


def unit_of(path: pathlib.PurePath) -> str:
    """The folder or module directly under the package."""
    return path.parts[0].removesuffix('.py')


def tree_of(path: pathlib.PurePath) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding='utf-8'))


def imported(path: pathlib.PurePath) -> Iterator[str]:
    """Full dotted names of all that a file imports, wherever in the file."""
    package = ('swift_megatron', *path.parts[:-1])
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[:len(package) - node.level + 1]) if node.level else []
            base += (node.module or '').split('.') if node.module else []
            yield from ('.'.join([*base, alias.name]) for alias in node.names)


def own_imports(path: pathlib.PurePath) -> set[str]:
    """Units of this package that a file imports from."""
    return {name.split('.')[1] for name in imported(path) if name.startswith('swift_megatron.')}


def test_every_unit_has_a_level():
    """A new folder could import anything."""
    assert {unit_of(path) for path in FILES} - ENTRY_POINTS <= set(LEVEL)


@pytest.mark.parametrize('name', NAMES)
def test_imports_go_down(name):
    """A lower piece would need a higher one: neither could be understood, tested or replaced alone."""
    path = pathlib.PurePath(name)
    if unit_of(path) in ENTRY_POINTS:
        return
    level = LEVEL[unit_of(path)]
    wrong = {unit for unit in own_imports(path) if LEVEL.get(unit, TOP + 1) > level}
    assert not wrong, f'{name} (level {level}) imports from {sorted(wrong)}'


def test_units_of_a_level_do_not_need_each_other_in_a_circle():
    """Two folders that import each other are one folder in disguise."""
    graph = {unit: set() for unit in LEVEL}
    for path in FILES:
        if unit_of(path) not in ENTRY_POINTS:
            graph[unit_of(path)] |= own_imports(path) - {unit_of(path)}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize('name', NAMES)
def test_foreign_packages_stay_at_their_edge(name):
    """Everything would start ten seconds later (ms-swift), or only where 4-bit kernels are installed (bitsandbytes)."""
    path = pathlib.PurePath(name)
    roots = {module.split('.')[0] for module in imported(path)}
    assert 'bitsandbytes' not in roots or path == BITSANDBYTES
    if unit_of(path) not in LEVELS[TOP]:
        assert 'swift' not in roots


def test_the_border_of_a_region_is_written_once():
    """Sequence parallelism or overlap would be an edit of every layer instead of another region."""
    users = {
        name
        for name in NAMES if 'swift_megatron.tensor_parallel.regions' in
        {module.rpartition('.')[0]
         for module in imported(pathlib.PurePath(name))}
    }
    assert users == {'tensor_parallel/boundary.py'}


def modules_below_the_edge() -> list[str]:
    paths = [path for path in FILES if unit_of(path) not in LEVELS[TOP] and unit_of(path) != '__main__']
    return ['.'.join(('swift_megatron', *path.with_suffix('').parts)).removesuffix('.__init__') for path in paths]


def import_all(names: list[str]) -> list[str]:
    for name in names:
        importlib.import_module(name)
    return sorted(name for name in sys.modules if name.split('.')[0] == 'swift')


def test_all_below_the_edge_imports_without_ms_swift():
    """Losses, gradients and files could no longer be proven without ms-swift."""
    assert launch(1, import_all, modules_below_the_edge()) == [[]]


@pytest.mark.parametrize('name', NAMES)
def test_files_and_functions_stay_small(name):
    """A file that does two things hides both."""
    lines = (PACKAGE / name).read_text(encoding='utf-8').splitlines()
    assert len(lines) <= MAX_FILE_LINES
    functions = [
        node for node in ast.walk(tree_of(pathlib.PurePath(name)))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    long = {
        node.name: length
        for node in functions if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


@pytest.mark.parametrize('name', NAMES)
def test_public_names_are_documented(name):
    """A reader could not tell what a function takes and returns."""
    tree = tree_of(pathlib.PurePath(name))
    public = [
        node for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_')
    ]
    undocumented = [node.name for node in public if not ast.get_docstring(node)]
    if [node for node in tree.body if not isinstance(node, ast.Expr)] and not ast.get_docstring(tree):
        undocumented.append('the file itself')
    assert not undocumented


def test_nothing_is_printed():
    """Output of eight processes would run into each other; swift's logger writes once."""
    calls = [
        f'{path}:{node.lineno}' for path in FILES for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'print'
    ]
    assert not calls


@pytest.mark.parametrize('source, names', [
    ('from ..mesh import X', {'swift_megatron.mesh.X'}),
    ('def f():\n    from .. import mesh', {'swift_megatron.mesh'}),
    ('from . import linear\nimport swift.utils', {'swift_megatron.lora.linear', 'swift.utils'}),
])
def test_the_walk_finds_every_form_of_import(source, names, monkeypatch):
    """The tests above would pass whatever is imported."""
    monkeypatch.setattr(f'{__name__}.tree_of', lambda path: ast.parse(source))
    assert set(imported(pathlib.PurePath('lora/layers.py'))) == names
