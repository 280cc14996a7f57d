"""MPI is one per process, and so is mpiplus: the main interpreter's."""

from __future__ import annotations

from plain_python import printed


def test_the_compiled_part_refuses_a_subinterpreter() -> None:
    program = """
        try:
            import _interpreters as interpreters  # from Python 3.13 on
        except ImportError:
            import _xxsubinterpreters as interpreters
        text = "import sys; sys.modules['torchmpi_plugin'] = type(sys)('torchmpi_plugin');"
        text += "sys.modules['torchmpi_plugin'].__path__ = %r; import torchmpi_plugin._bridge"
        from importlib.util import find_spec
        path = find_spec("torchmpi_plugin").submodule_search_locations
        raised = None
        try:
            raised = interpreters.run_string(interpreters.create(), text % list(path))
        except Exception as error:
            raised = error
        print(raised)
    """
    told = printed(program)
    assert "ImportError" in told and ("main interpreter" in told or "subinterpreters" in told)
