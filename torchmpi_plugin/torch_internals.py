"""All that mpiplus uses of torch's inside: names with an underscore, frames walked, functions replaced.

A new torch release is looked at here first: NEEDS says what is used, since which torch, and what for, and
``tests/unit/test_torch_internals.py`` names what a release has dropped. Imports nothing when it is imported itself:
``import torch`` runs through it.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from .names import SOURCE


class Need(NamedTuple):
    """Something of torch that its documentation does not promise."""

    name: str  # module and attribute
    since: tuple[int, int]  # the first torch that has it; before that mpiplus does without
    why: str  # what would be missing


C10D = "torch._C._distributed_c10d"
_FRAMES = "torch._C._dynamo.eval_frame"
#: The oldest torch that is supported; pyproject.toml says the same.
OLDEST = (2, 8)
#: Since when a backend may be a Python subclass of c10d's Backend.
BACKENDS_IN_PYTHON = (2, 15)

NEEDS = (
    Need("torch.distributed.rendezvous:_rendezvous_handlers", OLDEST, "env:// that asks MPI for what is not set"),
    Need("torch.distributed.distributed_c10d:_new_process_group_helper", OLDEST, "shrink() of a subgroup; frames"),
    Need("torch.distributed.distributed_c10d:_get_default_store", OLDEST, "shrink() of a subgroup"),
    Need("torch.distributed.distributed_c10d:_world", OLDEST, "shrink() of a subgroup"),
    Need("torch:_debug_has_internal_overlap", OLDEST, "the error for results written to expanded tensors"),
    Need("torch:Tensor._is_zerotensor", OLDEST, "tensors of zeros that have no memory"),
    Need("torch._C:_dispatch_keys", OLDEST, "telling wrapped tensors from those with memory"),
    Need("torch._C:DispatchKey", OLDEST, "telling wrapped tensors from those with memory"),
    Need("torch._C:_functorch.get_unwrapped", OLDEST, "tensors without memory of their own"),
    Need("torch._C:ScriptList", OLDEST, "futures for hooks in C++"),
    Need("torch:_sync", OLDEST, "tensors without memory of their own"),
    Need("torch.distributed.distributed_c10d:_set_pg_timeout", OLDEST, "a new timeout, before torch 2.14"),
    Need("torch.autograd:_profiler_enabled", OLDEST, "events of torch's profiler"),
    Need("torch.autograd.profiler:_disable_profiler", OLDEST, "events of asynchronous operations"),
    Need("torch.profiler:record_function._call_end_callbacks_on_future", OLDEST, "events of asynchronous operations"),
    Need("torch._C:_len_torch_dispatch_stack", OLDEST, "calls that a TorchDispatchMode is to see"),
    Need("torch._C:_dispatch_tls_is_dispatch_key_excluded", OLDEST, "calls that a TorchDispatchMode is to see"),
    Need("torch.utils._python_dispatch:TorchDispatchMode", OLDEST, "calls that a TorchDispatchMode is to see"),
    Need("torch._C:_dispatch_keyset_full_after", OLDEST, "torch.ops.c10d on a group of mpiplus"),
    Need(f"{C10D}:ProcessGroup.boxed", OLDEST, "torch.ops.c10d on a group of mpiplus"),
    Need(f"{C10D}:ProcessGroup.unbox", OLDEST, "torch.ops.c10d on a group of mpiplus; tensors without memory"),
    Need(f"{C10D}:Work.boxed", OLDEST, "torch.ops.c10d on a group of mpiplus; tensors without memory"),
    Need(f"{C10D}:_resolve_process_group", OLDEST, "functional collectives that C++ cannot carry out"),
    Need(f"{C10D}:_register_work", OLDEST, "functional collectives that C++ cannot carry out"),
    Need(f"{C10D}:_allow_inflight_collective_as_graph_input", OLDEST, "compiled code that waits for earlier calls"),
    Need("torch.autograd.profiler:profile._parse_kineto_results", OLDEST, "events in another backend's name"),
    Need("torch._C._profiler:_RecordFunctionFast", OLDEST, "events of torch's profiler with sizes"),
    Need(f"{C10D}:ReduceOp.__getstate__", OLDEST, "the factor of PREMUL_SUM"),
    Need(f"{C10D}:Backend.Options", OLDEST, "the options that a group shows"),
    Need(f"{C10D}:ErrorType", OLDEST, "get_error()"),
    Need(f"{C10D}:Reducer._set_forward_pass_work_handle", OLDEST, "join(divide_by_initial_world_size=False) of DDP"),
    Need(f"{C10D}:ProcessGroup._device_types", OLDEST, "object collectives choose a device by it"),
    Need(f"{C10D}:ProcessGroup._get_backend", OLDEST, "what torch asks a group's backend"),
    Need(f"{C10D}:ProcessGroup._start_coalescing", OLDEST, "coalesced operations"),
    Need(f"{C10D}:ProcessGroup._end_coalescing", OLDEST, "coalesced operations"),
    Need("torch.distributed.distributed_c10d:_coalescing_manager", OLDEST, "the end of a coalescing block; frames"),
    Need(f"{C10D}:ProcessGroup._register_backend", BACKENDS_IN_PYTHON, "hooks on a group of mpiplus"),
    Need(f"{C10D}:ProcessGroup._set_default_backend", BACKENDS_IN_PYTHON, "hooks on a group of mpiplus"),
    Need(f"{C10D}:ProcessGroup.register_pre_hook", BACKENDS_IN_PYTHON, "hooks on a group of mpiplus"),
    Need(f"{C10D}:ProcessGroup.register_post_hook", BACKENDS_IN_PYTHON, "hooks on a group of mpiplus"),
    Need(f"{C10D}:Backend", BACKENDS_IN_PYTHON, "groups that mpiplus shares with other backends"),
    Need(f"{C10D}:Window", BACKENDS_IN_PYTHON, "what windows pass for"),
    Need(f"{C10D}:WindowAttr", BACKENDS_IN_PYTHON, "get_attr() of windows"),
    Need(f"{C10D}:WindowAccessType", BACKENDS_IN_PYTHON, "get_attr() of windows"),
    Need(f"{C10D}:_ProcessGroupWrapper", OLDEST, "finding mpiplus below torch's wrapper of DETAIL"),
    Need(f"{C10D}:_dump_fr_trace", OLDEST, "torch's dump of the flight recorder"),
    Need(f"{C10D}:_dump_fr_trace_json", BACKENDS_IN_PYTHON, "the same as JSON"),
    Need(f"{_FRAMES}:set_code_exec_strategy", OLDEST, "torch.compile around our operations"),
    Need(f"{_FRAMES}:_FrameExecStrategy", OLDEST, "torch.compile around our operations"),
    Need(f"{_FRAMES}:_FrameAction.SKIP", OLDEST, "torch.compile around our operations"),
)


def version() -> tuple[int, int]:
    """torch's, without what follows the second number."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def find(name: str) -> Any:
    """The thing that a Need names; AttributeError or ImportError if it is not there."""
    module, _, path = name.partition(":")
    # Not getattr on the packages: torch.distributed.rendezvous as an attribute is the function of that name.
    found: Any = sys.modules.get(module) or import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def missing() -> list[Need]:
    """Those that this torch should have, and has not."""
    gone = []
    for need in NEEDS:
        try:
            if version() >= need.since:
                find(need.name)
        except (AttributeError, ImportError):
            gone.append(need)
    return gone


