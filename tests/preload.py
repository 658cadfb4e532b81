"""Imported once by the test harness' fork server, so that its children start with these modules loaded.

A child that imports them itself takes a second more, and a test has up to eight. What cannot be imported here is left
to the child that needs it, which shows the reason.
"""
import contextlib
import gc
import importlib
import os
import pkgutil

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false')

import peft  # noqa: E402,F401
import torch  # noqa: E402
import transformers  # noqa: E402,F401

torch.set_num_threads(1)

import swift_megatron  # noqa: E402
from tests.tiny_models import FAMILIES  # noqa: E402

FOREIGN = ('bitsandbytes', 'bitsandbytes.functional', 'peft.tuners.lora.bnb',
           'peft.utils.transformers_weight_conversion', 'pytest', 'safetensors.torch', 'torch.distributed.device_mesh',
           'torch.distributed.pipelining', 'torch.profiler._cupti_monitor', 'transformers.generation',
           'transformers.models.auto.modeling_auto')
NEED_SWIFT = ('arguments', 'cli', 'pipelines', 'trainers')  # and take ten seconds

OWN = [
    module.name for module in pkgutil.walk_packages(swift_megatron.__path__, 'swift_megatron.')
    if module.name.split('.')[1] not in (*NEED_SWIFT, '__main__')
]
MODELS = [
    f'transformers.models.{family.removesuffix("_text")}.modeling_{family.removesuffix("_text")}' for family in FAMILIES
]

for name in (*FOREIGN, *OWN, *MODELS):
    with contextlib.suppress(Exception):
        importlib.import_module(name)

# What is loaded now stays: the children's garbage collections need not look at it, nor copy its memory.
gc.collect()
gc.freeze()
