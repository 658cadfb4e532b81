"""What torch.distributed.pipelining runs: stages that pass hidden states, each micro-batch with a length of its own.

A stage knows tensors and a function; which model it is a part of is known to `model/micro_batches.py`.

B batch, S sequence (each micro-batch has its own), H hidden.
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo
from typing import Any, Callable, Optional

# (number of the micro-batch, hidden states (B, S, H) or None on the first stage) -> hidden states (B, S, H)
StageForward = Callable[[int, Optional[torch.Tensor]], torch.Tensor]


class StageChunk(nn.Module):
    """One stage's computation on one micro-batch.

    Args:
        compute: From the hidden states that arrive to those that leave.
        dtype: Of the hidden states that leave for another stage, whose buffers have it; None on the last stage.
    """

    def __init__(self, compute: StageForward, dtype: Optional[torch.dtype]) -> None:
        super().__init__()
        self.compute, self.dtype = compute, dtype

    def forward(self, *hidden: torch.Tensor, index: int) -> torch.Tensor:
        computed = self.compute(index, hidden[0] if hidden else None)
        return computed if self.dtype is None else computed.to(self.dtype)


class HiddenStateStage(PipelineStage):
    """A PipelineStage whose micro-batches have lengths of their own.

    torch fixes the shapes of all micro-batches by the first. Here each receive buffer is made for its micro-batch, when
    it is needed, and let go after the backward pass: no more buffers live than micro-batches are in flight. Overrides
    private methods of torch 2.9 to 2.13; `tests/distributed/test_pipeline.py` fails when they change.

    Args:
        shapes: (B, S, H) of each micro-batch.
        dtype: Of the hidden states.
    """

    def __init__(self, chunk: StageChunk, stage: int, num_stages: int, device: torch.device, group: dist.ProcessGroup,
                 *, shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
        example = torch.empty(shapes[0], device='meta', dtype=dtype, requires_grad=True)
        super().__init__(
            chunk,
            stage,
            num_stages,
            device,
            input_args=() if stage == 0 else (example, ),
            output_args=(example, ),
            group=group)
        self.shapes, self.dtype = shapes, dtype

    def _buffer(self, index: int) -> torch.Tensor:
        return torch.empty(self.shapes[index], device=self.device, dtype=self.dtype)

    def _meta(self, index: int, requires_grad: bool) -> Any:
        example = torch.empty(self.shapes[index], device='meta', dtype=self.dtype, requires_grad=requires_grad)
        return extract_tensor_meta(example)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self.args_recv_info = {}
        for index in range(num_microbatches):
            self.args_recv_info[index] = () if self.is_first else (_RecvInfo(f'hidden_{index}', self.stage_index
                                                                             - 1, None, self._meta(index, True)), )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for index in range(num_microbatches):
            self.grad_recv_info[index] = () if self.is_last else (_RecvInfo(f'hidden_grad_{index}', self.stage_index
                                                                            + 1, None, self._meta(index, False)), )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = self._buffer(fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        if self.has_backward and not self.is_last:
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = self._buffer(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._release(self.args_recv_info, fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Optional[torch.Tensor] = None, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss=loss, **kwargs)
        if self.has_backward:
            if loss is not None:  # the schedule keeps it to the end of the step, and with it all that it came from
                loss.detach_()
            self._release(self.args_recv_info, bwd_chunk_id)
            self._release(self.grad_recv_info, bwd_chunk_id)

    @staticmethod
    def _release(table: dict, index: int) -> None:
        for info in table.get(index, ()):
            info.buffer = None

    def _get_grad_send_meta(self, input_idx: int) -> Optional[Any]:
        # Only asked for the shape of a missing gradient; hidden states always have one.
        return self._stage_meta.inputs[input_idx] if self._stage_meta.inputs else None
