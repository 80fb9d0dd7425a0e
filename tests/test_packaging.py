"""What is built, what it says where it cannot be built, and what a wheel has in it."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pagedkv

ROOT = Path(__file__).resolve().parent.parent

needs_setup = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the sources beside the tests")


# --- a build that cannot be --------------------------------------------------------------------------


def build(folder, prelude="", **environment):
    """Begin to build with nothing but setup.py: what is tested here comes before any module of the package."""
    pytest.importorskip("setuptools")
    shutil.copy(ROOT / "setup.py", folder)
    code = f"import runpy, setuptools\n{prelude}\nrunpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, "build_ext"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


posix = pytest.mark.skipif(os.name == "nt", reason="the compiler is not named by CC there")


@needs_setup
@posix
def test_a_missing_compiler_gives_a_hint(tmp_path):
    said = build(tmp_path, CC="/nonexistent/cc")
    assert "/nonexistent/cc" in said  # what was tried and failed comes first
    hint = said[said.index("pagedkv is built by a C compiler, and none could be run") :]
    for how in ("apt-get install build-essential", "dnf install gcc", "apk add", "xcode-select", "Visual Studio"):
        assert how in hint
    assert "Python.h" not in said


@needs_setup
@posix
def test_a_missing_python_h_gives_a_hint(tmp_path):
    if not shutil.which(os.environ.get("CC", "cc").split()[0]):
        pytest.skip("needs a C compiler")
    nowhere = "from distutils import sysconfig; sysconfig.get_python_inc = lambda *args, **kwargs: '/nonexistent'"
    said = build(tmp_path, nowhere, CPATH="", C_INCLUDE_PATH="", CFLAGS="", CPPFLAGS="", LC_ALL="C")
    own_words, hint = said.split("pagedkv is built with the headers of Python", 1)
    assert "Python.h" in own_words  # the compiler's
    for how in ("python3-dev", f"python3.{sys.version_info[1]}-dev", "python3-devel", sys.executable):
        assert how in hint
    assert "could not be run" not in said


# --- what was installed ------------------------------------------------------------------------------


def installed():
    """The package's files as the wheel brought them; no test where it runs from a source tree."""
    for found in metadata.distributions(name="pagedkv"):
        files = [file for file in found.files or [] if file.parts[0] == "pagedkv" and "__pycache__" not in file.parts]
        if found.read_text("WHEEL") and Path(pagedkv.__file__) in [Path(file.locate()) for file in files]:
            return files
    pytest.skip("needs pagedkv installed from a wheel")


def test_a_wheel_has_what_runs_and_no_sources():
    suffixes = {file.suffix for file in installed()}
    assert suffixes <= {".py", ".so", ".pyd", ".pyi", ".pxd", ".h", ".typed"}


def test_a_wheel_has_the_stub_of_every_module_and_the_headers_of_the_kernels():
    files = {str(file).replace("\\", "/") for file in installed()}
    modules = {name.split(".")[0] for name in files if name.endswith((".so", ".pyd"))}
    assert len(modules) >= 15
    assert {name.removesuffix(".pyi") for name in files if name.endswith(".pyi")} >= modules
    assert "pagedkv/py.typed" in files
    assert {"pagedkv/store.pxd", "pagedkv/_kernels/attend.pxd", "pagedkv/_kernels/simd.h"} <= files
    assert not [name for name in files if "test" in name]
