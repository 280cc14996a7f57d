"""The files that ``mpiplus bench`` writes: numbers, a picture, a choice of collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from .report import Report


@dataclass(frozen=True)
class Files:
    """Files that rank 0 writes, and what goes into each."""

    json: Path | None  # every number
    plot: Path | None  # the picture
    tuning: Path | None  # which collectives are faster; where it is given that is what the benchmark measures
    device: str = "cpu"  # where the tensors are

    def why_not(self, nodes: Sequence[str]) -> str:
        """Say why something could not be written after minutes of measuring, and nothing where all is well."""
        from . import tune

        for path in filter(None, (self.json, self.plot, self.tuning)):
            if not path.parent.is_dir():
                return f"{path} cannot be written: there is no directory {path.parent}"
        if self.plot:
            try:
                import matplotlib  # noqa: F401
            except ImportError as error:
                return f"--plot needs matplotlib ({error}): pip install matplotlib"
        return tune.why_not(nodes, self.device) if self.tuning else ""

    def write(self, report: Report, nodes: Sequence[str], console: Console) -> None:
        if self.json:
            self.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        if self.plot:
            from .plot import draw

            draw(report, self.plot)
        if self.tuning:
            from ...mpi import runtime
            from . import tune

            tuning = tune.choose(report.rows, nodes, runtime.mpi().get_vendor(), self.device)
            self.tuning.write_text(tune.keeping(tuning, self.tuning).text())
            console.print(tune.in_words(tuning, self.tuning), soft_wrap=True, markup=False)  # a path