def check() -> None:
    """Called when the first group is made: better one clear error than one from inside torch later.

    Raises:
        RuntimeError: this torch lacks something; names it, both versions, and what to do.
    """
    gone = missing()
    if gone:
        names = ", ".join(f"{need.name} (for {need.why})" for need in gone)
        raise RuntimeError(f"{misfit()}. Missing: {names}")


def misfit() -> str:
    """Return a message to the user of a torch that mpiplus does not fit."""
    from importlib.metadata import version as version_of

    return (
        f"torchmpi-plugin {version_of('torchmpi-plugin')} does not fit torch {version_of('torch')}. Install a newer "
        f"torchmpi-plugin (pip install . in {SOURCE}), or the torch before this one"
    )


# ---- frames ----


def calling_frame(local: str, function: str = "") -> dict[str, Any] | None:
    """The local variables of the nearest caller that has one called ``local``, in ``function`` if that is given."""
    frame = sys._getframe(1)
    while frame is not None:
        if local in frame.f_locals and function in ("", frame.f_code.co_name):
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return None


def device_backends() -> dict[str, str]:
    """Return which backend each kind of device gets in the group that torch is making; empty where none is made."""
    found = calling_frame("backend_config")
    return {} if found is None else dict(found["backend_config"].get_device_backend_map())


def uses_torchcomms() -> bool:
    """Return whether torchcomms is to make all groups, by a switch of torch 2.13's."""
    enabled = getattr(import_module("torch.distributed.distributed_c10d"), "_use_torchcomms_enabled", None)
    return enabled is not None and bool(enabled())


# ---- groups ----


def has_python_backends() -> bool:
    """Return whether c10d's Backend can be subclassed in Python."""
    return version() >= BACKENDS_IN_PYTHON


def backend_class() -> Any:
    """c10d's Backend; not ``torch.distributed.Backend``, which is a kind of string."""
    return find(f"{C10D}:Backend")


