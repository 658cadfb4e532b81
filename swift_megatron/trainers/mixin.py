"""What changes in ms-swift's trainers when a model is spread over processes; everything else stays theirs.

Who gets which samples, how gradients are reduced, normed and clipped, how files are written and read back. The Trainer
sees as many processes as there are model replicas.
"""
import torch
import torch.distributed as dist
from functools import partial
from swift.utils import get_logger, seed_worker
from torch import nn
from transformers.trainer_utils import EvalLoopOutput
from typing import Any, Optional

from ..mesh import ParallelMesh
from ..model.accounting import owned_elements
from ..model.language_modeling import causal_lm
from ..model.micro_batches import run_micro_batches
from ..optim.gradients import (agree_on_overflow, average_over_replicas, clip_gradients, gradient_norm,
                               sum_partial_gradients, sum_tied_gradients)
from ..sharding import spec_of
from .accelerator import ReplicaAccelerator
from .checkpointing import CheckpointMixin
from .data import ReplicaBatchSampler, ReplicaDataLoader, ReplicaDispatcher, holds_samples
from .evaluation import ReplicaEvaluationLoader

logger = get_logger()


class ParallelTrainerMixin(CheckpointMixin):
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
            loader, step = self._map_style_loader(params, skip_batches), 1
        else:
            base = torch.utils.data.DataLoader(self.train_dataset, batch_size=self._train_batch_size, **params)
            loader = ReplicaDispatcher(base, None, skip_batches=skip_batches, mesh=self.mesh)
            step = args.gradient_accumulation_steps
        return ReplicaDataLoader(loader, self.mesh, self.accelerator.device, step)

    def _map_style_loader(self, params: dict[str, Any], skip_batches: int) -> Any:
        from accelerate.data_loader import SkipBatchSampler
        from swift.dataloader import DataLoaderShard
        args = self.args
        lengths = {'group_by_length': True, 'lengths': self.train_dataset['lengths']} if args.group_by_length else {}
        sampler = ReplicaBatchSampler(
            len(self.train_dataset),
            batch_size=self._train_batch_size,
            shuffle=args.train_dataloader_shuffle,
            drop_last=args.dataloader_drop_last,
            data_seed=args.data_seed,
            mesh=self.mesh,
            **lengths)
        if skip_batches > 0:
            sampler = SkipBatchSampler(sampler, skip_batches=skip_batches)
        params['worker_init_fn'] = partial(
            seed_worker, num_workers=args.dataloader_num_workers, rank=self.mesh.data_rank)
        return DataLoaderShard(self.train_dataset, device=None, batch_sampler=sampler, **params)

    def evaluation_loop(self, dataloader: ReplicaEvaluationLoader, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The Trainer counts the samples of one replica, and a row of samples without padding as one."""
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        return output._replace(num_samples=dataloader.num_samples) if dataloader.is_stream else output

    def prediction_step(self, model: nn.Module, inputs: dict, *args: Any, **kwargs: Any) -> tuple:
        """The loss over the label tokens of all replicas' batches, the same number on all ranks; no logits."""
        if not holds_samples(inputs):
            self._get_num_items_in_batch([inputs], self.args.device)  # the other replicas count theirs
            loss = torch.zeros((), device=self.args.device)
        elif self.mesh.pipeline_parallel_size == 1:
            loss = super().prediction_step(model, inputs, *args, **kwargs)[0]
        else:
            inputs = self._prepare_inputs(inputs)
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            loss = self._run_stages(model, [inputs], num_items, backward=False)
        return self.accelerator.gather(loss.float()).mean(), None, None

    # ---- Gradients ----

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple:
        """A step begins: what one that was broken off left behind, by an exception or a callback, is no part of it."""
        self._waiting.clear()
        self.model.zero_grad()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self,
                      model: nn.Module,
                      inputs: dict,
                      num_items_in_batch: Optional[torch.Tensor] = None) -> torch.Tensor:
        """One micro-batch; with a pipeline, micro-batches wait until there are num_micro_batches or the step ends."""
        if self.mesh.pipeline_parallel_size > 1:
            loss = self._pipeline_step(model, inputs, num_items_in_batch)
        elif holds_samples(inputs):
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = torch.zeros((), device=self.args.device)
        if self.accelerator.sync_gradients:
            self._reduce_gradients(model)
        return loss

    def _pipeline_step(self, model: nn.Module, inputs: dict, num_items: Optional[torch.Tensor]) -> torch.Tensor:
        if holds_samples(inputs):
            self._waiting.append(inputs)
        is_ready = len(self._waiting) == self.args.num_micro_batches or self.accelerator.sync_gradients
        if not self._waiting or not is_ready:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        model.train()
        if callable(getattr(self.optimizer, 'train', None)):
            self.optimizer.train()
        return self._run_stages(model, [self._prepare_inputs(batch) for batch in batches], num_items, backward=True)

    def loss_from_hidden(self, hidden: torch.Tensor, batch: dict,
                         num_items_in_batch: Optional[torch.Tensor]) -> torch.Tensor:
        """The loss of one micro-batch from the decoder's output (B, S, H); of the trainer that this is mixed into."""
        raise NotImplementedError

    def _run_stages(self, model: nn.Module, batches: list[dict], num_items: Optional[torch.Tensor], *,
                    backward: bool) -> torch.Tensor:
        """Sum of the micro-batches' losses, the same on all stages."""
        total = torch.zeros((), dtype=torch.float32, device=self.args.device)
        scaler = self.accelerator.scaler if backward else None
        if scaler is not None:
            scaler.scale(total)  # the scale is made by the first call, and only the last stage has losses to call with

        def loss_fn(hidden: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.loss_from_hidden(hidden, batches[index], num_items)
            total.add_(loss.detach())
            return loss if scaler is None else scaler.scale(loss)

        lm = causal_lm(model)
        run_micro_batches(
            lm,
            batches,
            loss_fn,
            split=lm.stage_split,
            mesh=self.mesh,
            kind=self.args.pipeline_schedule,
            backward=backward,
            autocast=self.accelerator.autocast)
        dist.all_reduce(total, group=self.mesh.pipeline_group)
        return total

    def create_optimizer(self, model: Optional[nn.Module] = None) -> torch.optim.Optimizer:
        """A stage without trainable parameters gets an optimizer with an empty one: schedulers and logs ask for its
        rate.
        """
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
        """The norm of the whole gradient, before clipping. A norm that is not a number drops the step, as in
        ms-swift.
        """
        self.accelerator.unscale_gradients()
        if self.accelerator.scaler is not None:
            agree_on_overflow(self.accelerator.scaler, self.optimizer.optimizer, self.mesh, self.args.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        norm = gradient_norm(parameters, self.mesh, self.args.device)
        if norm.isnan():
            for parameter in parameters:
                parameter.grad = None
        elif max_norm:
            clip_gradients(parameters, max_norm, norm)
        return norm

    def floating_point_ops(self, inputs: dict) -> float:
        """This rank's share of the whole model's operations; the Trainer adds up the ranks. 6 N per token, as in
        transformers.
        """
        lm = causal_lm(self.model)
        embeddings = [module.weight for module in lm.modules() if isinstance(module, nn.Embedding)]
        owned = owned_elements(lm) - sum(spec_of(weight).num_owned() for weight in embeddings)
        return 6 * inputs['input_ids'].numel() * owned
