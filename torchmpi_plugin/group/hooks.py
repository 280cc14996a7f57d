"""What runs before and after an operation, and when one fails, for those who ask."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_internals
from ..diagnosis import flight_recorder
from ..errors import RankFailedError
from .identity import Identity

log = logging.getLogger("torchmpi_plugin")


class Hooks(Identity):
    """Hooks of a group: torch's before and after each operation, and ours when the group fails."""

    #: Lets the group's operations run torch's hooks; None where torch has none.
    run_hooks: Callable[[Any], None] | None = None
    #: Makes a call by torch's dispatcher, where a TorchDispatchMode sees it; None where this torch has no way back.
    _show_to_modes: Callable[..., Any] | None = None
    #: Lets torch's operators work with the group; None where they do so, or cannot.
    _allow_operators: Callable[[], None] | None = None
    _failure: Exception | None = None
    _timed_out = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._abort_hooks: dict[int, Callable[[], None]] = {}

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` with torch's PreHookArgs before each operation of this group. docs/api-modes.md has the cost.

        Raises:
            RuntimeError: a torch before 2.15, which has no such hooks.
        """
        self._want_hooks("register_pre_hook")
        super().register_pre_hook(hook_id, hook)  # type: ignore[misc]

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` with torch's PostHookArgs after each operation of this group has been issued.

        Raises:
            RuntimeError: a torch before 2.15, which has no such hooks.
        """
        self._want_hooks("register_post_hook")
        super().register_post_hook(hook_id, hook)  # type: ignore[misc]

    def boxed(self) -> Any:
        """The group as the operators ``torch.ops.c10d`` take it."""
        if self._allow_operators is not None:
            self._allow_operators()
        return super().boxed()

    def _want_hooks(self, what: str) -> None:
        if self.run_hooks is None:
            raise RuntimeError(f"{what}: hooks come with torch 2.15; this is torch {torch.__version__}")
        self.run_hooks(self)

    @property
    def supports_abort_hooks(self) -> bool:
        """Whether ``register_abort_hook`` works: for callers from Python."""
        return True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook`` before the group is aborted, and when an operation of it fails; perhaps more than once."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget a hook; no matter if there is none."""
        self._abort_hooks.pop(hook_id, None)

    def run_abort_hooks(self) -> None:
        """What the hooks raise is logged: the failure itself is what the user must see."""
        for hook_id, hook in list(self._abort_hooks.items()):
            try:
                hook()
            except Exception as error:
                log.error("mpiplus: the abort hook %d of group %r failed: %r", hook_id, self.group_name, error)

    def failed(self, error: Exception, timed_out: bool = False) -> None:
        """An operation of the group has failed, which the user is about to hear."""
        if error is not self._failure:
            self._failure, self._timed_out = error, timed_out
            self.run_abort_hooks()
            if flight_recorder.current is not None:
                flight_recorder.current.write_after_failure()

    def get_error(self) -> Any:
        """c10d's ErrorType of the last failure: SUCCESS, TIMEOUT, REMOTE_ERROR (a rank died) or COMM_ERROR."""
        kinds = torch_internals.error_type()
        if self._failure is None:
            return kinds.SUCCESS
        if self._timed_out:
            return kinds.TIMEOUT
        return kinds.REMOTE_ERROR if isinstance(self._failure, RankFailedError) else kinds.COMM_ERROR
