"""What the end-to-end tests share: small models and data, made once."""
import dataclasses
import os
import pytest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

from . import jobs, material
from .harness import Job, launch, launch_all, run_in_turn
from .runs import flags


@dataclasses.dataclass(frozen=True)
class Training:
    """One training of many.

    Args:
        settings: Flags; models and data by name.
        processes: How many.
        program: 'ours' or 'plain'.
        command: 'sft' or 'pt'.
        without: A function of the trainer's that does nothing.
    """
    settings: dict[str, Any]
    processes: int = 1
    program: str = 'ours'
    command: str = 'sft'
    without: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class Workshop:
    """Small models and data by name, and a folder for what the trainings write."""
    paths: dict[str, str]
    folder: Path

    def __getitem__(self, name: str) -> str:
        return self.paths[name]

    def output(self, name: str) -> str:
        return str(self.folder / name)

    def flags(self, output: str, **changes: Any) -> list[str]:
        """Flags of a training of the untied model; models and data by name."""
        settings = {'model': 'untied', 'dataset': 'train', **changes}
        for name in ('model', 'dataset', 'val_dataset'):
            if name in settings:
                settings[name] = self.paths.get(settings[name], settings[name])
        return flags(output_dir=self.output(output), **settings)

    def train_both(self,
                   name: str,
                   *,
                   command: str = 'sft',
                   processes: int = 2,
                   own: Optional[dict[str, Any]] = None,
                   **changes: Any) -> tuple[str, str]:
        """The same training by this package, on two tensor ranks, and by plain ms-swift; their output folders."""
        ours, plain = f'{name}-ours', f'{name}-plain'
        launch_all({
            'plain':
            Job(jobs.train, ('plain', command, self.flags(plain, **changes))),
            'ours':
            Job(jobs.train, ('ours', command, self.flags(ours, **{
                **changes, 'tensor_parallel_size': 2,
                **(own or {})
            })), processes),
        })
        return self.output(ours), self.output(plain)

    def train_in_turn(self, trainings: dict[str, Training]) -> dict[str, str]:
        """Trainings into folders of their names: those of one program on as many processes one after the other in the
        same processes, different ones beside each other.

        Returns:
            Name -> '' or how the training failed.
        """
        groups: dict[tuple[str, int], dict[str, tuple]] = {}
        for name, training in trainings.items():
            calls = groups.setdefault((training.program, training.processes), {})
            calls[name] = training.program, training.command, self.flags(name, **training.settings), training.without
        with ThreadPoolExecutor(len(groups) or 1) as pool:
            outcomes = pool.map(lambda group: run_in_turn(jobs.train, groups[group], group[1]), groups)
            return {name: how for outcome in outcomes for name, how in outcome.items()}


@pytest.fixture(scope='session')
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp('e2e')
    os.makedirs(folder / 'material')
    paths, = launch(Job(material.make_all, (str(folder / 'material'), )))
    return Workshop(paths, folder)
