"""The battery: 16-bit training by this package and by plain ms-swift, each held to an exact run of the same weights.

Rows are made from one table so that every pair of values of two columns is in some row. A row is trained three times,
for some seeds: exactly (float32), by plain ms-swift in the row's precision, and by this package in it. Distances from
the exact run are root mean squares over steps and seeds; ours may be at most FACTOR times plain's, or one rounding of
the dtype. `scripts/battery.py` runs the whole table, `test_battery.py` a part.
"""
import dataclasses
import itertools
import json
import math
import os
from safetensors import safe_open
from typing import Any, Iterator, Sequence

from . import jobs
from .harness import Job, launch_all
from .runs import flags, log_lines

STEPS, SEEDS = 4, (1, 2, 3)
FACTOR = 1.5

COLUMNS: dict[str, tuple] = {
    'precision': ('bf16 autocast', 'bf16', 'fp32 autocast', 'fp16'),
    'tuner': ('lora', 'qlora', 'full'),
    'family': ('llama', 'qwen2', 'qwen3', 'gemma2', 'mistral', 'phi3'),
    'layout': ((1, 1), (2, 1), (1, 2), (2, 2)),  # (t, p)
    'accumulation': (1, 2),
    'dropout': (0., 0.1),
    'recompute': (False, True),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    'bf16 autocast': dict(torch_dtype='bfloat16', bf16=True),
    'bf16': dict(torch_dtype='bfloat16'),
    'fp32 autocast': dict(torch_dtype='float32', bf16=True),
    'fp16': dict(torch_dtype='float16', fp16=True),  # on a CPU accelerate has neither autocast nor a scaler for it
}
# Largest relative error of one rounding: 8 and 11 binary digits.
ROUNDING = {'bf16 autocast': 2**-8, 'bf16': 2**-8, 'fp32 autocast': 2**-8, 'fp16': 2**-11}


@dataclasses.dataclass(frozen=True)
class Row:
    """One way of training; its fields are the columns of the table."""
    precision: str
    tuner: str
    family: str
    layout: tuple[int, int]
    accumulation: int
    dropout: float
    recompute: bool

    @property
    def name(self) -> str:
        t, p = self.layout
        return (f'{self.family} {self.tuner} {self.precision} t={t} p={p} accumulation={self.accumulation} '
                f'dropout={self.dropout:g} recompute={"on" if self.recompute else "off"}')


def allowed(values: dict[str, Any]) -> bool:
    """Whether a row with these values (of some columns) can be compared.

    Gradients of float16 weights cannot be unscaled; full tuning has no adapters to drop the input of; stages draw masks
    of their own.
    """
    full = values.get('tuner') == 'full'
    drops = bool(values.get('dropout'))
    staged = values.get('layout', (1, 1))[1] > 1
    return not (full and values.get('precision') == 'fp16' or drops and (full or staged))


def pairs(values: dict[str, Any]) -> set[tuple]:
    """All pairs of (column, value) in a row."""
    return set(itertools.combinations(sorted(values.items()), 2))


def every_pair() -> set[tuple]:
    """All pairs that a row can have."""
    return {((a, x), (b, y))
            for a, b in itertools.combinations(sorted(COLUMNS), 2)
            for x in COLUMNS[a]
            for y in COLUMNS[b] if allowed({
                a: x,
                b: y
            })}


def table() -> list[Row]:
    """Rows that have every pair, each row the one with most pairs that are missing still (the first of equal ones)."""
    candidates = [dict(zip(COLUMNS, values)) for values in itertools.product(*COLUMNS.values())]
    candidates = [(values, pairs(values)) for values in candidates if allowed(values)]
    missing, rows = every_pair(), []
    while missing:
        values, own = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        rows.append(Row(**values))
        missing -= own
    return rows


def part(rows: list[Row]) -> list[Row]:
    """Rows that have every value of every column."""
    missing, chosen = {(column, value) for column, values in COLUMNS.items() for value in values}, []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(dataclasses.asdict(row).items())))
        chosen.append(best)
        missing -= set(dataclasses.asdict(best).items())
    return chosen


# ---- Material ----


