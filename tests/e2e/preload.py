"""Imported once by the fork server of the end-to-end tests, so that its children start with ms-swift loaded.

ms-swift imports most of its modules when they are first used; those that every training needs are imported here.
"""
import functools
import gc
import os
from typing import Any

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false', GLOO_SOCKET_IFNAME='lo')

import torch  # noqa: E402

torch.set_num_threads(1)

import datasets  # noqa: E402
import deepspeed  # noqa: E402,F401
import peft.utils.transformers_weight_conversion  # noqa: E402,F401
import scipy.io  # noqa: E402,F401
import swift.callbacks  # noqa: E402,F401
import swift.dataset  # noqa: E402,F401
import swift.loss_scale  # noqa: E402,F401
import swift.optimizers  # noqa: E402,F401
import swift.pipelines.train.pretrain  # noqa: E402,F401
import swift.pipelines.train.sft  # noqa: E402,F401
import swift.trainers.seq2seq_trainer  # noqa: E402,F401
import transformers.models.llama.modeling_llama  # noqa: E402,F401
import transformers.models.qwen2.modeling_qwen2  # noqa: E402,F401

import swift_megatron.cli.worker  # noqa: E402,F401
import swift_megatron.pipelines.sft  # noqa: E402,F401
import swift_megatron.trainers.arguments  # noqa: E402,F401
import swift_megatron.trainers.sft  # noqa: E402,F401


def _mapped_here(dataset_map: Any) -> Any:
    """`Dataset.map` that starts no process where one is asked for: ms-swift's default is a pool of one.

    A pool of one, its manager and their copies of this process' memory cost as much as the training.
    """

    @functools.wraps(dataset_map)
    def mapped(self: datasets.Dataset, *args: Any, num_proc: Any = None, **kwargs: Any) -> datasets.Dataset:
        return dataset_map(self, *args, num_proc=None if num_proc == 1 else num_proc, **kwargs)

    return mapped


datasets.Dataset.map = _mapped_here(datasets.Dataset.map)

# What is loaded now stays: the children's garbage collections, of which ms-swift does several, need not look at it.
gc.collect()
gc.freeze()
