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

    def train_all(self, trainings: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Trainings by this package, on two tensor ranks, and by plain ms-swift beside it, into `NAME-ours` and
        `NAME-plain`; a training's command is `sft`, or what its settings call `command`.

        Returns:
            Name -> '' or how one of the programs failed.
        """

        def run(program: str) -> dict[str, str]:
            own = {'tensor_parallel_size': 2} if program == 'ours' else {}
            calls = {}
            for name, settings in trainings.items():
                command = settings.get('command', 'sft')
                changes = {key: value for key, value in settings.items() if key != 'command'}
                calls[name] = program, command, self.flags(f'{name}-{program}', **changes, **own)
            return run_in_turn(jobs.train, calls, 2 if own else 1)

        with ThreadPoolExecutor(2) as pool:
            ours, plain = pool.map(run, ('ours', 'plain'))
        return {name: ours[name] or plain[name] for name in trainings}


@pytest.fixture(scope='session')
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp('e2e')
    os.makedirs(folder / 'material')
    paths, = launch(Job(material.make_all, (str(folder / 'material'), )))
    return Workshop(paths, folder)
