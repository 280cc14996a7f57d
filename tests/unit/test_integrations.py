"""The hook that changes frameworks when they are imported: over packages made for this, which bear their names."""

from __future__ import annotations

import importlib
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plain_python import printed, python

import torchmpi_plugin
from torchmpi_plugin import integrations, settings
from torchmpi_plugin.integrations import importing

FILES = {
    "accelerate": "accelerate/state.py",
    "transformers": "transformers/training_args.py",
    "ignite": "ignite/distributed/comp_models/native.py",
    "ignite's auto": "ignite/distributed/auto.py",
}


def framework(name: str) -> str:
    return name.partition("'")[0]


FRAMEWORKS = {framework(name) for name in FILES}
DISTRIBUTIONS = {"accelerate": "accelerate", "transformers": "transformers", "ignite": "pytorch-ignite"}
#: As much of each framework as its integration looks at.
EXPECTED = {
    "accelerate": """
        import enum
        class DistributedType(enum.Enum):
            NO = 0
            MULTI_CPU = 1
        class PartialState:
            _shared_state = {}
            def __init__(self, cpu=False, **kwargs):
                self.distributed_type = DistributedType.NO
            def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
                return "gloo", DistributedType.NO
        """,
    "transformers": """
        from dataclasses import dataclass, field
        @dataclass
        class TrainingArguments:
            ddp_backend: str = field(default=None, metadata={"choices": ["nccl", "gloo"]})
        """,
    "ignite": """
        class _NativeDistModel:
            available_backends = ("gloo",)
            def _create_from_backend(
                self, backend, timeout=None, init_method=None, world_size=None, rank=None, **kwargs
            ):
                pass
            def _init_from_context(self):
                pass
        """,
    "ignite's auto": """
        import types
        idist_native = types.SimpleNamespace(GLOO="gloo", MPI="mpi")
        def auto_model(model, sync_bn=False, **kwargs):
            return model in (idist_native.GLOO, idist_native.MPI)
        """,
}
VERSIONS = {"accelerate": "1.15.0", "transformers": "5.23.0", "ignite": "0.5.5"}

Package = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Installs such a package, for this test: of a name, with a text and a version."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(importing.finder, "waiting", {})
    monkeypatch.setattr(importing, "_done", set())
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in FRAMEWORKS}

    def install(name: str, text: str = "", version: str = "") -> Path:
        file = tmp_path / FILES[name]
        file.parent.mkdir(parents=True)
        file.write_text(textwrap.dedent(text or EXPECTED[name]))
        distribution = DISTRIBUTIONS[framework(name)]
        metadata = tmp_path / f"{distribution.replace('-', '_')}-1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        lines = [f"Name: {distribution}", f"Version: {version or VERSIONS[framework(name)]}"]
        metadata.write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
        return file

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in FRAMEWORKS]:
        del sys.modules[name]
    sys.modules.update(hidden)


