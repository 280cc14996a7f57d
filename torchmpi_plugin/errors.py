"""The texts and types of our errors, in one place.

Arguments that are wrong on this rank raise ``ValueError`` or ``TypeError`` before anything is sent, a call
that the state forbids raises ``RuntimeError``; whatever goes wrong between ranks raises
``torch.distributed.DistBackendError`` (a ``RuntimeError``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import DistBackendError

from .names import log

__all__ = ["DistBackendError", "RankFailedError"]

T = TypeVar("T")


def attempt(what: str, report: Callable[[], T], otherwise: T) -> T:
    """``report()``, done on the way of an error or an answer; what it raises is logged, and never takes their place."""
    try:
        return report()
    except Exception as error:
        log.warning("mpiplus: %s: %r", what, error)
        return otherwise


class RankFailedError(DistBackendError):
    """A rank's failure, there and therefore everywhere.

    Attributes:
        ranks: the ranks that failed, by their global ranks; none where it is not known which.
        rank: the first of them, or None.
        node: where that one ran, if known.
        exit_code: of its process, where it ended with one.
        traceback: of its exception, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),  # a default, or it could not be unpickled
        node: str | None = None,
        exit_code: int | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.rank = self.ranks[0] if self.ranks else None
        self.node = node
        self.exit_code = exit_code
        self.traceback = traceback

    @property
    def host(self) -> str | None:
        """Deprecated: ``node`` under its old name."""
        warnings.warn("RankFailedError.host is deprecated: use RankFailedError.node", FutureWarning, stacklevel=2)
        return self.node