def set_backend_type(name: str) -> None:
    """Let c10d count a backend as its kind "MPI", which is free in torch as it is distributed.

    A group takes two backends of the kind "CUSTOM", which is that of all others from outside, for one: the second
    device's operations would go to the first device's backend.
    """
    import torch.distributed as dist

    if has_python_backends():
        dist.Backend.backend_type_map[name] = dist.ProcessGroup.BackendType.MPI


def unwrapped(backend: Any) -> Any:
    """The backend below the wrappers that torch puts around it under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    wrapper = find(f"{C10D}:_ProcessGroupWrapper")
    while isinstance(backend, wrapper):
        backend = backend.wrapped_pg
    return backend


def register_backend(group: Any, devices: list[Any], backend: Any) -> None:
    """Give a Python process group a C++ side: torch's hooks are attached to that."""
    import torch.distributed as dist

    kind = dist.ProcessGroup.BackendType.MPI
    for device in devices:
        dist.ProcessGroup._register_backend(group, device, kind, backend)
    dist.ProcessGroup._set_default_backend(group, kind)


def make_subgroup(backend: str, ranks: list[int], rank: int, name: str, options: Any, timeout: Any) -> Any:
    """A group of these ranks of the world, made by them alone, under this name; torch's helper for groups."""
    c10d = import_module("torch.distributed.distributed_c10d")
    helper = c10d._new_process_group_helper
    store = c10d._get_default_store()
    group, _ = helper(len(ranks), rank, ranks, c10d.Backend(backend), store, name, options, timeout)
    c10d._world.pg_group_ranks[group] = {of_world: of_group for of_group, of_world in enumerate(ranks)}
    return group


def coalescing_block(gone: Callable[[], None]) -> Any:
    """Of ``torch.distributed._coalescing_manager``, which is calling: a weak reference to its generator, else None.

    As long as that is kept, ``gone`` is called when the block is gone. An exception ends a block without a word to the
    group, and leaves torch itself collecting operations for ever, which then never run: it stops that as well.
    """
    frame: Any = sys._getframe(2)  # what called the group's method: it, or a backend's method that it called
    for _ in range(2):
        if frame is not None and frame.f_code.co_name != "_coalescing_manager":
            frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_coalescing_manager" or frame.f_back is None:
        return None
    generator = getattr(frame.f_back.f_locals.get("self"), "gen", None)  # of contextlib, which entered it
    group = frame.f_locals.get("group")

    def over(_: Any) -> None:
        find("torch.distributed.distributed_c10d:_world").pg_coalesce_state.pop(group, None)
        gone()

    return None if generator is None else weakref.ref(generator, over)


def is_over(block: Any) -> bool:
    """Return whether a coalescing block has ended, although its generator may still be referred to."""
    if block is None:
        return False
    generator = block()
    return generator is None or generator.gi_frame is None


@functools.cache
def answer_timeouts() -> None:
    """Let torch's helper ask a group in Python: before 2.14 it knows the classes of gloo and NCCL alone."""
    if version() >= (2, 14):
        return
    module = import_module("torch.distributed.distributed_c10d")
    helper = module._set_pg_timeout

    def _set_pg_timeout(timeout: Any, group: Any = None) -> None:
        ours = getattr(module._get_default_group() if group is None else group, "_set_default_timeout", None)
        helper(timeout, group) if ours is None else ours(timeout)

    module._set_pg_timeout = functools.wraps(helper)(_set_pg_timeout)  # type: ignore[attr-defined]


# ---- tensors, profiler ----


def shares_elements(tensor: Any) -> bool:
    """Return whether several elements of a tensor are known to lie at one address."""
    import torch

    return torch._debug_has_internal_overlap(tensor) == 1


def is_zero_tensor(tensor: Any) -> bool:
    """Return whether it is a tensor of zeros that has no memory: forward-mode AD makes them."""
    return bool(tensor._is_zerotensor())


def are_fake(types: Iterable[type]) -> bool:
    """Return whether torch's FakeTensor, which has a shape and no elements, is among some types."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # torch imports it late
    return module is not None and any(issubclass(each, module.FakeTensor) for each in types)


def is_wrapper(tensor: Any) -> bool:
    """Return whether torch's dispatcher has to take the tensor apart before a kernel can use it."""
    found, keys = find("torch._C:_dispatch_keys")(tensor), find("torch._C:DispatchKey")
    of_wrappers = keys.Python, keys.Functionalize, keys.FuncTorchGradWrapper, keys.FuncTorchBatched
    return any(found.has(key) for key in of_wrappers)


