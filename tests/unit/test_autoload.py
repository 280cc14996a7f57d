"""``import torch`` with the plugin installed: no MPI, no thread, no failure, no other package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from patience import patient
from plain_python import python
from sampling import share

import torchmpi_plugin

OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

IMPORT = """
import json, os, sys, threading
import torch
print(json.dumps({
    "registered": "mpiplus" in torch.distributed.Backend.backend_list,
    "ours": sorted(name for name in sys.modules if name.startswith("torchmpi_plugin")),
    "others": sorted({name.partition(".")[0] for name in sys.modules} - {"torchmpi_plugin"}),
    "python threads": threading.active_count(),
    "helper of timeouts": torch.distributed.distributed_c10d._set_pg_timeout.__code__.co_filename,
    "threads": len(os.listdir("/proc/self/task")),
    "libraries": sorted({line.split()[-1] for line in open("/proc/self/maps") if "libmpi" in line}),
}))
"""


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures coverage is imported as well, and the lines of a copy are not the package's."""
    monkeypatch.setenv("MPIPLUS_TEST_COVERAGE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def answer(program: str, **environment: str) -> dict:
    done = python(program, **environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def test_import_torch_starts_and_loads_nothing() -> None:
    with_plugin, without = answer(IMPORT), answer(IMPORT, **OFF)
    assert with_plugin["registered"] and not without["registered"]
    ours = [f"torchmpi_plugin.{name}" for name in ("_autoload", "forks", "names", "settings", "torch_internals")]
    assert with_plugin["ours"] == ["torchmpi_plugin", *ours]
    assert not with_plugin["libraries"]
    for what in ("others", "python threads", "helper of timeouts", "threads"):
        assert with_plugin[what] == without[what], what
    assert not {"mpi4py", "cffi", "_cffi_backend"} & set(with_plugin["others"])


# The interpreter's .pth files may import what they like before; here is what our package adds by itself.
def test_these_modules_need_nothing_else() -> None:
    program = """
        import json, sys
        before = set(sys.modules)
        import torchmpi_plugin, torchmpi_plugin._autoload, torchmpi_plugin.launchers.variables
        print(json.dumps({name.partition(".")[0]: 1 for name in set(sys.modules) - before}))
    """
    assert not {"torch", "numpy", "mpi4py", "cffi"} & set(answer(program))


BREAKAGES = {
    "a name that is taken": """
        def refuse(*args, **kwargs):
            raise RuntimeError("no more names")
        dist.Backend.register_backend = refuse
        """,
    "handlers that moved": "del sys.modules['torch.distributed.rendezvous']._rendezvous_handlers",
    "a scheme that is taken": "dist.register_rendezvous_handler('mpi', print)",
}


@pytest.mark.parametrize("breakage", share("autoload: breakages", list(BREAKAGES), 3))
def test_a_registration_that_fails_is_one_warning(breakage: str) -> None:
    """Nothing is half registered, and the program goes on."""
    program = f"""
import sys, warnings
import torch
import torch.distributed as dist
from torchmpi_plugin import _autoload
{textwrap.dedent(BREAKAGES[breakage])}
handlers = getattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {{}})
before = dict(handlers)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    _autoload.autoload()
assert len(caught) == 1, caught
assert "torchmpi-plugin could not register" in str(caught[0].message)
assert "mpiplus" not in dist.Backend.backend_list
assert handlers == before, "half registered"
print("goes on")
"""
    done = python(program, **OFF)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_import_torch_survives_a_broken_plugin(tmp_path) -> None:
    """The real way in: torch calls the entry point, and the registration raises inside it."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import torchmpi_plugin._autoload as autoload
            def fail():
                raise OSError("this one is meant")
            autoload._register = fail
            """
        )
    )
    program = "import torch; print('mpiplus' in torch.distributed.Backend.backend_list, torch.ones(2).sum().item())"
    done = python(program, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "False 2.0\n"), done.stderr
    assert done.stderr.count("this one is meant") == 1
    assert "UserWarning: torchmpi-plugin could not register" in done.stderr
    assert re.search(r"torchmpi-plugin \d\S* does not fit torch \d", done.stderr), "both versions, and what to do"


def test_another_package_that_is_missing_is_named() -> None:
    started = "dist.init_process_group('mpiplus', store=dist.HashStore(), rank=0, world_size=1)"
    done = python(f"import sys, torch.distributed as dist; sys.modules['numpy'] = None; {started}")
    assert "torchmpi-plugin needs the package numpy: pip install numpy. What went wrong" in done.stderr, done.stderr


def test_a_checkout_beside_the_script_that_was_not_compiled(tmp_path: Path) -> None:
    """It is no misfit of torch's. Python looks for packages where the script lies, wherever it is called."""
    package = Path(torchmpi_plugin.__file__).parent
    shutil.copytree(package, tmp_path / "torchmpi_plugin", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"  # the finder of an editable installation finds the compiled part, wherever the package came from
        "sys.meta_path = [finder for finder in sys.meta_path if 'Editable' not in str(finder)]\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('mpiplus')\n"
    )
    command = [sys.executable, str(script)]
    told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=patient(100))
    assert told.returncode == 1
    assert f"imported from {tmp_path / 'torchmpi_plugin'}, where it has not been compiled. Start" in told.stderr
    assert "does not fit" not in told.stderr
