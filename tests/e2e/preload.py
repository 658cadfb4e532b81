"""Imported once by the fork server of the end-to-end tests, so that its children start with ms-swift loaded.

ms-swift imports most of its modules when they are first used; those that every training needs are imported here.
"""
import gc
import os

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false', GLOO_SOCKET_IFNAME='lo')

import torch  # noqa: E402

torch.set_num_threads(1)

import deepspeed  # noqa: E402,F401
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

# What is loaded now stays: the children's garbage collections, of which ms-swift does several, need not look at it.
gc.collect()
gc.freeze()