def inside_transforms(tensor: Any) -> Any:
    """The tensor that those of ``torch.func.grad``, ``jvp``, ``functionalize`` are about; any other is itself."""
    keys_of, keys = find("torch._C:_dispatch_keys"), find("torch._C:DispatchKey")
    while (functional := keys_of(tensor).has(keys.Functionalize)) or keys_of(tensor).has(keys.FuncTorchGradWrapper):
        if functional:  # in lists of lists, before torch 2.12
            find("torch:_sync")(tensor)  # with what was written to others of its memory
        tensor = find("torch._C:_functorch.get_unwrapped")(tensor)
    return tensor


def tensor_exchange() -> Any:
    """torch's table of functions for C that look at tensors, as DLPack has it; None where it has none."""
    import torch

    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def ending(event: Any) -> Callable[[], None]:
    """Return what ends a profiler's event from any thread, as long as the profiler is there and has its events."""
    if not hasattr(event, "_call_end_callbacks_on_future"):
        return lambda: event.__exit__(None, None, None)
    future = find("torch.futures:Future")()
    event._call_end_callbacks_on_future(future)
    return lambda: future.set_result(None)


def put(name: str, thing: Any) -> None:
    """In the place of what `find` finds by that name."""
    module, _, path = name.partition(":")
    *outer, last = path.split(".")
    setattr(functools.reduce(getattr, outer, import_module(module)), last, thing)


def forget_default(group: Any) -> None:
    """Let torch.distributed.nn's functions take the world of each call, not that of their module's first import."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module else ():
        if isinstance(function, FunctionType) and any(value is group for value in function.__defaults__ or ()):
            function.__defaults__ = tuple(None if value is group else value for value in function.__defaults__ or ())


# ---- the flight recorder ----


def answer_recorder_calls(ours: str, dump: Callable[[bool, bool, bool], dict[str, Any]]) -> None:
    """Let torch's functions that dump the flight recorder ask us for that of our backend; others are torch's.

    Args:
        ours: the backend's name.
        dump: the trace; takes includeCollectives, includeStackTraces, onlyActive.
    """
    module = import_module(C10D)
    if version() < BACKENDS_IN_PYTHON or hasattr(module._dump_fr_trace, "asks_mpiplus"):
        return  # before, there is no way to say which backend is meant
    ask, ask_json = module._dump_fr_trace, module._dump_fr_trace_json

    def _dump_fr_trace(
        includeCollectives: bool | None = None,  # noqa: N803 - torch's names
        includeStackTraces: bool | None = None,  # noqa: N803
        onlyActive: bool | None = None,  # noqa: N803
        backend: str = "gloo",
    ) -> bytes:
        if backend != ours:
            return ask(includeCollectives, includeStackTraces, onlyActive, backend)
        return pickle.dumps(dump(includeCollectives is not False, includeStackTraces is not False, bool(onlyActive)))

    def _dump_fr_trace_json(
        includeCollectives: bool | None = None,  # noqa: N803
        onlyActive: bool | None = None,  # noqa: N803
        backend: str = "gloo",
    ) -> bytes:
        if backend != ours:
            return ask_json(includeCollectives, onlyActive, backend)
        return json.dumps(dump(includeCollectives is not False, False, bool(onlyActive))).encode()

    _dump_fr_trace.asks_mpiplus = True  # type: ignore[attr-defined]
    module._dump_fr_trace = _dump_fr_trace  # type: ignore[attr-defined]
    module._dump_fr_trace_json = _dump_fr_trace_json  # type: ignore[attr-defined]


@functools.cache
def leave_out_of_compilation() -> None:
    """Have torch.compile run the functions of this package as they are.

    Dynamo compiles whatever Python runs below a compiled function, also between its graphs. It takes a process group
    for opaque, and ends with an error of its own where it sees a method of one use an attribute. Marked one by one: the
    functions that say so to Dynamo itself (``torch.compiler.disable``) cost each call microseconds, and import it.
    Once: what operations run through has been imported when the first group is made.
    """
    skip = find(f"{_FRAMES}:_FrameAction.SKIP")
    strategy = find(f"{_FRAMES}:_FrameExecStrategy")(skip, skip)
    mark = find(f"{_FRAMES}:set_code_exec_strategy")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == __package__:
            for code in _codes_of(module):
                mark(code, strategy)


def _codes_of(module: Any) -> Iterator[CodeType]:
    """The functions of a module, those of its classes, and those within them."""
    for thing in list(vars(module).values()):
        if getattr(thing, "__module__", None) == module.__name__:
            members = vars(thing).values() if isinstance(thing, type) else [thing]
            for member in members:
                yield from _nested(_code_of(member))


def _code_of(member: Any) -> CodeType | None:
    if isinstance(member, property):
        member = member.fget
    function = unwrap(getattr(member, "__func__", getattr(member, "func", member)))
    return getattr(function, "__code__", None)


def _nested(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _nested(constant)
