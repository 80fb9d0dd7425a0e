"""The extension modules of pagedkv: one table, one set of directives.

Switches, read from the environment at build time:

PAGEDKV_DEBUG=1       bounds checks, no optimisation, symbols
PAGEDKV_SANITIZE=...  a list for -fsanitize, such as "address,undefined" or "thread"
"""

import os
import sys

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

# module -> the headers to watch
MODULES = {
    "pagedkv._kernels.parallel": ["pagedkv/_kernels/pool.h"],
    "pagedkv._kernels.rows": ["pagedkv/_kernels/stream.h", "pagedkv/_kernels/simd.h"],
    "pagedkv._kernels.simd": [
        f"pagedkv/_kernels/{name}.h"
        for name in ("simd", "simd_sets", "simd_plain", "simd_sse2", "simd_avx2", "simd_avx512", "simd_neon",
                     "simd_math", "simd_dtypes", "simd_end", "attend_rows", "attend_tile")
    ],
    "pagedkv._kernels.plan": [],
    "pagedkv._kernels.attend": ["pagedkv/_kernels/simd.h"],
    "pagedkv._arrays": [],
    "pagedkv._rows": [],
    "pagedkv.allocator": [],
    "pagedkv._store": [],
    "pagedkv.store": [],
    "pagedkv._table": [],
    "pagedkv.contiguous": [],
    "pagedkv.sequence": [],
    "pagedkv.attention": [],
    "pagedkv.step": [],
    "pagedkv.beams": [],
}

DEBUG = os.environ.get("PAGEDKV_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("PAGEDKV_SANITIZE", "")

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "freethreading_compatible": True,
    "autotestdict": False,
    "auto_pickle": False,
}


def compiler_options():
    """Flags for the compiler and the linker."""
    if sys.platform == "win32":
        return ["/std:c11", "/O2"], []
    level = "-O0" if DEBUG else "-O1" if SANITIZE else "-O3"
    compile_args = ["-std=c11", level, "-fvisibility=hidden"]
    link_args = []
    if DEBUG or SANITIZE:
        compile_args.append("-g")
    if SANITIZE:
        compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-DPAGEDKV_SANITIZE"]
        link_args.append(f"-fsanitize={SANITIZE}")
    return compile_args, link_args


def extensions():
    compile_args, link_args = compiler_options()
    for name, headers in MODULES.items():
        yield Extension(
            name,
            [name.replace(".", "/") + ".pyx"],
            depends=headers,
            include_dirs=["pagedkv/_kernels", numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )


if __name__ == "__main__":  # cythonize starts processes that import this file where they cannot fork
    setup(
        ext_modules=cythonize(list(extensions()), compiler_directives=DIRECTIVES, nthreads=os.cpu_count() or 1),
        options={"build_ext": {"parallel": os.cpu_count() or 1}},
    )
