"""Several Works as one: what torch's coalescing gives its user."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from ..errors import DistBackendError
from .work import Work


class CoalescedWork(Work):
    """Several operations waited for as one."""

    def __init__(self, works: list[Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them; the first error is raised once all are over."""
        errors = []
        for work in self._works:
            try:
                work.wait(timeout)
            except DistBackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def exception(self) -> Exception | None:
        """The first failure, if any."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of all result tensors."""
        tensors = self._tensors
        if not self._works:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(tensors)
            return done
        together = torch.futures.collect_all([work.get_future() for work in self._works])

        def results(all_of_them: Any) -> list[torch.Tensor]:
            for part in all_of_them.value():
                part.value()  # raises a part's failure
            return tensors

        return together.then(results)
