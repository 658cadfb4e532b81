"""The groups of the process grid, and collectives of ranks that have nothing to send.

A failure means that a run waits half an hour instead of the time that the user set, or that a group holds other ranks
than the numbering says.
"""
import torch
import torch.distributed as dist
from datetime import timedelta
from unittest import mock

from swift_megatron.mesh import ParallelMesh
from swift_megatron.optim.gradients import gradient_norm
from tests.harness import launch

SECONDS = 77
GROUPS = ('tensor_group', 'pipeline_group', 'data_group', 'tied_group')
SIZES = [(t, p) for t in (1, 2, 4) for p in (1, 2, 4) if t * p <= 4]


def members_and_timeouts(default: float) -> list[dict[str, tuple[list[int], float]]]:
    """Ranks and seconds of each of this rank's groups, for each of SIZES."""
    found = []
    for t, p in SIZES:
        mesh = ParallelMesh.create(tensor_parallel_size=t, pipeline_parallel_size=p, timeout=timedelta(seconds=SECONDS))
        groups = {name: getattr(mesh, name) for name in GROUPS}
        found.append({
            name: (dist.get_process_group_ranks(group), default if group is dist.group.WORLD else group._get_backend(
                torch.device('cpu')).options._timeout.total_seconds())
            for name, group in groups.items() if group is not None
        })
    return found


def test_groups_and_their_time_out():
    """A failure means that a group, such as that of tied weights, does not have the run's time-out or its ranks."""
    for rank, answer in enumerate(launch(4, members_and_timeouts, float(SECONDS))):
        for (t, p), found in zip(SIZES, answer, strict=True):
            d = 4 // (t * p)
            tensor, data, stage = rank % t, rank // t % d, rank // (t * d)
            expected = {
                'tensor_group': [(stage * d + data) * t + i for i in range(t)],
                'data_group': [(stage * d + i) * t + tensor for i in range(d)],
                'pipeline_group': [(i * d + data) * t + tensor for i in range(p)],
            }
            ends = expected['pipeline_group'][::max(p - 1, 1)]
            expected['tied_group'] = ends if rank in ends else []
            assert found == {name: (ranks, SECONDS) for name, ranks in expected.items() if len(ranks) > 1}, (t, p)


def test_a_norm_without_gradients_is_summed_on_the_runs_device():
    """A failure means that a stage without gradients sends a CPU tensor, which groups of accelerators refuse."""
    mesh = ParallelMesh(pipeline_parallel_size=2, pipeline_group=mock.sentinel.group)
    sent: list[torch.Tensor] = []
    with mock.patch.object(dist, 'all_reduce', lambda tensor, **_: sent.append(tensor)):
        gradient_norm([], mesh, torch.device('meta'))
        gradient_norm([torch.nn.Parameter(torch.empty(2, device='meta'))], mesh)
    assert [tensor.device.type for tensor in sent] == ['meta', 'meta']
