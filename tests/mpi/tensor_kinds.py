"""Tensors that are more, or less, than an array of numbers in memory of their own."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, Shape
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map

PROT_READ = 1
#: Memory of tensors, as long as the tests run.
_kept: list[mmap.mmap] = []


class Wrapper(torch.Tensor):
    """Has no memory, but another tensor inside, to which everything is handed on."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        kind = {"dtype": inside.dtype, "device": inside.device, "strides": inside.stride()}
        made = torch.Tensor._make_wrapper_subclass(cls, inside.size(), **kind)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def open_up(leaf: Any) -> Any:
            return leaf.inside if isinstance(leaf, Wrapper) else leaf

        return func(*tree_map(open_up, args), **tree_map(open_up, kwargs or {}))


class Refusing(Wrapper):
    """Knows none of c10d's operations."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if func.namespace == "c10d" else super().__torch_dispatch__(func, types, args, kwargs)


class Marked(torch.Tensor):
    """Another type, whose functions are torch's."""


class InMemory(torch.Tensor):
    """Sees every operator, and has memory."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 1]


def inference_strided(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return strided(tensor)


def negative(tensor: torch.Tensor) -> torch.Tensor:
    """A view of memory that holds the negative."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that nobody can write to."""
    values = tensor.contiguous().numpy()
    memory = mmap.mmap(-1, max(values.nbytes, mmap.PAGESIZE))
    memory.write(values.tobytes())
    buffer = torch.frombuffer(memory, dtype=tensor.dtype, count=max(tensor.numel(), 1))
    found = buffer[: tensor.numel()]  # of no elements it has no address
    address = ctypes.c_void_p(buffer.data_ptr())
    assert not ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(len(memory)), PROT_READ)
    _kept.append(memory)
    return found.view(tensor.shape)


def read_only_strided(tensor: torch.Tensor) -> torch.Tensor:
    return read_only(torch.stack([tensor, tensor], -1))[..., 1]


def dtensor(tensor: torch.Tensor) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), _init_backend=False)
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def masked(tensor: torch.Tensor) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(tensor, torch.ones_like(tensor, dtype=torch.bool))


def fake(tensor: torch.Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP leaves its parameters between two uses."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_part(tensor: torch.Tensor) -> torch.Tensor:
    """The same of one that does not begin where its storage did: its address is not zero."""
    tensor = torch.cat([tensor.reshape(-1), tensor.reshape(-1)])[tensor.numel() :].view(tensor.shape)
    tensor.untyped_storage().resize_(0)
    return tensor


Make = Callable[[torch.Tensor], Any]
#: With which every operation computes, as with any tensor.
GOOD: dict[str, Make] = {
    "wrapper": Wrapper,
    "functional result": AsyncCollectiveTensor,
    "marked": lambda tensor: tensor.as_subclass(Marked),
    "dispatching, in memory": InMemory,
    "inference": inference,
    "inference, strided": inference_strided,
    "parameter": torch.nn.Parameter,
    "requires grad": lambda tensor: tensor.clone().requires_grad_(),
    "requires grad, no leaf": lambda tensor: tensor.clone().requires_grad_() * 1,
    "requires grad, strided": lambda tensor: strided(tensor).requires_grad_(),
    "negative": negative,
}
#: With which operations compute that only read them.
READ_ONLY: dict[str, Make] = {
    "read-only": read_only,
    "read-only, strided": read_only_strided,
    "expanded": lambda tensor: tensor.reshape(-1)[:1].expand(tensor.shape),
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape),
}
#: Refused; and the exception of gloo's, where gloo does not crash.
BAD: dict[str, tuple[Make, type[Exception] | tuple[type[Exception], ...]]] = {
    "refusing": (Refusing, TypeError),
    "DTensor": (dtensor, RuntimeError if torch.__version__ >= "2.10" else (RuntimeError, AssertionError)),
    "masked": (masked, TypeError),
    "quantized": (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8), NotImplementedError),
    "nested": (lambda tensor: torch.nested.nested_tensor([tensor, tensor]), NotImplementedError),
    "jagged": (lambda tensor: torch.nested.nested_tensor([tensor], layout=torch.jagged), NotImplementedError),
    "csr": (lambda tensor: tensor.reshape(1, -1).to_sparse_csr(), NotImplementedError),
    "mkldnn": (lambda tensor: tensor.to_mkldnn(), NotImplementedError),
    "freed": (freed, RuntimeError),
    "freed, with an offset": (freed_part, RuntimeError),
    "uninitialized": (lambda tensor: torch.nn.UninitializedParameter(), ValueError),
}


class OfNumbers(Case):
    """A case without NaNs: what some kinds compute on the way makes a signalling one quiet."""

    def data(self, *arguments: Any, **named: Any) -> torch.Tensor:
        found = super().data(*arguments, **named)
        return torch.where(found.isnan(), torch.ones_like(found), found) if found.is_floating_point() else found


@dataclasses.dataclass(frozen=True)
class CaseOfKind(OfNumbers):
    """A case whose tensors are of a kind: those that are read, those that are written, or both."""

    read: Make = torch.clone
    written: Make = torch.clone

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.read(super().place(tensor))

    def empty(self, shape: Sequence[int] | Shape | None = None) -> torch.Tensor:
        return self.written(super().empty(shape))


def content(tensor: Any) -> torch.Tensor:
    """What the user sees in it."""
    if isinstance(tensor, Wrapper):
        return tensor.inside
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.elem
    return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
