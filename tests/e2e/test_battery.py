"""16-bit training is as close to an exact run as plain ms-swift's: a part of the battery that has every value of every
column. `scripts/battery.py` runs the whole table.

A failure means that in the precision that people use, another model is trained than with plain ms-swift, by more than
rounding.
"""
import dataclasses
import pytest

from . import battery
from .harness import Job, launch

ROWS = battery.part(battery.table())


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """The material and the folder of all runs."""
    folder = str(tmp_path_factory.mktemp('battery'))
    paths, = launch(Job(battery.make_material, (folder, )))
    battery.run_rows(ROWS, paths, folder, timeout=240)
    return paths, folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.name)
def test_row_is_as_close_to_exact_as_plain(runs, row):
    """Loss, gradient norm and trained weights over 4 steps and 3 seeds; the first step where nothing is split."""
    assert not battery.faults(row, *runs)


def test_table_has_every_pair():
    """A combination that people use would never be compared."""
    rows = [dataclasses.asdict(row) for row in battery.table()]
    assert all(battery.allowed(row) for row in rows)
    assert set().union(*(battery.pairs(row) for row in rows)) >= battery.every_pair()


def test_part_has_every_value():
    """The suite would leave out a precision, a tuner, a family or a layout."""
    for column, values in battery.COLUMNS.items():
        assert {getattr(row, column) for row in ROWS} == set(values)
