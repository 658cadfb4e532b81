"""How a trainer writes and reads checkpoints when a model is spread over processes.

Every process takes part, process 0 writes what plain ms-swift writes; optimizer states lie as the ranks hold them. A
folder gets its name when it is complete.
"""
import numpy as np
import os
import random
import shutil
import torch
import torch.distributed as dist
import warnings
from peft import PeftModel
from swift.utils import get_logger
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints
from typing import Any, Optional

from ..checkpoint.adapter import save_adapter
from ..checkpoint.full import save_full_model
from ..checkpoint.layout import optimizer_file, write_layout
from ..lora.state import load_tensors
from ..mesh import ParallelMesh
from ..model.language_modeling import causal_lm
from ..model.loading import load_slices
from ..model.stages import tied_aliases
from .data import is_reader

logger = get_logger()


class CheckpointMixin:
    """Saving and resuming; part of `ParallelTrainerMixin`."""
    mesh: ParallelMesh

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Every process takes part, process 0 writes: a PEFT adapter, or a Hugging Face checkpoint."""
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
        if self.mesh.data_rank > 0:  # replicas are alike: the first one writes
            return
        if isinstance(self.model, PeftModel):
            save_adapter(self.model, output_dir, self.mesh)
        else:
            save_full_model(self.model, output_dir, self.mesh, max_shard_size=self.args.max_shard_size)
        if self.args.should_save:
            self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message='Model save', revision=self.args.hub_revision)

    def _save_model(self, output_dir: Optional[str] = None, state_dict: Optional[dict] = None) -> None:
        """On process 0 only. Weights, and all files of an adapter, are already written."""
        if isinstance(self.model, PeftModel):
            return
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(output_dir)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes into a folder of another name and renames it at the end: a crash leaves nothing that looks
        complete.
        """
        self.store_flos()
        run_dir = self._get_output_dir(trial=trial)
        final = os.path.join(run_dir, f'{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}')
        staging = f'{final}.incomplete'
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            os.makedirs(staging)
        self._barrier()
        self.save_model(staging, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(staging)
            self._save_scaler(staging)
            self._save_rng_state(staging)
        self._note_best_checkpoint(run_dir, final)
        self._barrier()
        if self.args.should_save:
            self._save_trainer_state(staging)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(staging, final)
        self._barrier()
        self.state.last_model_checkpoint = final
        logger.info(f'Saving model checkpoint to {final}')
        self._update_last_checkpoint_symlink()
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True)

    def _note_best_checkpoint(self, run_dir: str, final: str) -> None:
        if self.args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST) \
                and self.state.best_global_step:
            best = os.path.join(run_dir, f'{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}')
            if best == final or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def _save_trainer_state(self, directory: str) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(state)
                else:
                    self.state.stateful_callbacks[name] = state
        self.state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Optimizer states as the model-parallel ranks of replica 0 hold them, a file for each; the scheduler once."""
        if self.mesh.data_rank == 0:
            file = optimizer_file(self.mesh.tensor_rank, self.mesh.pipeline_rank)
            torch.save(self.optimizer.state_dict(), os.path.join(output_dir, file))
        if self.args.should_save:
            write_layout(output_dir, self.mesh.tensor_parallel_size, causal_lm(self.model).stage_split)
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _rng_file(self, directory: str) -> str:
        suffix = f'_{self.mesh.data_rank}' if self.mesh.data_parallel_size > 1 else ''
        return os.path.join(directory, f'rng_state{suffix}.pth')

    def _save_rng_state(self, output_dir: str) -> None:
        """One state for each replica: its ranks draw in step."""
        if not is_reader(self.mesh):
            return
        states = {'python': random.getstate(), 'numpy': np.random.get_state(), 'cpu': torch.random.get_rng_state()}
        if torch.cuda.is_available():
            states['cuda'] = torch.cuda.get_rng_state()
        torch.save(states, self._rng_file(output_dir))

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    # ---- Resuming ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Optional[nn.Module] = None) -> None:
        model = model or self.model
        logger.info(f'Loading model from {resume_from_checkpoint}.')
        if isinstance(model, PeftModel):
            load_tensors(model, resume_from_checkpoint)
        else:
            load_slices(model, resume_from_checkpoint, self.args.device, aliases=tied_aliases(model))

    def _load_best_model(self) -> None:
        logger.info(f'The best model is {self.state.best_model_checkpoint} (score: {self.state.best_metric}).')
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        if checkpoint is None or self.args.resume_only_model:
            return
        file = os.path.join(checkpoint, optimizer_file(self.mesh.tensor_rank, self.mesh.pipeline_rank))
        self.optimizer.load_state_dict(torch.load(file, map_location='cpu', weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_rng_state(self, checkpoint: Optional[str]) -> None:
        if checkpoint is None or self.args.resume_only_model:
            return
        file = self._rng_file(checkpoint)
        if not os.path.isfile(file):
            logger.info(f'{file} does not exist: dropout masks differ from those of an uninterrupted run.')
            return
        with torch.serialization.safe_globals(
            [np._core.multiarray._reconstruct, np.ndarray, np.dtype,
             type(np.dtype(np.uint32))]):
            states = torch.load(file, weights_only=True)
        random.setstate(states['python'])
        np.random.set_state(states['numpy'])
        torch.random.set_rng_state(states['cpu'])
        if 'cuda' in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states['cuda'])