def make_material(directory: str) -> dict[str, str]:
    """Models of all families and adapters for them, by name. Runs in a process of its own."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import Case, make_checkpoint
    from .material import VOCABULARY, make_tokenizer, rows, write_rows
    paths = {'train': write_rows(os.path.join(directory, 'train.jsonl'), rows(46, seed=1))}
    for family in COLUMNS['family']:
        # Slices of all widths over two ranks are whole blocks of 64 values: 4-bit codes are those of one card.
        case = Case(family=family, vocabulary=VOCABULARY, heads=8, key_value_heads=4, ffn=256)
        config = case.config()
        config.head_dim, config.query_pre_attn_scalar = config.hidden_size // 8, config.hidden_size // 8
        paths[family] = make_checkpoint(case, os.path.join(directory, family), config)
        make_tokenizer(paths[family])
        model = AutoModelForCausalLM.from_pretrained(paths[family], dtype=torch.float32)
        for parameter in model.parameters():  # values that every dtype has: 8 digits, none below float16's normal ones
            rounded = parameter.data.bfloat16().float()
            parameter.data = torch.where(rounded.abs() < 2**-14, 0., rounded)
        model.save_pretrained(paths[family])
        torch.manual_seed(5)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=8, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM'))
        for name, parameter in adapted.named_parameters():
            if 'lora_B' in name:
                parameter.data = torch.randn(parameter.shape) * 0.05
        for dropout in COLUMNS['dropout']:
            adapted.peft_config['default'].lora_dropout = dropout
            paths[f'{family} {dropout}'] = os.path.join(directory, f'{family}-{dropout:g}')
            adapted.save_pretrained(paths[f'{family} {dropout}'])
    return paths


def command(row: Row, program: str, seed: int, paths: dict[str, str], output: str) -> list[str]:
    """Flags of one run. `program` is exact, plain or ours."""
    t, p = row.layout
    settings: dict[str, Any] = dict(
        model=paths[row.family],
        attn_impl='eager' if row.family == 'gemma2' else 'sdpa',
        dataset=paths['train'],
        output_dir=output,
        max_steps=STEPS,
        seed=seed,
        data_seed=seed,
        use_cpu=True,
        max_length=64,
        # A step of Adam is lr m / (sqrt(v) + eps): with this eps, rounding of a gradient near zero stays rounding.
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        lora_dropout=None,  # as the adapter's own config says
        gradient_checkpointing=row.recompute,
        gradient_accumulation_steps=row.accumulation * p,
        save_strategy='steps',
        save_steps=STEPS,
        save_only_model=True,
        torch_dtype='float32')
    if row.tuner == 'full':
        settings['tuner_type'] = 'full'
    else:
        settings['adapters'] = paths[f'{row.family} {row.dropout}']
    if row.tuner == 'qlora':
        settings |= dict(quant_method='bnb', quant_bits=4, bnb_4bit_use_double_quant=False)
    if program != 'exact':
        settings |= PRECISIONS[row.precision]
    if program == 'ours':
        settings |= dict(
            tensor_parallel_size=t,
            pipeline_parallel_size=p,
            num_micro_batches=p,
            gradient_accumulation_steps=row.accumulation)
    return flags(**settings)


# ---- Runs ----


def train_all(program: str, runs: list[list[str]]) -> None:
    """Trainings one after the other in one process (or on each of some ranks)."""
    for argv in runs:
        jobs.train('ours' if program == 'ours' else 'plain', 'sft', argv)


def run_rows(rows: Sequence[Row], paths: dict[str, str], folder: str, timeout: float) -> None:
    """Trains all rows; what they leave lies in `output_of`. One process for plain runs, one group for each number of
    ranks, two beside each other.
    """

    def runs(program: str, chosen: Sequence[Row]) -> list[list[str]]:
        return [
            command(row, program, seed, paths, output_of(folder, row, program, seed)) for row in chosen
            for seed in SEEDS
        ]

    sizes = {row: row.layout[0] * row.layout[1] for row in rows}
    plain = [*runs('exact', rows), *runs('plain', rows)]
    one = [row for row in rows if sizes[row] == 1]
    launch_all({
        'plain': Job(train_all, ('plain', plain), 1, timeout),
        'one': Job(train_all, ('ours', runs('ours', one)), 1, timeout),
    })
    for size in sorted(set(sizes.values()) - {1}):
        chosen = [row for row in rows if sizes[row] == size]
        launch_all({str(size): Job(train_all, ('ours', runs('ours', chosen)), size, timeout)})


def output_of(folder: str, row: Row, program: str, seed: int) -> str:
    return os.path.join(folder, f'{row.name} {program} {seed}'.replace(' ', '_'))


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run left: its curve, and what it trained."""
    losses: list[float]
    norms: list[float]
    weights: dict[str, Any]