def imported(name: str) -> tuple[dict[str, object], list[str]]:
    """What the framework's module has, and the warnings of importing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(FILES[name].removesuffix(".py").replace("/", "."))
    return vars(module), [str(warning.message) for warning in caught]


def is_changed(name: str, names: dict) -> bool:
    if name == "accelerate":
        return hasattr(names["PartialState"].__init__, "__wrapped__")
    if name == "ignite":
        return "mpiplus" in names["_NativeDistModel"].available_backends
    if name == "ignite's auto":
        wraps = names["auto_model"]
        assert wraps("mpi") and wraps("gloo") and not wraps("horovod")
        return wraps("mpiplus")
    return "mpiplus" in names["TrainingArguments"].__dataclass_fields__["ddp_backend"].metadata["choices"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("when", ["before", "after", "within"])
def test_a_framework_is_changed(package: Package, name: str, when: str) -> None:
    """When it is imported, or now if it is already; within: it imports torch first, which reads the variable."""
    first = f"from torchmpi_plugin import integrations; integrations.activate({framework(name)!r})\n"
    package(name, first * (when == "within") + textwrap.dedent(EXPECTED[name]))
    if when == "before":
        integrations.activate(framework(name))
        assert not [loaded for loaded in sys.modules if loaded.partition(".")[0] in FRAMEWORKS], "nothing is imported"
    names, told = imported(name)
    if when == "after":
        assert not is_changed(name, names)
        integrations.activate(framework(name))
    assert told == [] and is_changed(name, names)
    assert names["__spec__"].loader is names["__loader__"]
    assert not importing.finder.waiting.keys() & {names["__name__"]}
    assert type(sys.modules[str(names["__name__"]).rpartition(".")[0]]).__name__ == "module"


def test_transformers_brings_accelerate(package: Package) -> None:
    package("accelerate")
    integrations.activate("transformers")
    assert is_changed("accelerate", imported("accelerate")[0])


@pytest.mark.parametrize(
    ("name", "old", "new", "missing"),
    [
        ("accelerate", "class PartialState", "class State", "PartialState"),
        ("accelerate", "sagemaker_dp=False, backend=None", "backend=None", "PartialState._prepare_backend"),
        ("accelerate", "cpu=False, **kwargs", "**kwargs", "PartialState.__init__"),
        ("transformers", '["nccl", "gloo"]', '("nccl", "gloo")', "list of choices"),
        ("ignite", "timeout=None, init_method", "init_method", "_NativeDistModel._create_from_backend"),
        ("ignite's auto", "sync_bn=False, ", "", "auto_model(model, sync_bn, kwargs)"),
        ("ignite's auto", ', MPI="mpi"', "", "idist_native.MPI"),
    ],
)
def test_another_shape_is_left_alone(package: Package, name: str, old: str, new: str, missing: str) -> None:
    """As a release to come may be: one warning, with both versions and what is missing, and the module as it was."""
    text = textwrap.dedent(EXPECTED[name])
    assert old in text
    package(name, text.replace(old, new))
    integrations.activate(framework(name))
    names, told = imported(name)
    assert len(told) == 1, told
    ours, theirs = torchmpi_plugin.__version__, VERSIONS[framework(name)]
    assert f"torchmpi-plugin {ours} leaves {DISTRIBUTIONS[framework(name)]} {theirs} as it is: it expects" in told[0]
    assert missing in told[0]
    assert 'init_process_group("mpiplus")' in told[0]
    integrations.activate(framework(name))  # says no more
    members = [each for owner in names.values() if isinstance(owner, type) for each in vars(owner).values()]
    assert not [
        each for each in members if getattr(each, "__globals__", {}).get("__package__") == integrations.__name__
    ]
    assert "mpiplus" not in repr(members)
    assert "_EitherName" not in repr(names.get("idist_native"))


@pytest.mark.parametrize(("name", "version"), [("accelerate", "0.34.2"), ("transformers", "6.0.0.dev0")])
def test_another_version_is_left_alone(package: Package, name: str, version: str) -> None:
    package(name, version=version)
    integrations.activate(framework(name))
    names, told = imported(name)
    assert not is_changed(name, names)
    assert len(told) == 1
    assert f" {version} as it is: it expects a version from" in told[0]


def test_a_module_that_fails_fails_as_without_us(package: Package) -> None:
    file = package("accelerate", "raise OSError('its own')")
    integrations.activate("accelerate")
    with pytest.raises(OSError, match="its own"):
        imported("accelerate")
    file.write_text(textwrap.dedent(EXPECTED["accelerate"]))
    importlib.invalidate_caches()
    assert is_changed("accelerate", imported("accelerate")[0]), "the second attempt is ours too"


# ---- the variable ----

PROGRAM = f"""
import sys, torch
import torch.distributed as dist
from torchmpi_plugin.integrations import importing
assert "mpiplus" in dist.Backend.backend_list
loaded = [name for name in sys.modules if name.partition(".")[0] in {settings.FRAMEWORKS}]
print(sorted(importing.finder.waiting), loaded)
try:
    dist.init_process_group("mpiplus", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    print(error)
"""


def test_the_variable_counts_at_import_torch() -> None:
    assert set(settings.FRAMEWORKS) == FRAMEWORKS
    done = python(PROGRAM, MPIPLUS_INTEGRATIONS="ignite,transformers")
    waiting = sorted(file.removesuffix(".py").replace("/", ".") for file in FILES.values())
    assert (done.stdout, done.stderr) == (f"{waiting} []\n", "")


def test_torchs_own_backends_need_no_mpi() -> None:
    """Where another backend than the program's is replaced."""
    program = """
    import sys, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(dist.get_backend(dist.new_group()), [name for name in sys.modules if name.startswith("torchmpi_plugin.api")])
    """
    assert printed(program, MPIPLUS_REPLACE="nccl") == "gloo []\n"


def test_a_wrong_name_in_the_variable() -> None:
    """A warning from import torch, which goes on, and an error where others wait for this rank."""
    done = python(PROGRAM, MPIPLUS_INTEGRATIONS="accelerate,deepspeed")
    names = ", ".join(settings.FRAMEWORKS)
    text = f"MPIPLUS_INTEGRATIONS must be names, with commas, of {names}, not 'accelerate,deepspeed'"
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[] []\n{text}\n"
    assert done.stderr.count(text) == 1
