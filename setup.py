"""The one thing pyproject.toml cannot say: the two C extensions, and that one wheel serves every Python 3."""

from setuptools import setup

setup(
    cffi_modules=["c_src/build_shim.py:shim_int", "c_src/build_shim.py:shim_ptr"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
