"""ms-swift's Seq2SeqTrainer on a partitioned causal LM: the loss from hidden states, never from whole logits."""
import torch
from swift.metrics import compute_acc
from swift.trainers import Seq2SeqTrainer
from torch import nn
from typing import Any, Optional

from ..model.decoder import decoder_inputs
from ..model.language_modeling import hidden_states, token_losses
from .mixin import ParallelTrainerMixin

IGNORED = -100


class ParallelSeq2SeqTrainer(ParallelTrainerMixin, Seq2SeqTrainer):
    """SFT and pre-training. B batch, S sequence, H hidden, N tokens with a label."""

    def get_use_logits_to_keep(self, default_value: bool = True) -> bool:
        """Always off: logits are computed for tokens with a label alone, whatever else is in the batch."""
        return False

    def compute_loss(self,
                     model: nn.Module,
                     inputs: dict[str, Any],
                     return_outputs: bool = False,
                     num_items_in_batch: Optional[torch.Tensor] = None) -> Any:
        """Sum of the token losses over the number of label tokens in the global batch, times the number of replicas.

        Token losses are ms-swift's: cross-entropy, with label smoothing, `enable_dft_loss` and `loss_scale` where asked
        for. Gradients are averaged over the replicas, so that the factor gives the mean over all tokens.
        """
        with self.accelerator.autocast():
            hidden = hidden_states(model, **decoder_inputs(inputs))
        loss = self.loss_from_hidden(hidden, inputs, num_items_in_batch)
        return (loss, {'loss': loss}) if return_outputs else loss

    def loss_from_hidden(self, hidden: torch.Tensor, batch: dict[str, Any],
                         num_items_in_batch: Optional[torch.Tensor]) -> torch.Tensor:
        labels, loss_scale = batch['labels'], batch.get('loss_scale')
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)  # (B, S): what position i predicts
        chosen = targets != IGNORED
        with self.accelerator.autocast():
            losses = token_losses(self.model, hidden[chosen], targets[chosen], self.mesh)
        per_token = self._token_losses(losses.nll, losses.smooth)  # (N,)
        if loss_scale is not None:
            per_token = per_token * torch.roll(loss_scale, -1, dims=-1)[chosen]
        if num_items_in_batch is None:
            num_items_in_batch = chosen.sum()
        loss = per_token.sum() / num_items_in_batch
        if self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs:
            loss = loss * self.accelerator.num_processes
        cu_seqlens = None
        if self.template.padding_free:
            positions = batch.get('text_position_ids')
            cu_seqlens = self.get_cu_seqlens(batch['position_ids'] if positions is None else positions, None)
        if self.args.enable_channel_loss:
            self._record_channels(per_token.detach(), chosen, batch.get('channel'), cu_seqlens)
        self._record_accuracy(losses.predictions, chosen, labels, cu_seqlens)
        return loss

    def _token_losses(self, nll: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
        if self.args.label_smoothing_factor:
            epsilon = self.args.label_smoothing_factor
            return (1 - epsilon) * nll + epsilon * smooth
        if self.args.enable_dft_loss:  # arXiv:2508.05629: weighted by the token's own probability
            return nll * torch.exp(-nll.detach())
        return nll

    @property
    def _mode(self) -> str:
        return 'train' if self.model.training else 'eval'

    def _record_channels(self, per_token: torch.Tensor, chosen: torch.Tensor, channels: Optional[list],
                         cu_seqlens: Optional[torch.Tensor]) -> None:
        """Mean loss of each channel, logged as loss_<channel>."""
        metrics = self.custom_metrics[self._mode]
        whole = per_token.new_zeros(chosen.shape).masked_scatter(chosen, per_token)  # (B, S)
        if cu_seqlens is None:
            samples = list(zip(whole, chosen))
        else:  # one row of packed samples
            samples = [(whole[0, a:b], chosen[0, a:b]) for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])]
        for i, (values, mask) in enumerate(samples):
            metrics[f'loss_{None if channels is None else channels[i]}'].update(values[mask])

    def _record_accuracy(self, predictions: torch.Tensor, chosen: torch.Tensor, labels: torch.Tensor,
                         cu_seqlens: Optional[torch.Tensor]) -> None:
        """Share of tokens (or of whole samples) that were predicted right, logged as token_acc or seq_acc."""
        whole = torch.zeros_like(labels).masked_scatter(chosen, predictions)  # (B, S)
        metrics = compute_acc(
            whole,
            labels,
            acc_strategy=self.args.acc_strategy,
            cu_seqlens=cu_seqlens if self.args.acc_strategy == 'seq' else None)
        for name, values in metrics.items():
            self.custom_metrics[self._mode][name].update(values)
