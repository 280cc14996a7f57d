"""`mpiplus bench --train` trains on all backends, tells all its figures, and does not measure a wrong training."""

from __future__ import annotations

import json
import math

from job_runs import Job
from launch_runs import MPIPLUS_MODULE, ended

TRAIN = ("bench", "--train", "--quick", "--repeats", "2")
POSITIVE = ("samples_per_second", "step_seconds", "alone_seconds", "all_reduce_seconds")


def test_every_figure_is_there(job: Job) -> None:
    command = job.installation.command(2, [*MPIPLUS_MODULE, *TRAIN, "--json", str(job.directory / "figures.json")])
    outcome = ended(job._run(command, None), 0).says_not("Traceback")
    outcome.says("threads of a rank", "mpiplus/gloo", "waiting", "overlap")
    found = json.loads((job.directory / "figures.json").read_text())
    assert found["facts"]["ranks"] == 2
    rows = {(row["model"], row["dtype"]): row for row in found["training"]}
    assert set(rows) == {(model, dtype) for model in ("CNN", "transformer") for dtype in ("float32", "bfloat16")}
    for row in rows.values():
        assert len(row["bucket_bytes"]) > 1
        assert 0 < row["ratio"]["mpiplus/gloo"] < math.inf
        assert set(row["backends"]) == {"mpiplus", "gloo"}
        for figures in row["backends"].values():
            assert all(0 < figures[name] < math.inf for name in POSITIVE)
            assert all(math.isfinite(figures[name]) for name in ("exposed_seconds", "exposed_spread_seconds"))
            assert all(0 <= figures[name] <= 1 for name in ("waiting_share", "overlap_share"))
            assert all(len(turns) == 2 for turns in figures["turns_seconds"].values())
    assert sum(rows["CNN", "bfloat16"]["bucket_bytes"]) == sum(rows["CNN", "float32"]["bucket_bytes"]) / 2


def test_a_wrong_training_is_an_error(job: Job) -> None:
    """Said once; and no figure is."""
    outcome = job.run(2, "wrong_sums.py", *TRAIN).failed("Error: CNN of float32: mpiplus and gloo train differently")
    outcome.says_not("Traceback", "samples/s")
    assert outcome.output.count("Error: ") == 1


def test_ranks_that_train_by_themselves_are_an_error(job: Job) -> None:
    job.run(2, "wrong_sums.py", "none", *TRAIN).failed("Error: CNN of float32: on mpiplus the ranks' parameters drift")
