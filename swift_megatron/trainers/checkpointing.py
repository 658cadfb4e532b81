"""How a trainer writes and reads checkpoints when a model is spread over processes.

Every process takes part in a checkpoint. Process 0 writes what plain ms-swift writes, weights among it; each rank adds
the states that only it has. A folder gets its name when it is complete. Nodes may have disks of their own: each has the
files of its ranks, and one process of each disk writes what all ranks of it read when they resume.

ms-swift and transformers run some things on process 0 alone: the upload to a hub, the model card, logging.jsonl and
plots, `last-checkpoint`, callbacks that write. None of them may gather weights, because no other process takes part:
what is uploaded is written by all at the end of `train`.
"""
import os
import torch
import torch.distributed as dist
import warnings
from peft import PeftModel
from swift.utils import get_logger, update_last_checkpoint_symlink
from torch import nn
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints
from typing import Any, Optional

from ..checkpoint.adapter import save_adapter
from ..checkpoint.atomic import AtomicFolder, clean, rotate, sync
from ..checkpoint.full import save_full_model
from ..checkpoint.layout import optimizer_file, write_layout
from ..checkpoint.rng import load_random_state, random_state_file, save_random_state
from ..config import ConfigError
from ..lora.state import load_tensors
from ..mesh import ParallelMesh
from ..model.language_modeling import causal_lm
from ..model.loading import load_slices
from ..model.stages import tied_aliases

logger = get_logger()


