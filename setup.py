"""The extension modules of pagedkv: one table, one set of directives.

Switches, read from the environment at build time:

PAGEDKV_DEBUG=1       bounds checks, no optimisation, symbols
PAGEDKV_SANITIZE=...  a list for -fsanitize, such as "address,undefined" or "thread"
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError, PlatformError

# module -> what it is made of beside its .pyx: C files to compile, and headers to watch.
# What takes longest comes first: compilers run side by side, in this order.
MODULES = {
    "pagedkv._kernels.simd": [
        f"pagedkv/_kernels/{name}"
        for name in ("simd_avx512.c", "simd_avx2.c", "simd_sse2.c", "simd_plain.c", "simd_neon.c", "simd.h",
                     "simd_sets.h", "simd_bodies.h", "simd_math.h", "simd_turn.h", "simd_dtypes.h", "attend_rows.h",
                     "attend_tile.h")
    ],
    "pagedkv._kernels.rows": ["pagedkv/_kernels/stream.h", "pagedkv/_kernels/simd.h"],
    "pagedkv._kernels.parallel": ["pagedkv/_kernels/pool.h"],
    "pagedkv._kernels.plan": [],
    "pagedkv._kernels.attend": ["pagedkv/_kernels/simd.h"],
    "pagedkv._radix.nodes": [],
    "pagedkv._radix.order": [],
    "pagedkv._radix.tree": [],
    "pagedkv._radix.faults": [],
    "pagedkv._radix.picture": [],
    "pagedkv._radix.events": [],
    "pagedkv._arrays": [],
    "pagedkv._tensors": [],
    "pagedkv._rows": ["pagedkv/_kernels/pages.h"],
    "pagedkv.allocator": [],
    "pagedkv.pieces": [],
    "pagedkv.store": [],
    "pagedkv.contiguous": [],
    "pagedkv._tables": [],
    "pagedkv.sequence": [],
    "pagedkv.attention": [],
    "pagedkv.foreign": [],
    "pagedkv.step": [],
    "pagedkv.known": [],
    "pagedkv.events": [],
    "pagedkv._beginnings": [],
    "pagedkv.prefix": [],
    "pagedkv._batch": [],
    "pagedkv._groups": [],
    "pagedkv.beams": [],
}

# Cython's support of memoryviews and functions, once for all modules instead of in each: it has no .pyx, and its C is
# made by Cython. On the ground floor, since the kernels have memoryviews as well. Cython puts it into sys.modules under
# its last name too: one that no other package has.
SHARED = "pagedkv._kernels._pagedkv_shared"

# Loops over rows, blocks and nodes are in these, and get -O3. What calls them would gain nothing but size.
LOOPS = ("pagedkv._kernels.", "pagedkv._radix.", "pagedkv.allocator")

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


def compiler_options(name):
    """Flags for the compiler and the linker."""
    if sys.platform == "win32":
        return ["/std:c11", "/experimental:c11atomics", "/O2"], []
    level = "-O0" if DEBUG else "-O1" if SANITIZE else "-O3" if name.startswith(LOOPS) and name != SHARED else "-O2"
    compile_args = ["-std=c11", level, "-fvisibility=hidden"]
    link_args = []
    if DEBUG or SANITIZE:
        compile_args.append("-g")
    elif not any(flag.startswith("-g") for flag in os.environ.get("CFLAGS", "").split()):
        compile_args.append("-g0")  # many a Python was built with -g, and passes it on
    if SANITIZE:
        compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-DPAGEDKV_SANITIZE"]
        link_args.append(f"-fsanitize={SANITIZE}")
    return compile_args, link_args


def extensions():
    for name, files in {**MODULES, SHARED: []}.items():
        compile_args, link_args = compiler_options(name)
        # Of what all share Cython makes the C file, and says where.
        glue = [] if name == SHARED else [name.replace(".", "/") + ".pyx"]
        yield Extension(
            name,
            [*glue, *(file for file in files if file.endswith(".c"))],
            depends=["setup.py", *(file for file in files if file.endswith(".h"))],
            include_dirs=["pagedkv/_kernels"],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )


NO_COMPILER = """pagedkv is built by a C compiler, and none could be run. To install one:
  Debian, Ubuntu    apt-get install build-essential
  Fedora, RHEL      dnf install gcc
  Alpine            apk add build-base
  macOS             xcode-select --install
  Windows           the Build Tools for Visual Studio, with "Desktop development with C++"
CC names another one than the default."""

NO_HEADERS = f"""pagedkv is built with the headers of Python, and Python.h is missing or did not compile. To install it:
  Debian, Ubuntu    apt-get install python3-dev, or python{sys.version_info[0]}.{sys.version_info[1]}-dev
  Fedora, RHEL      dnf install python3-devel
  Alpine            apk add python3-dev musl-dev
  macOS, Windows    it comes with the Python of python.org, Homebrew, conda, pyenv and uv
This Python is {sys.executable}."""


def made_before(source, made):
    return os.path.exists(made) and os.path.getmtime(made) < os.path.getmtime(source)


class BuildExt(build_ext):
    """First whether anything can be compiled here, then Cython for all modules, then the compiler."""

    def build_extensions(self):
        self.try_compiling("int pagedkv_probe;\n", NO_COMPILER)
        self.try_compiling("#include <Python.h>\n", NO_HEADERS)
        # Not before: what only describes the package, or finds no compiler, does not wait for these.
        import numpy
        from Cython.Build import cythonize

        done = cythonize(
            self.extensions,
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=SHARED,
            nthreads=os.cpu_count() or 1,
            # By itself it looks at the sources only, not at what was asked of it: in this file.
            force=any(made_before(__file__, name.replace(".", "/") + ".c") for name in (*MODULES, SHARED)),
        )
        for extension, translated in zip(self.extensions, done, strict=True):
            extension.sources = translated.sources
            extension.depends = translated.depends
            extension.include_dirs.append(numpy.get_include())
        # setuptools builds several modules at a time, but the files of each one after another.
        with ThreadPoolExecutor(int(self.parallel or 1)) as pool:
            compile_all = self.compiler.compile

            def compile_each(sources, **options):
                done = pool.map(lambda source: compile_all([source], **options), sources)
                return [file for files in done for file in files]

            self.compiler.compile = compile_each
            super().build_extensions()

    def try_compiling(self, code, hint):
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "probe.c")
            with open(source, "w", encoding="ascii") as file:
                file.write(code)
            try:
                self.compiler.compile([source], output_dir=folder)
            except (CompileError, PlatformError) as error:
                raise CompileError(f"{error}\n\n{hint}") from error


class Sdist(sdist):
    """With all that is tested and measured from a source tree, and nothing that Cython made."""

    def make_distribution(self):
        self.filelist.append("CHANGELOG.md")
        self.filelist.append("CONTRIBUTING.md")
        for folder in "pagedkv", "tests", "benchmarks":
            self.filelist.graft(folder)
        for made in "*.c", "*.html", "*.so", "*.pyd", "*.py[co]":
            self.filelist.global_exclude(made)
        self.filelist.extend(file for files in MODULES.values() for file in files if file.endswith(".c"))  # by hand
        super().make_distribution()


if __name__ == "__main__":  # cythonize starts processes that import this file where they cannot fork
    setup(
        ext_modules=list(extensions()),
        cmdclass={"build_ext": BuildExt, "sdist": Sdist},
        options={"build_ext": {"parallel": os.cpu_count() or 1}},
    )
