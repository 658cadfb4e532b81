"""What a checkpoint notes of the run's layout, and which runs may go on from its optimizer states.

A failure means that Adam's moments go to other layers than they were made for, or that a run which could go on is
refused.
"""
import json
import pytest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swift_megatron.checkpoint.layout import LAYOUT_FILE, layout_fault, split_fault, write_layout
from swift_megatron.pipeline_parallel.split import StageSplit

INTERLEAVED = StageSplit(bounds=(0, 1, 2, 3, 5), num_ranks=2)  # p = 2, v = 2; layers 1,1,1,2


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """An otherwise complete checkpoint."""
    (tmp_path / 'trainer_state.json').write_text('{}', encoding='utf-8')
    return tmp_path


def run(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            'tensor_parallel_size': 3,
            'pipeline_parallel_size': 2,
            'virtual_pipeline_size': 2,
            'pipeline_layers': None,
            **changes
        })


@pytest.mark.parametrize('changes', [{}, {'pipeline_layers': '1,1,1,2'}, {'pipeline_layers': ' 1, 1,1,2'}])
def test_the_same_layout_goes_on(checkpoint, changes):
    write_layout(str(checkpoint), 3, INTERLEAVED)
    assert layout_fault(str(checkpoint), run(**changes)) == []
    assert split_fault(str(checkpoint), INTERLEAVED) == []


@pytest.mark.parametrize('name, given, written', [
    ('tensor_parallel_size', 1, '3'),
    ('pipeline_parallel_size', 4, '2'),
    ('virtual_pipeline_size', 1, '2'),
    ('pipeline_layers', '2,1,1,1', '1,1,1,2'),
])
def test_another_layout_is_refused_with_both_values(checkpoint, name, given, written):
    write_layout(str(checkpoint), 3, INTERLEAVED)
    fault, = layout_fault(str(checkpoint), run(**{name: given}))
    for words in (f'--{name} {written}', f'--{name} {given}', '--resume_only_model true'):
        assert words in fault


def test_other_balanced_stages_are_refused_with_both_values(checkpoint):
    """A model's balanced split is known with its config alone: another one than was written, by hand or not."""
    write_layout(str(checkpoint), 3, INTERLEAVED)
    fault, = split_fault(str(checkpoint), StageSplit(bounds=(0, 2, 3, 4, 5), num_ranks=2))
    assert '--pipeline_layers 1,1,1,2' in fault and '--pipeline_layers 2,1,1,1' in fault


def test_a_note_without_layers_stands_for_the_defaults(checkpoint):
    (checkpoint / LAYOUT_FILE).write_text('{"tensor_parallel_size": 3, "pipeline_parallel_size": 2}', encoding='utf-8')
    assert layout_fault(str(checkpoint), run(virtual_pipeline_size=1)) == []
    assert split_fault(str(checkpoint), INTERLEAVED) == []
    assert '--virtual_pipeline_size 2' in layout_fault(str(checkpoint), run())[0]
    by_hand, = layout_fault(str(checkpoint), run(virtual_pipeline_size=1, pipeline_layers='2,3'))
    assert 'balanced' in by_hand and '--pipeline_layers 2,3' in by_hand


@pytest.mark.parametrize('content', ['', '{"tensor', '[3, 2]', '{"tensor_parallel_size": 3}', 'null'])
def test_a_damaged_note_is_a_sentence(checkpoint, content):
    (checkpoint / LAYOUT_FILE).write_text(content, encoding='utf-8')
    fault, = layout_fault(str(checkpoint), run())
    assert 'damaged' in fault and '--resume_only_model true' in fault


def test_what_is_no_checkpoint_is_a_sentence(checkpoint):
    assert 'no directory' in layout_fault(str(checkpoint / 'checkpoint-3'), run())[0]
    assert '--save_only_model' in layout_fault(str(checkpoint), run())[0]
    write_layout(str(checkpoint), 3, INTERLEAVED)
    (checkpoint / 'trainer_state.json').unlink()
    assert 'no trainer_state.json' in layout_fault(str(checkpoint), run())[0]
    (checkpoint / '_replaced-checkpoint-3').mkdir()
    assert '_replaced-checkpoint-3' in layout_fault(str(checkpoint / 'checkpoint-3'), run())[0]


def test_the_note_is_plain_json(checkpoint):
    write_layout(str(checkpoint), 3, INTERLEAVED)
    assert json.loads((checkpoint / LAYOUT_FILE).read_text(encoding='utf-8')) == {
        'tensor_parallel_size': 3,
        'pipeline_parallel_size': 2,
        'virtual_pipeline_size': 2,
        'pipeline_layers': [1, 1, 1, 2]
    }
