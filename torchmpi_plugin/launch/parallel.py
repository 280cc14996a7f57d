"""Model, pipeline and data groups: the three ways to share out a model, as in ``ml.utils.parallel``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..names import log

NAMES = ("data", "pipeline", "model")


@dataclass(frozen=True)
class GroupInfo:
    """One of this rank's groups.

    Attributes:
        group: torch's group.
        global_ranks: its members.
        rank: this process's place in it.
        world_size: the number of members.
    """

    group: dist.ProcessGroup
    global_ranks: list[int]
    rank: int
    world_size: int


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's groups.

    Attributes:
        mp: the ranks that share one layer with this one.
        pp: the ranks that hold the other stages of the pipeline.
        dp: the ranks that do the same with other data.
        mesh: torch's DeviceMesh of all ranks, its dimensions named data, pipeline and model.
    """

    mp: GroupInfo
    pp: GroupInfo
    dp: GroupInfo
    mesh: DeviceMesh


_groups: ParallelGroups | None = None


def _sizes(world_size: int, model: int, pipeline: int) -> tuple[int, int, int]:
    if model < 1 or pipeline < 1:
        raise ValueError(f"model_parallelism ({model}) and pipeline_parallelism ({pipeline}) must be at least 1")
    if model > world_size:
        log.warning("model parallelism of %d in a world of %d ranks: taking %d", model, world_size, world_size)
        model = world_size
    if world_size % (model * pipeline):
        raise ValueError(
            f"{world_size} ranks cannot be shared out: model_parallelism ({model}) x pipeline_parallelism ({pipeline}) "
            f"does not divide them"
        )
    return world_size // (model * pipeline), pipeline, model


def _make(ranks: torch.Tensor, dimension: int, backend: str | None) -> GroupInfo:
    rows = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows, backend=backend, group_desc=NAMES[dimension])
    members = dist.get_process_group_ranks(group)
    return GroupInfo(group, members, dist.get_rank(group), len(members))


def init_parallelism(
    model_parallelism: int = 1,
    pipeline_parallelism: int = 1,
    *,
    mp_backend: str | None = None,
    pp_backend: str | None = None,
    dp_backend: str | None = None,
) -> None:
    """Make this job's model, pipeline and data groups. All ranks make the call.

    Neighbours share a model: of 8 ranks with 2 x 2, the model groups are 01 23 45 67, the pipeline groups 02 13
    46 57, the data groups 04 15 26 37. ml makes the same groups, and then gives some ranks a group they are not
    in.

    Args:
        model_parallelism: size of a model group; cut to the number of ranks, with a warning, as in ml.
        pipeline_parallelism: size of a pipeline group.
        mp_backend: of the model groups; the world's if None.
        pp_backend: of the pipeline groups; the world's if None.
        dp_backend: of the data groups; the world's if None.

    Raises:
        RuntimeError: no world yet, or the groups exist already.
        ValueError: the sizes do not divide the number of ranks.

    Example::

        init_parallelism(model_parallelism=2, dp_backend="gloo")
        dist.all_reduce(gradient, group=parallel_group_info().dp.group)
    """
    global _groups  # noqa: PLW0603
    if _groups is not None:
        raise RuntimeError("init_parallelism: the groups exist already; call reset_parallelism() first")
    if not dist.is_initialized():
        raise RuntimeError("init_parallelism: no process group is initialised; call init_dist or initialize_dist first")
    shape = _sizes(dist.get_world_size(), model_parallelism, pipeline_parallelism)
    ranks = torch.arange(dist.get_world_size(), dtype=torch.int, device="cpu").view(shape)
    infos = [_make(ranks, i, backend) for i, backend in enumerate((dp_backend, pp_backend, mp_backend))]
    on_gpu = all(dist.get_backend(info.group) == "nccl" for info in infos)
    mesh = DeviceMesh.from_group(
        [info.group for info in infos], "cuda" if on_gpu else "cpu", mesh=ranks, mesh_dim_names=NAMES
    )
    _groups = ParallelGroups(mp=infos[2], pp=infos[1], dp=infos[0], mesh=mesh)


def parallel_group_info() -> ParallelGroups:
    """This rank's model (``mp``), pipeline (``pp``) and data (``dp``) groups.

    Raises:
        RuntimeError: they have not been made.

    Example::

        shard = weights.chunk(parallel_group_info().mp.world_size)[parallel_group_info().mp.rank]
    """
    if _groups is None:
        raise RuntimeError("parallel_group_info: there are no groups yet; call init_parallelism or init_and_run first")
    return _groups


def parallelism_is_initialized() -> bool:
    """Return whether the groups exist.

    Example::

        if parallelism_is_initialized(): reset_parallelism()
    """
    return _groups is not None


def reset_parallelism() -> None:
    """Destroy the three groups, if they exist. All ranks make the call.

    Example::

        reset_parallelism(); init_parallelism(model_parallelism=4)
    """
    global _groups  # noqa: PLW0603
    if _groups is not None and dist.is_initialized():
        for info in (_groups.mp, _groups.pp, _groups.dp):
            dist.destroy_process_group(info.group)
    _groups = None
