"""The C and C++ extensions, which pyproject.toml has no settled way to declare; where no compiler
is, all is installed without them, and numpy and torch do their work."""

from setuptools import Extension, setup

ENCODER = [
    "precompute/text/_encoder_vectors.h",
    "precompute/text/_encoder_layers.h",
    "precompute/text/_encoder_tiles.h",
]

setup(
    ext_modules=[
        Extension(
            "precompute.store.online._kernels",
            ["store/online/_kernels.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "precompute.text._encoder",
            ["precompute/text/_encoder.cpp"],
            depends=ENCODER,
            # equal bits on every CPU: the compiler joins no operations by itself
            extra_compile_args=["-std=c++17", "-O2", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
    ]
)
