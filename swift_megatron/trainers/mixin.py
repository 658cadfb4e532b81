"""What changes in ms-swift's trainers when a model is spread over processes; everything else stays theirs.

Who gets which samples, how gradients are reduced, normed and clipped, how files are written and read back. The Trainer
sees as many processes as there are model replicas.
"""
import os
import random
import shutil
import warnings
from functools import partial
from typing import Any, Optional

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from swift.utils import get_logger, seed_worker
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from ..checkpoint.full import save_full_model
from ..checkpoint.gather import gather_from_stages, gather_whole
from ..checkpoint.layout import optimizer_file, write_layout
from ..lora.inject import reload_lora
from ..mesh import ParallelMesh
from ..model.build import owned_elements, tied_aliases
from ..model.language_modeling import causal_lm
from ..model.loading import load_slices
from ..optim.gradients import (agree_on_overflow, average_over_replicas, clip_gradients, gradient_norm,
                               sum_partial_gradients, sum_tied_gradients)
from ..pipeline_parallel.schedule import run_micro_batches
from ..sharding import spec_of
from .accelerator import ReplicaAccelerator
from .data import (ReplicaBatchSampler, ReplicaDataLoader, ReplicaDispatcher, broadcast_in_replica, is_reader)

logger = get_logger()


class ParallelTrainerMixin:
    """To be mixed in before one of ms-swift's trainers.

    Args:
        mesh: The process grid.
    """

    def __init__(self, *args: Any, mesh: ParallelMesh, **kwargs: Any) -> None:
        self.mesh = mesh
        super().__init__(*args, **kwargs)
        # The model owns its placement and its gradient reduction: the Trainer must not wrap it.
        self.is_distributed_loading_by_transformers = True
        # Replicas and stages draw different dropout masks; the first ones those of a run in one process.
        offset = mesh.data_rank + mesh.data_parallel_size * mesh.pipeline_rank
        if offset:
            torch.manual_seed(self.args.seed + offset)
        self._waiting: list[dict] = []  # micro-batches that the pipeline has not run yet

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = ReplicaAccelerator.of(self.accelerator, self.mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing: `_reduce_gradients` does it."""

    # ---- Data ----

    def get_train_dataloader(self, skip_batches: int = 0) -> ReplicaDataLoader:
        if self.train_dataset is None:
            raise ValueError('training needs a train_dataset')
        args = self.args
        params = {
            'collate_fn': self.data_collator,
            'num_workers': args.dataloader_num_workers,
            'pin_memory': args.dataloader_pin_memory,
            'persistent_workers': args.dataloader_persistent_workers,
            'prefetch_factor': args.dataloader_prefetch_factor,
            **self._maybe_multiprocessing_context(args),
        }
        if hasattr(self.train_dataset, '__len__'):
            loader = self._map_style_loader(params, skip_batches)
        else:
            base = torch.utils.data.DataLoader(self.train_dataset, batch_size=self._train_batch_size, **params)
            loader = ReplicaDispatcher(base, None, skip_batches=skip_batches, mesh=self.mesh)
        return ReplicaDataLoader(loader, self.mesh, self.accelerator.device)

    def _map_style_loader(self, params: dict[str, Any], skip_batches: int) -> Any:
        from accelerate.data_loader import SkipBatchSampler
        from swift.dataloader import DataLoaderShard
        args = self.args
        lengths = {'group_by_length': True, 'lengths': self.train_dataset['lengths']} if args.group_by_length else {}
        sampler = ReplicaBatchSampler(
            len(self.train_dataset), batch_size=self._train_batch_size, shuffle=args.train_dataloader_shuffle,
            drop_last=args.dataloader_drop_last, data_seed=args.data_seed, mesh=self.mesh, **lengths)
        if skip_batches > 0:
            sampler = SkipBatchSampler(sampler, skip_batches=skip_batches)
        params['worker_init_fn'] = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=self.mesh.data_rank)
        return DataLoaderShard(self.train_dataset, device=None, batch_sampler=sampler, **params)

    def prediction_step(self, model: nn.Module, inputs: dict, *args: Any, **kwargs: Any) -> tuple:
        inputs = broadcast_in_replica(inputs if is_reader(self.mesh) else None, self.mesh)
        if self.mesh.pipeline_parallel_size == 1:
            return super().prediction_step(model, inputs, *args, **kwargs)
        inputs = self._prepare_inputs(inputs)
        num_items = self._get_num_items_in_batch([inputs], self.args.device)
        return self._run_stages(model, [inputs], num_items, backward=False), None, None

    # ---- Gradients ----

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: Optional[torch.Tensor] = None) -> torch.Tensor:
        """One micro-batch; with a pipeline, micro-batches wait until there are num_micro_batches or the step ends."""
        if self.mesh.pipeline_parallel_size == 1:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._pipeline_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._reduce_gradients(model)
        return loss

    def _pipeline_step(self, model: nn.Module, inputs: dict, num_items: Optional[torch.Tensor]) -> torch.Tensor:
        self._waiting.append(inputs)
        if len(self._waiting) < self.args.num_micro_batches and not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        model.train()
        if callable(getattr(self.optimizer, 'train', None)):
            self.optimizer.train()
        return self._run_stages(model, [self._prepare_inputs(batch) for batch in batches], num_items, backward=True)

    def loss_from_hidden(self, hidden: torch.Tensor, batch: dict, num_items_in_batch: Optional[torch.Tensor]) -> torch.Tensor:
        """The loss of one micro-batch from the decoder's output (B, S, H); of the trainer that this is mixed into."""
        raise NotImplementedError

    def _run_stages(self, model: nn.Module, batches: list[dict], num_items: Optional[torch.Tensor], *,
                    backward: bool) -> torch.Tensor:
        """Sum of the micro-batches' losses, the same on all stages."""
        total = torch.zeros((), dtype=torch.float32, device=self.args.device)
        scaler = self.accelerator.scaler if backward else None

        def loss_fn(hidden: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.loss_from_hidden(hidden, batches[index], num_items)
            total.add_(loss.detach())
            return loss if scaler is None else scaler.scale(loss)

        lm = causal_lm(model)
        run_micro_batches(lm, batches, loss_fn, split=lm.stage_split, mesh=self.mesh, kind=self.args.pipeline_schedule,
                          backward=backward, autocast=self.accelerator.autocast)
        dist.all_reduce(total, group=self.mesh.pipeline_group)
        return total

    def create_optimizer(self, model: Optional[nn.Module] = None) -> torch.optim.Optimizer:
        """A stage without trainable parameters gets an optimizer with an empty one: schedulers and logs ask for its rate."""
        optimizer = super().create_optimizer(model)
        if not optimizer.param_groups:
            optimizer.add_param_group({'params': [nn.Parameter(torch.empty(0, device=self.args.device))]})
        return optimizer

    def _reduce_gradients(self, model: nn.Module) -> None:
        """Once per optimizer step, after the last backward pass."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        sum_partial_gradients(parameters, self.mesh)
        sum_tied_gradients(parameters, self.mesh)
        average_over_replicas(parameters, self.mesh)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._norm_and_clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Optional[torch.Tensor] = None) -> float:
        norm = self._norm_and_clip(model, None) if grad_norm is None else grad_norm
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    def _norm_and_clip(self, model: nn.Module, max_norm: Optional[float]) -> torch.Tensor:
        """The norm of the whole gradient, before clipping. A norm that is not a number drops the step, as in ms-swift."""
        self.accelerator.unscale_gradients()
        if self.accelerator.scaler is not None:
            agree_on_overflow(self.accelerator.scaler, self.optimizer.optimizer, self.mesh, self.args.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        norm = gradient_norm(parameters, self.mesh)
        if norm.isnan():
            for parameter in parameters:
                parameter.grad = None
        elif max_norm:
            clip_gradients(parameters, max_norm, norm)
        return norm

    def floating_point_ops(self, inputs: dict) -> float:
        """This rank's share of the whole model's operations; the Trainer adds up the ranks. 6 N per token, as in transformers."""
        lm = causal_lm(self.model)
        embeddings = [module.weight for module in lm.modules() if isinstance(module, nn.Embedding)]
        owned = owned_elements(lm) - sum(spec_of(weight).num_owned() for weight in embeddings)
        return 6 * inputs['input_ids'].numel() * owned

    # ---- Saving ----

    def _adapter_state(self) -> dict[str, torch.Tensor]:
        """Whole tensors of all that is trained (and of an embedding that PEFT stores with its adapter), on process 0."""
        state = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or 'lora_' in name or '.modules_to_save.' in name or self._is_adapted_embedding(name):
                whole = gather_whole(parameter, spec_of(parameter), self.mesh)
                if whole is not None:
                    state[name] = whole
        return gather_from_stages(state, self.mesh) if self.mesh.tensor_rank == 0 else state

    def _is_adapted_embedding(self, name: str) -> bool:
        """PEFT writes the base weight of an embedding or head with adapters into the adapter's file."""
        stem = name.removesuffix('.base_layer.weight')
        if stem == name:
            return False
        layer = self.model.get_submodule(stem)
        return layer in (self.model.get_input_embeddings(), self.model.get_output_embeddings())

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Every process takes part, process 0 writes: a PEFT adapter, or a Hugging Face checkpoint."""
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            os.makedirs(output_dir, exist_ok=True)
        state = {}
        if self.mesh.data_rank > 0:  # replicas are alike: the first one writes
            return
        if isinstance(self.model, PeftModel):
            state = self._adapter_state()
        else:
            save_full_model(self.model, output_dir, self.mesh, max_shard_size=self.args.max_shard_size)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message='Model save', revision=self.args.hub_revision)

    def _save_model(self, output_dir: Optional[str] = None, state_dict: Optional[dict] = None) -> None:
        """On process 0 only. The weights of a full checkpoint are already written."""
        if isinstance(self.model, PeftModel):
            super()._save_model(output_dir, state_dict)
            return
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(output_dir)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes into a folder of another name and renames it at the end: a crash leaves nothing that looks complete."""
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
            rotate_checkpoints(output_dir=run_dir, save_total_limit=self.args.save_total_limit,
                               best_model_checkpoint=self.state.best_model_checkpoint, use_mtime=True)

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
            write_layout(output_dir, self.args)
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
            reload_lora(model, resume_from_checkpoint)
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
        with torch.serialization.safe_globals([np._core.multiarray._reconstruct, np.ndarray, np.dtype,
                                               type(np.dtype(np.uint32))]):
            states = torch.load(file, weights_only=True)
        random.setstate(states['python'])
        np.random.set_state(states['numpy'])
        torch.random.set_rng_state(states['cpu'])
        if 'cuda' in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states['cuda'])
