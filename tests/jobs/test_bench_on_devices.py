"""`mpiplus bench`, the example and failing ranks on CUDA devices; without one the first two say so before they begin.

On a GPU, which the ranks may share: python -m pytest tests/jobs -m gpu.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from job_runs import SOON, Job, Outcome
from launch_runs import MPIPLUS_MODULE

from torchmpi_plugin.cli.bench.training.ways import WAYS

DIGITS = Path(__file__).parents[2] / "docs" / "examples" / "train_digits.py"
BENCH = [*MPIPLUS_MODULE, "bench", "--quick", "--device", "cuda", "--json", "out.json"]
TRAIN = [*BENCH, "--train", "--repeats", "1", "--samples", "2"]
NONE = {"CUDA_VISIBLE_DEVICES": ""}
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run(job: Job, code: int, words: list, environment: dict | None = None) -> Outcome:
    return job.start(job.installation.command(2, list(map(str, words))), environment).ended(code)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("how", ["error", "killed"])
def test_a_rank_that_fails(how: str, device: str, job: Job) -> None:
    words = "[Ss]ignal" if how == "killed" else "device-side assert" if device == "cuda" else "out of bounds"
    job.run(2, "device_faults.py", device, how).failed(words).within(SOON)


@pytest.mark.parametrize("words", [BENCH, TRAIN], ids=["operations", "train"])
def test_no_device(words: list, job: Job) -> None:
    """Told once, and nothing is begun."""
    outcome = run(job, 1, words, NONE).says("--device cuda: torch sees no CUDA device on").says_not("Traceback")
    assert outcome.output.count("Error: ") == 1
    assert not (job.directory / "out.json").exists()


def test_no_device_for_the_example(job: Job) -> None:
    pytest.importorskip("sklearn", reason="the extra bench brings it")
    run(job, 1, [DIGITS, "--device", "cuda"], NONE).says("torch sees no CUDA device here").says_not("Traceback")


def test_operations_on_what_passes_for_a_device(job: Job) -> None:
    """Each path is a contestant, nccl is not on what ranks share, and gloo is not asked for messages."""
    words = ("bench", "--quick", "--device", "cuda", "--ops", "all_reduce,ping_pong", "--sizes", 64, "--repeats", 1)
    outcome = job.run(2, "posing_device.py", *words, "--json", "out.json")
    outcome.ended().says("the bus, all ranks at once", "nccl, which refuses that, is left out")
    outcome.says(r"  operation +dtype +size .* staged +ipc +gloo +end +GB/s").says_not("…")
    outcome.says("gloo has no ping_pong of float32: gloo sends no tensors on devices").says_not("Traceback")
    found = json.loads((job.directory / "out.json").read_text())
    assert found["contestants"] == ["raw", "raw nonblocking", "staged", "ipc", "gloo", "front end"]
    assert {row["operation"]: "gloo" in row["us"] for row in found["operations"]} == {
        "all_reduce": True,
        "ping_pong": False,
    }
    assert all(row["us"]["ipc"] > 0 and row["us"]["staged"] > 0 for row in found["operations"])
    assert min(found["bus"].values()) > 0
    assert {one["contestant"] for one in found["overlap"]} == {"raw nonblocking", "ipc", "staged", "gloo"}


@pytest.mark.slow
def test_tuning_on_what_passes_for_a_device(job: Job) -> None:
    """Of sums in slots, and what ranks of a node read from each other's devices; other rows that the file has stay."""
    words = ("bench", "--quick", "--device", "cuda", "--sizes", "8,64K", "--repeats", 1, "--tune", "out.json")
    job.run(1, "posing_device.py", *words).ended(1).says("of two and more ranks, unless MPI gets CUDA tensors")
    job.run(2, "posing_device.py", *words).ended().says("of CUDA tensors in shared memory: cuda_slot_sums by_process")
    for _ in range(2):
        outcome = job.run(2, "posing_device.py", *words, environment={"MPIPLUS_CUDA": "ipc"}).ended()
        outcome.says("of CUDA tensors on a node: cuda_copies shared_memory.* cuda_sums shared_memory")
        found = json.loads((job.directory / "out.json").read_text())
        assert {"cuda_copies", "cuda_sums", "cuda_slot_sums"} == found["limits"].keys() - {"phases"}
        (job.directory / "out.json").write_text(json.dumps(found | {"limits": found["limits"] | {"phases": 8}}))
    assert found["limits"]["phases"] == 8


@pytest.mark.slow
def test_training_on_what_passes_for_a_device(job: Job) -> None:
    words = ("bench", "--device", "cuda", *TRAIN[TRAIN.index("--train") :], "--quick", "--train=ddp,loaders,pipeline")
    outcome = job.run(2, "posing_device.py", *words, "--json", "out.json").ended().says_not("Traceback")
    outcome.says("pipeline, transformer of float32 is left out: gloo sends no tensors on devices")
    found = json.loads((job.directory / "out.json").read_text())
    assert {row["way"] for row in found["training"]} == {"ddp", "loaders"}
    assert all(list(row["backends"]) == ["staged", "ipc", "gloo"] for row in found["training"])


class TestOnGpu:
    pytestmark = on_gpu

    def test_operations(self, job: Job) -> None:
        """Everything is measured, on the host, on each path and by gloo, beside what the bus allows."""
        pytest.importorskip("matplotlib", reason="the extra plot brings it")
        outcome = run(job, 0, [*BENCH, "--plot", "out.png"], {"MPIPLUS_CUDA": "auto"}).says_not("Traceback")
        outcome.says("the bus, all ranks at once")
        found = json.loads((job.directory / "out.json").read_text())
        assert {"raw", "ipc", "staged", "gloo", "front end"} <= set(found["contestants"])
        assert ("nccl" in found["contestants"]) == (found["facts"]["ranks share devices"] == "no")
        for row in found["operations"]:
            assert row["us"]["ipc"] > 0 and row["us"]["staged"] > 0, outcome.output
        assert min(found["bus"].values()) > 0
        assert (job.directory / "out.png").stat().st_size > 0

    def test_training(self, job: Job) -> None:
        """In every way; messages are left out beside gloo, which sends none of these tensors."""
        run(job, 0, TRAIN).says_not("Traceback")
        found = json.loads((job.directory / "out.json").read_text())
        rows = {row["way"]: row for row in found["training"]}
        assert {"ddp", "ddp25", "at-once", "no-sync", "zero", "loaders", "sleep"} <= set(rows), found["notes"]
        assert any(note.startswith("pipeline") and "gloo sends no tensors" in note for note in found["notes"])

    def test_training_without_gloo(self, job: Job) -> None:
        outcome = run(job, 0, [*TRAIN, "--backends", "mpiplus"])
        found = json.loads((job.directory / "out.json").read_text())
        assert {row["way"] for row in found["training"]} == {way.name for way in WAYS}, outcome.output

    def test_the_example(self, job: Job) -> None:
        pytest.importorskip("sklearn", reason="the extra bench brings it")
        run(job, 0, [DIGITS, "--device", "cuda"]).says("mpiplus: 2 ranks, test accuracy 9")
