"""The variables that the tests and CI read and set: all of them, with what they do."""

from __future__ import annotations

DEVELOPMENT = {
    "MPIPLUS_TEST_CHECKOUT": "The checkout that CI tests a copy of.",
    "MPIPLUS_TEST_COVERAGE": "A directory for what runs of the package, when the tests measure that.",
    "MPIPLUS_TEST_CUDA": "Set: the tests of CUDA tensors over the stand-in for the driver run in full on every number "
    "of ranks, not on 2 only.",
    "MPIPLUS_TEST_CUDA_DRIVER": "That stand-in, where it is built already.",
    "MPIPLUS_TEST_FULL": "`1`: every number of ranks runs the whole table of operations, and the tests of the "
    "shared-memory protocol's model, of failures and of interrupts try everything, which takes long.",
    "MPIPLUS_TEST_INSTALLATIONS": "The MPIs that the tests have found, for the processes that share them.",
    "MPIPLUS_TEST_FRESH": "`1`: the tests start each rank as a process of its own, not as a fork of one that has "
    "imported torch.",
    "MPIPLUS_TEST_FORK_SERVER": "Where that one is, for the processes that share the tests.",
    "MPIPLUS_TEST_ROOM": "How many templates for ranks that one keeps open.",
    "MPIPLUS_TEST_SEED": "Which share of the long tests runs; by default the commit says.",
    "MPIPLUS_TEST_LAUNCH_SHARE": "Of the tests that a launch of tests/mpi runs one of so many is run.",
    "MPIPLUS_TEST_SOAK": "Seconds that random programs run in `tests/soak`, under each MPI; none if it is not set.",
    "MPIPLUS_TEST_SOAK_SEED": "What their dice begin with.",
    "MPIPLUS_TEST_API_MODE": "In which [API mode](api-modes.md) the groups of the tests under mpiexec are: "
    "`dispatcher`, or the usual.",
    "MPIPLUS_TEST_HOST_OF": "The numbers of the nodes on which the ranks of the tests under mpiexec believe to be, as "
    "`0,0,1`.",
    "MPIPLUS_TEST_HUGE": "Set: the test of tensors with more than 2^31 - 1 elements runs as well.",
    "MPIPLUS_TEST_OTHER_MPIEXEC": "An mpiexec of another family, for the tests of a launcher with another MPI's "
    "library. By default the first on the `PATH`.",
    "MPIPLUS_TEST_JOB": "By what a test knows the processes of its job.",
    "MPIPLUS_TEST_PATIENCE": "How many times as long as usual a test may take before it counts as hanging.",
    "MPIPLUS_TEST_RERUNS": "How often a test that has failed is run again.",
    "MPIPLUS_TEST_SITE": "The built site, for the tests that look at it in a browser.",
    "MPIPLUS_TEST_WHEELS": "A directory of wheels for other processors, for the tests that look into them.",
    "MPIPLUS_TEST_PYTORCH": "A checkout of PyTorch, whose tests `tests/tools/run_pytorch_tests.py` runs.",
    "MPIPLUS_TEST_PYTORCH_TESTS": "The file in which that notes the outcome of each.",
    "MPIPLUS_TEST_PYTORCH_FORKING": "The module of the tests that it runs in forked processes.",
    "MPIPLUS_TEST_TORCH_UCC": "A checkout of torch_ucc, for `tests/tools/run_torch_ucc_tests.py`.",
    "MPIPLUS_TEST_PARAM": "A checkout of PARAM, for `tests/tools/run_param.py`.",
    "MPIPLUS_TEST_RANDOM_CALLS": "How many calls each test of random arguments makes.",
    "MPIPLUS_TEST_JOB_SECONDS": "After how many seconds a test takes its job for hung.",
    "MPIPLUS_CI_CACHE": "A directory for what CI keeps between runs.",
    "MPIPLUS_CI_JOBS": "How many of CI's stages run side by side.",
    "MPIPLUS_CI_UV": "`0`: CI installs with pip, not with uv.",
    "MPIPLUS_CI_RUN": "By what CI knows the processes of its run.",
}