class CheckpointMixin:
    """Saving and resuming; part of `ParallelTrainerMixin`."""
    mesh: ParallelMesh
    _disks_told = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what ms-swift uploads afterwards, on process 0 alone, lies in output_dir then."""
        output = super().train(*args, **kwargs)
        if self.args.push_to_hub:
            self.save_model(self.args.output_dir, _internal_call=True)
        return output

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Every process takes part, process 0 writes: a PEFT adapter, or a Hugging Face checkpoint.

        The Trainer's `push_to_hub`, which runs on process 0 alone, calls it internally without a directory: nothing is
        gathered then.
        """
        if _internal_call and output_dir is None:
            return
        output_dir = output_dir or self.args.output_dir
        if self.mesh.rank == 0:
            os.makedirs(output_dir, exist_ok=True)
        if self.mesh.data_rank > 0:  # replicas are alike: the first one writes
            return
        if isinstance(self.model, PeftModel):
            save_adapter(self.model, output_dir, self.mesh)
        else:
            save_full_model(self.model, output_dir, self.mesh, max_shard_size=self.args.max_shard_size)
        if self.mesh.rank == 0:
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
        """Writes beside the final folder and renames at the end: a crash leaves nothing that looks complete."""
        self.store_flos()
        run_dir = self._get_output_dir(trial=trial)
        final = os.path.join(run_dir, f'{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}')
        folder = AtomicFolder(final)
        owner = self._begin(folder)
        self.save_model(folder.staging, _internal_call=True)
        self._note_best_checkpoint(run_dir, final)
        if not self.args.save_only_model:
            self._save_states(folder.staging, owner)
        self._barrier()
        if owner:
            self._save_trainer_state(folder.staging)
        if self.is_local_process_zero():
            sync(folder.staging)
        self._barrier()
        if owner:
            folder.publish()
        self._barrier()
        self.state.last_model_checkpoint = final
        logger.info(f'Saving model checkpoint to {final}')
        if owner:
            update_last_checkpoint_symlink(final)
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if owner and self.args.save_total_limit is not None:
            best = self.state.best_model_checkpoint
            rotate(
                sort_checkpoints(run_dir, use_mtime=True),
                self.args.save_total_limit,
                keep=[final] if best is None else [final, best])

    def _begin(self, folder: AtomicFolder) -> bool:
        """Makes the folder once on each disk. Whether this process did: it then writes what all ranks of the disk read,
        and names the folder. Process 0 does on its own disk.
        """
        owner = False
        if self.is_local_process_zero():
            clean(os.path.dirname(folder.path))
        self._barrier()
        if self.mesh.rank == 0:
            owner = folder.begin()
        self._barrier()
        if self.is_local_process_zero() and self.mesh.rank > 0:
            owner = folder.begin()
        self._barrier()
        self._tell_disks(owner)
        return owner

    def _tell_disks(self, owner: bool) -> None:
        """Once in a run, where nodes have disks of their own: what has to be copied before resuming."""
        if self._disks_told:
            return
        self._disks_told = True
        disks = self._sum(int(owner))
        if disks > 1:
            logger.warning(
                f'The nodes write to {disks} disks: each has the optimizer and random states of its own ranks, the '
                'first one the weights as well. Before a run resumes from a checkpoint-N folder, or loads the best '
                'one at its end, copy to the same folder on every node the files that it lacks (rsync -a '
                '--ignore-existing), and keep the order of the nodes.')

    def _note_best_checkpoint(self, run_dir: str, final: str) -> None:
        if self.args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST) \
                and self.state.best_global_step:
            best = os.path.join(run_dir, f'{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}')
            if best == final or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def _save_trainer_state(self, directory: str) -> None:
        """The last file of a checkpoint."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(state)
                else:
                    self.state.stateful_callbacks[name] = state
        self.state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))

    def _save_states(self, directory: str, owner: bool) -> None:
        """What resuming needs beside the weights. Replicas have equal optimizer states, and tensor-parallel ranks equal
        random states: one of them writes, the first one where it shares a disk with the others.
        """
        if owner:
            write_layout(directory, self.mesh.tensor_parallel_size, causal_lm(self.model).stage_split)
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                torch.save(self.lr_scheduler.state_dict(), os.path.join(directory, SCHEDULER_NAME))
            if self.accelerator.scaler is not None:
                torch.save(self.accelerator.scaler.state_dict(), os.path.join(directory, SCALER_NAME))
        mesh = self.mesh
        optimizer = os.path.join(directory, optimizer_file(mesh.tensor_rank, mesh.pipeline_rank))
        randomness = os.path.join(directory, random_state_file(mesh.pipeline_rank, mesh.data_rank))
        if mesh.data_rank == 0:
            self._save_optimizer(optimizer)
        if mesh.tensor_rank == 0:
            save_random_state(randomness)
        self._barrier()
        if _claim(optimizer):
            self._save_optimizer(optimizer)
        if _claim(randomness):
            save_random_state(randomness)

    def _save_optimizer(self, path: str) -> None:
        torch.save(self.optimizer.state_dict(), path)

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
        for path in (file, os.path.join(checkpoint, SCHEDULER_NAME)):
            if not os.path.isfile(path):
                raise ConfigError([
                    f"rank {self.mesh.rank} finds no '{path}': the checkpoint is not complete on this node; copy to it "
                    'the files that other nodes have, or give another checkpoint folder'
                ])
        self.optimizer.load_state_dict(torch.load(file, map_location='cpu', weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_rng_state(self, checkpoint: Optional[str]) -> None:
        if checkpoint is None or self.args.resume_only_model:
            return
        file = random_state_file(self.mesh.pipeline_rank, self.mesh.data_rank)
        lacking = self._sum(int(not load_random_state(os.path.join(checkpoint, file))))
        if lacking:
            logger.info(f'{lacking} of {self.mesh.world_size} ranks find no random state in {checkpoint} (it was '
                        'written with fewer replicas, or lies on another node): their dropout masks differ from those '
                        'of an uninterrupted run.')

    # ---- Agreement ----

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def _sum(self, number: int) -> int:
        """Of one number of each process. Every process has to call it."""
        if not dist.is_initialized():
            return number
        total = torch.tensor(number, device=self.args.device)
        dist.all_reduce(total)
        return int(total)


def _claim(path: str) -> bool:
    """Makes an empty file; False if this process' disk has it already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
