"""Imported once by the test harness' fork server, so that its children start with these modules loaded."""
import os

os.environ.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false')

import peft  # noqa: E402,F401
import torch  # noqa: E402
import transformers  # noqa: E402,F401
import transformers.models.auto.modeling_auto  # noqa: E402,F401

torch.set_num_threads(1)
