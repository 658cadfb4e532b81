"""What the end-to-end tests run in their processes. All return plain data."""
from typing import Any, Optional
from unittest import mock


def _pipeline(program: str, command: str, argv: list[str]) -> Any:
    if program == 'plain':
        from swift.pipelines.train.pretrain import SwiftPretrain
        from swift.pipelines.train.sft import SwiftSft
        return {'sft': SwiftSft, 'pt': SwiftPretrain}[command](argv)
    from swift_megatron.pipelines.sft import MegatronPretrain, MegatronSft
    return {'sft': MegatronSft, 'pt': MegatronPretrain}[command](argv)


def train(program: str, command: str, argv: list[str], without: Optional[str] = None) -> dict[str, Any]:
    """One training by plain ms-swift or by this package; ms-swift's result. A function of the trainer's named in
    `without` does nothing.
    """
    if without is None:
        return _pipeline(program, command, argv).main()
    with mock.patch(f'swift_megatron.trainers.mixin.{without}', lambda *_: None):
        return _pipeline(program, command, argv).main()


def train_and_probe(program: str, argv: list[str]) -> list:
    """One training, then the logits of the trained model for `probe_ids`."""
    pipeline = _pipeline(program, 'sft', argv)
    pipeline.main()
    return probe(pipeline.model)


def train_until_save_fails(step: int, argv: list[str]) -> None:
    """A training whose process 0 breaks down in the middle of writing the checkpoint of a step."""
    from swift_megatron.trainers.mixin import ParallelTrainerMixin
    write = ParallelTrainerMixin._save_states

    def fail(self: Any, directory: str, owner: bool) -> None:
        if self.state.global_step == step and self.args.process_index == 0:
            raise OSError('no space left on device')
        write(self, directory, owner)

    with mock.patch.object(ParallelTrainerMixin, '_save_states', fail):
        train('ours', 'sft', argv)


def train_on_nodes(argv: list[str]) -> list[str]:
    """A training whose ranks are nodes of one process, each with the folders in which its number stands for {node}; it
    may upload to a hub, which is not there. What was logged as a warning, and what would have been uploaded.
    """
    import logging
    import os
    from swift.utils import get_logger
    said: list[str] = []

    class Collecting(logging.Handler):

        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def upload(*, folder_path: str, **_: Any) -> mock.Mock:
        said.append(f'upload {os.path.basename(folder_path)}: {" ".join(sorted(os.listdir(folder_path)))}')
        return mock.Mock(done=lambda: True)

    get_logger().addHandler(Collecting(logging.WARNING))
    node = os.environ['RANK']
    os.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1', NODE_RANK=node, NNODES=os.environ['WORLD_SIZE'])
    hub = mock.Mock(upload_folder=upload)
    hub.create_repo.return_value = mock.Mock(repo_id='someone/model')
    with mock.patch('transformers.trainer.hf_api', return_value=hub):
        train('ours', 'sft', [word.replace('{node}', node) for word in argv])
    return said


def infer(adapter: str, data: str, result: str) -> None:
    """`swift infer` with what args.json beside the adapter says of model and template."""
    from swift.pipelines import infer_main
    infer_main(['--adapters', adapter, '--val_dataset', data, '--result_path', result, '--max_new_tokens', '4'])


def run_worker(command: str, argv: list[str]) -> None:
    """What torchrun starts; ends with its exit status. Ranks that wait for the first one to speak are stopped."""
    from swift_megatron.cli.worker import run
    with mock.patch('swift_megatron.cli.main.time.sleep', side_effect=SystemExit(2)):
        raise SystemExit(run(command, argv))


def fail_alone(rank: int) -> None:
    """One rank has bad input, and the first one nothing to say: its wait ends without being stopped."""
    import os

    from swift_megatron.cli.main import fail
    from swift_megatron.config import ConfigError
    if int(os.environ['RANK']) == rank:
        with mock.patch('swift_megatron.cli.main.time.sleep'):
            fail(ConfigError(['the weights of stage 1 are missing']))


def probe(model: Any) -> list:
    """Logits of three short rows. (3, 12, V)"""
    import torch
    ids = torch.randint(3, 300, (3, 12), generator=torch.Generator().manual_seed(9))
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().tolist()


def probe_adapter(model_directory: str, adapter: str) -> list:
    """The logits by transformers and PEFT alone. Anything that they warn of, such as a missing key, is an error."""
    import peft
    import transformers
    import warnings
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype='float32')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        return probe(peft.PeftModel.from_pretrained(model, adapter))


def probe_checkpoint(directory: str) -> list:
    """The logits of a full checkpoint by transformers alone; every weight has to come from the file."""
    import transformers
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype='float32', output_loading_info=True)
    assert not any(info.values()), info
    return probe(model)


def train_from_python(settings: dict[str, Any]) -> list:
    """A training from a TrainerConfig, then the logits of the saved adapter on the partitioned base."""
    from swift_megatron import SwiftModel, TrainerConfig, sft_main
    from .runs import COMMON
    result = sft_main(TrainerConfig(**{**COMMON, **settings}))
    trained = {**settings, 'adapters': [result['last_model_checkpoint']]}
    return probe(SwiftModel.from_pretrained(TrainerConfig(**{**COMMON, **trained})))


def train_and_capture(argv: list[str]) -> str:
    """A training by this package; everything that ms-swift's logger said."""
    import logging
    from swift.utils import get_logger
    lines: list[str] = []

    class Collecting(logging.Handler):

        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = get_logger()
    logger.addHandler(Collecting(logging.INFO))
    train('ours', 'sft', argv)
    return '\n'.join(lines)


def _flat(nested: list) -> list[float]:
    return [x for row in nested for position in row for x in position]


def merge_and_probe(model: str, adapter: str, output: str, into: str) -> tuple[list[float], list[float]]:
    """Logits of a merged checkpoint, and of the base (as it is, or as its 4-bit form stands for) with the adapter."""
    import peft
    import torch
    import transformers

    from swift_megatron.mesh import ParallelMesh
    from swift_megatron.pipelines.export import ExportConfig, export_main
    from swift_megatron.quantization.base import QuantizationConfig, quantize
    export_main(ExportConfig(adapters=adapter, output_dir=output, merge_lora=True, merge_into=into))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if into == 'dequantized':
        config = QuantizationConfig(format='nf4', double=False)
        for name, parameter in base.named_parameters():
            if '.layers.' in name and parameter.ndim == 2:
                parameter.data = quantize(parameter.data,
                                          ParallelMesh().spec(parameter.shape), config, ParallelMesh()).dequantized()
    return _flat(probe_checkpoint(output)), _flat(probe(peft.PeftModel.from_pretrained(base, adapter)))


def merge_twice(model: str, adapter: str, output: str) -> tuple[str, str]:
    """The messages for merging into the same folder, and for merging into a merged model."""
    from swift_megatron.config import ConfigError
    from swift_megatron.pipelines.export import ExportConfig, export_main
    messages = []
    for base, folder in ((model, output), (output, f'{output}-again')):
        try:
            export_main(ExportConfig(adapters=adapter, model=base, output_dir=folder, merge_lora=True))
        except ConfigError as error:
            messages.append(str(error))
    first, second = messages
    return first, second
