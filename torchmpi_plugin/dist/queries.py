"""Rank and size of a process, and its samples: answers without side effects, before and after initialisation."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from ..node import node
from ..node.node import Place
from . import members

_places: WeakKeyDictionary[dist.ProcessGroup, Place] = WeakKeyDictionary()


def place(group: dist.ProcessGroup | None = None) -> Place:
    """Return the place of this process among the nodes of ``group``."""
    found = dist.group.WORLD if group is None else group
    assert found is not None
    if members.is_outside(found):
        return Place(-1, -1, -1)
    if found not in _places:
        _places[found] = _look_up(found)
    return _places[found]


def _look_up(group: dist.ProcessGroup) -> Place:
    communicator = getattr(group, "communicator", None)
    if communicator is not None:  # a group of mpiplus's own, not one of torch's that it works for
        return communicator.place
    here = members.launched()
    described = here.size == dist.get_world_size()
    if described and here.local_size == here.size:
        return Place(dist.get_rank(group), dist.get_world_size(group), 0)
    if described and group is dist.group.WORLD:
        local_rank, local_size, node_rank = here[2:]
        if local_rank is not None and local_size is not None and node_rank is not None:
            return Place(local_rank, local_size, node_rank)
    return _ask_all(group)


def _ask_all(group: dist.ProcessGroup) -> Place:
    """Over the store: a collective of nccl would want the rank's GPU, which is chosen by the answer."""
    rank = dist.get_rank(group)
    store = dist.PrefixStore("mpiplus-dist/nodes", group.get_group_store())
    store.set(f"{rank}", node.identity())
    if rank == 0:
        store.set("all", json.dumps([store.get(f"{r}").decode() for r in range(dist.get_world_size(group))]))
    return node.places(json.loads(store.get("all")))[rank]


def _local(name: str, what: str, group: dist.ProcessGroup | None) -> int:
    if members.initialized():
        return int(getattr(place(group), name))
    value = getattr(members.launched(), name)
    if value is None:
        raise RuntimeError(
            f"the {what} is not known before initialisation: the launcher does not tell it; call "
            f"torchmpi_plugin.dist.initialize_dist() first"
        )
    return int(value)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks of the group, or of the job where no group is initialised.

    Before initialisation MPI is asked if it runs already, then the variables of MPI's launchers and of
    torchrun; 1 if there are none. From Composer, whose own ignores MPI and raises where a variable
    contradicts the group.

    Example::

        samples_per_rank = len(dataset) // get_world_size()
    """
    return dist.get_world_size(group) if members.initialized() else members.launched().size


def get_global_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in the group, or in the job where no group is initialised. From Composer.

    Returns:
        0 for a single process, -1 where this process is not in ``group``.

    Example::

        torch.manual_seed(seed + get_global_rank())
    """
    return dist.get_rank(group) if members.initialized() else members.launched().rank


def get_local_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's place among the group's ranks on its node. From Composer.

    In a group of another backend than mpiplus that torchrun's and MPI's variables do not describe (a
    subgroup over several nodes, say) the first call is collective: the ranks tell each other their nodes.

    Raises:
        RuntimeError: no group is initialised, and the launcher's variables do not tell.

    Example::

        torch.cuda.set_device(get_local_rank())
    """
    return _local("local_rank", "local rank", group)


def get_local_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return how many of the group's ranks are on this node; otherwise as :func:`get_local_rank`. From Composer.

    Example::

        torch.set_num_threads(os.cpu_count() // get_local_world_size())
    """
    return _local("local_size", "number of local ranks", group)


def get_node_rank(group: dist.ProcessGroup | None = None) -> int:
    """The node's place among the group's nodes, in the order of their first ranks. From Composer.

    Otherwise as :func:`get_local_rank`. Open MPI and MPICH tell it to nobody, so on several nodes it is known
    after initialisation only.

    Example::

        log_file = f"node{get_node_rank()}.log"
    """
    return _local("node_rank", "node rank", group)


def is_available() -> bool:
    """Return whether torch was built with torch.distributed. From Composer.

    Example::

        if not is_available(): print("this torch cannot do it")
    """
    return dist.is_available()


def is_initialized() -> bool:
    """Return whether the default group exists. From Composer.

    Example::

        if is_initialized(): torch.distributed.destroy_process_group()
    """
    return members.initialized()


def is_distributed(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether there is an initialised group of more than one rank.

    From Axolotl, whose own initialises torch.distributed when asked; this one never does.

    Example::

        model = DistributedDataParallel(model) if is_distributed() else model
    """
    return members.initialized() and dist.get_world_size(group) > 1


def is_main_process(local: bool = False, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether this is rank 0 of the group, or with ``local`` the first of its ranks on this node.

    From Axolotl; its ``is_local_main_process`` is ``is_main_process(local=True)`` here.

    Example::

        if is_main_process(): torch.save(model.state_dict(), "model.pt")
    """
    return (get_local_rank(group) if local else get_global_rank(group)) == 0


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> DistributedSampler[Any]:
    """torch's DistributedSampler over this job's ranks, before initialisation too. From Composer.

    Args:
        dataset: with a length.
        drop_last: leave samples out so that all ranks have equally many, rather than repeat some.
        shuffle: in a new order each time ``set_epoch`` is called with another number.
        num_replicas: how many ranks share the dataset; the group's size if None.
        rank: this process among them; its rank in the group if None.
        seed: of the shuffle, equal on all ranks.
        group: the ranks that share the dataset; the world if None.

    Example::

        loader = DataLoader(dataset, batch_size=32, sampler=get_sampler(dataset, shuffle=True))
    """
    replicas = get_world_size(group) if num_replicas is None else num_replicas
    rank = get_global_rank(group) if rank is None else rank
    return DistributedSampler(dataset, replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
