"""The C extension, which pyproject.toml has no settled way to declare; where no compiler is, all is installed without it, and numpy does its work."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("store.online._kernels", ["store/online/_kernels.c"], extra_compile_args=["-O3"], optional=True)])
