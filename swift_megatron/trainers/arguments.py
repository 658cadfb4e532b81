"""Training arguments that know how many processes hold one model: what counts processes counts replicas."""
from dataclasses import dataclass
from swift.trainers import Seq2SeqTrainingArguments


@dataclass
class ParallelSeq2SeqTrainingArguments(Seq2SeqTrainingArguments):
    """ms-swift's training arguments; `world_size` is the number of model replicas (d), as all of the Trainer's uses
    mean it.
    """
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_micro_batches: int = 1
    pipeline_schedule: str = '1f1b'

    @property
    def world_size(self) -> int:
        return super().world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)