def trained(output: str) -> Trained:
    lines = [line for line in log_lines(output) if 'grad_norm' in line]
    assert len(lines) == STEPS, (output, len(lines))
    return Trained([line['loss'] for line in lines], [line['grad_norm'] for line in lines],
                   read_weights(f'{output}/checkpoint-{STEPS}'))


def read_weights(directory: str) -> dict[str, Any]:
    """All tensors of a checkpoint or an adapter, in float64."""
    weights = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith('.safetensors'):
            with safe_open(os.path.join(directory, name), framework='pt') as file:
                weights.update({key: file.get_tensor(key).double() for key in file.keys()})
    return weights


# ---- Verdicts ----


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far from the exact run, relative to what is measured there (for weights: to how far they moved)."""
    ours: float
    plain: float
    floor: float

    @property
    def ratio(self) -> float:
        """Of our distance to what is allowed at factor one; at most FACTOR where it holds."""
        return self.ours / max(self.plain, self.floor / FACTOR)

    @property
    def holds(self) -> bool:
        return self.ours <= max(FACTOR * self.plain, self.floor)


def _root_mean_square(values: Iterator[float]) -> float:
    squares = [value**2 for value in values]
    return math.sqrt(sum(squares) / len(squares))


def _moved(a: dict[str, Any], b: dict[str, Any]) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in b))


def distances(row: Row, paths: dict[str, str], folder: str) -> dict[str, Distance]:
    """Of loss, grad_norm and weights."""
    results = {
        program: [trained(output_of(folder, row, program, seed)) for seed in SEEDS]
        for program in ('exact', 'plain', 'ours')
    }
    start = read_weights(paths[row.family if row.tuner == 'full' else f'{row.family} {row.dropout}'])

    def curve(name: str, program: str) -> float:
        pairs = [(a, b) for run, exact in zip(results[program], results['exact'])
                 for a, b in zip(getattr(run, name), getattr(exact, name))]
        return _root_mean_square(a - b for a, b in pairs) / _root_mean_square(b for _, b in pairs)

    def weights(program: str) -> float:
        return _root_mean_square(
            _moved(run.weights, exact.weights) / _moved(exact.weights, start)
            for run, exact in zip(results[program], results['exact']))

    floor = ROUNDING[row.precision]
    return {
        'loss': Distance(curve('losses', 'ours'), curve('losses', 'plain'), floor),
        'grad_norm': Distance(curve('norms', 'ours'), curve('norms', 'plain'), floor),
        'weights': Distance(weights('ours'), weights('plain'), floor),
    }


def first_steps(row: Row, folder: str) -> list[tuple[float, float]]:
    """(ours, plain) of loss and norm of the first step, for each seed."""
    found = []
    for seed in SEEDS:
        ours, plain = (trained(output_of(folder, row, program, seed)) for program in ('ours', 'plain'))
        found += [(ours.losses[0], plain.losses[0]), (ours.norms[0], plain.norms[0])]
    return found


def faults(row: Row, paths: dict[str, str], folder: str) -> list[str]:
    """What does not hold of a row, one sentence each."""
    found = [
        f'{what}: {distance.ours:.2e} from the exact run, plain {distance.plain:.2e}'
        for what, distance in distances(row, paths, folder).items() if not distance.holds
    ]
    if row.layout == (1, 1):
        found += [
            f'first step: {ours} where plain has {plain}' for ours, plain in first_steps(row, folder)
            if abs(ours - plain) > ROUNDING[row.precision] * abs(plain)
        ]
    return found


def report(rows: Sequence[Row], paths: dict[str, str], folder: str) -> list[dict[str, Any]]:
    """All rows with their figures, for a file."""
    return [{
        **dataclasses.asdict(row),
        **{
            what: dataclasses.asdict(distance) | {
                'ratio': distance.ratio
            }
            for what, distance in distances(row, paths, folder).items()
        },
        'faults': faults(row, paths, folder),
    } for row in rows]


def write_report(path: str, content: dict[str, Any]) -> None:
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
        file.write('\n')
