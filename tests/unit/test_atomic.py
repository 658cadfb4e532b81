"""A folder that replaces another: at every point where a run can be killed, a complete one can be found afterwards.

A failure means that a user whose job is killed while it saves loses the last good checkpoint, or resumes from half of
one. Kills are played by an exception in place of a step of the file system.
"""
import os
import pytest
from pathlib import Path
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints
from unittest import mock

from swift_megatron.checkpoint import atomic
from swift_megatron.checkpoint.atomic import AtomicFolder, clean, is_complete, remove, rotate


class Killed(Exception):
    pass


def write(directory: str, content: str) -> None:
    """Two files, the Trainer's state last."""
    for name in ('weights', 'trainer_state.json'):
        Path(directory, name).write_text(content, encoding='utf-8')


def make(path: Path, content: str) -> None:
    folder = AtomicFolder(str(path))
    assert folder.begin()
    write(folder.staging, content)
    folder.publish()


def content_of(path: Path) -> set[str]:
    return {file.read_text(encoding='utf-8') for file in path.iterdir()}


def killed_before(step: int):
    """Lets the first `step` renamings and deletions of a folder happen, and is killed at the next."""
    calls = iter(range(100))

    def guard(function):

        def run(*args, **kwargs):
            if next(calls) >= step:
                raise Killed
            return function(*args, **kwargs)

        return run

    return mock.patch.multiple(
        atomic,
        os=mock.Mock(wraps=os, path=os.path, rename=guard(os.rename), O_RDONLY=os.O_RDONLY),
        shutil=mock.Mock(wraps=atomic.shutil, rmtree=guard(atomic.shutil.rmtree)))


# Steps of replacing: move the old one, name the new one, delete the old one.
@pytest.mark.parametrize('step, survivor', [(0, 'old'), (1, 'new'), (2, 'new'), (3, 'new')])
def test_replacing_survives_a_kill(tmp_path, step, survivor):
    """Neither the old nor the new checkpoint of a step would be there, or a listing would see two or half of one."""
    path = tmp_path / 'checkpoint-3'
    make(path, 'old')
    folder = AtomicFolder(str(path))
    folder.begin()
    write(folder.staging, 'new')
    with killed_before(step):
        try:
            folder.publish()
            assert step == 3
        except Killed:
            assert step < 3
    assert {Path(name).name for name in sort_checkpoints(str(tmp_path))} <= {'checkpoint-3'}
    clean(str(tmp_path))
    assert os.listdir(tmp_path) == ['checkpoint-3'] and content_of(path) == {survivor}


def test_a_killed_write_is_no_checkpoint(tmp_path):
    """The next run would count the half checkpoint, resume from it, upload it, or keep it for ever."""
    make(tmp_path / 'checkpoint-3', 'whole')
    folder = AtomicFolder(str(tmp_path / 'checkpoint-6'))
    folder.begin()
    Path(folder.staging, 'weights').write_text('half', encoding='utf-8')
    assert os.path.basename(folder.staging).startswith('_'), 'a hub leaves out what begins so'
    assert get_last_checkpoint(str(tmp_path)).endswith('checkpoint-3')
    assert [Path(name).name for name in sort_checkpoints(str(tmp_path), use_mtime=True)] == ['checkpoint-3']
    clean(str(tmp_path))
    assert os.listdir(tmp_path) == ['checkpoint-3']


def test_a_killed_deletion_leaves_no_half_checkpoint(tmp_path):
    """What is left of a deleted checkpoint would bear the name of a complete one."""
    make(tmp_path / 'checkpoint-3', 'old')
    with killed_before(2), pytest.raises(Killed):  # a rename after the deletion of nothing
        remove(str(tmp_path / 'checkpoint-3'))
    assert get_last_checkpoint(str(tmp_path)) is None
    clean(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_rotation_counts_complete_checkpoints_alone(tmp_path):
    """Complete checkpoints would be deleted in favour of the rests of a killed run (3, 6 and half of 9; limit 1)."""
    paths = {step: tmp_path / f'checkpoint-{step}' for step in (3, 6, 9)}
    for step in (3, 6):
        make(paths[step], 'whole')
    for name in ('checkpoint-9', 'checkpoint-9.incomplete', '_writing-checkpoint-9'):
        (tmp_path / name).mkdir()
    assert is_complete(str(paths[6])) and not is_complete(str(paths[9]))
    for limit, kept in ((2, {3, 6}), (0, {3, 6}), (1, {6})):
        rotate([str(path) for path in paths.values()], limit, keep=[str(paths[6])])
        assert {step for step, path in paths.items() if is_complete(str(path))} == kept
    assert paths[9].is_dir()


@pytest.mark.parametrize('best, left', [(3, {3, 12}), (12, {9, 12}), (None, {9, 12})])
def test_rotation_keeps_the_newest_and_the_best(tmp_path, best, left):
    """`load_best_model_at_end` would find its checkpoint deleted."""
    paths = {step: tmp_path / f'checkpoint-{step}' for step in (3, 6, 9, 12)}
    for path in paths.values():
        make(path, 'whole')
    keep = [str(paths[step]) for step in (12, best) if step]
    rotate([str(path) for path in paths.values()], 2, keep=keep)
    assert {step for step, path in paths.items() if path.is_dir()} == left


def test_files_and_folders_are_on_the_disk_before_the_name(tmp_path):
    """A power cut would leave a checkpoint with its name and without its content."""
    folder = AtomicFolder(str(tmp_path / 'checkpoint-3'))
    folder.begin()
    write(folder.staging, 'new')
    os.mkdir(os.path.join(folder.staging, 'sub'))
    events = []

    def fsync(descriptor: int) -> None:
        events.append(os.path.relpath(os.readlink(f'/proc/self/fd/{descriptor}'), tmp_path))

    def rename(source: str, target: str) -> None:
        events.append('rename')
        os.replace(source, target)

    with mock.patch.multiple(atomic.os, fsync=fsync, rename=rename):
        atomic.sync(folder.staging)
        folder.publish()
    staging = '_writing-checkpoint-3'
    before = events[:events.index('rename')]
    assert {f'{staging}/weights', f'{staging}/trainer_state.json', f'{staging}/sub', staging} == set(before)
    assert events[-1] == '.' and events.count('rename') == 1


def test_one_process_of_a_disk_owns_the_folder(tmp_path):
    """Two processes would name, or delete, the same folder."""
    folder = AtomicFolder(str(tmp_path / 'run' / 'checkpoint-3'))
    assert [folder.begin(), folder.begin()] == [True, False]
