"""Build the native kernels of csrc/ where there are compilers; everything else is in pyproject.toml.

The kernels are plain shared objects with a C interface, which hpcsgd/kernels/ loads. So one wheel serves any
Python 3 and any torch. The kernels of csrc/cuda/ are for GPUs from Ampere on; to run, they need only the
CUDA driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
CUDA_FLAGS = [
    "-O3", "-std=c++17", "-shared", "-cudart=static", "--threads=0",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
]  # fmt: skip
STRICT_CUDA_FLAGS = [
    "-Werror=all-warnings", "-Xcompiler=-Wextra,-Werror", "-Xptxas=-Werror,--warn-on-spills",
]  # fmt: skip
ARCHITECTURES = (80, 90, 100)  # Ampere and Ada, Hopper, Blackwell


class SharedObjects(build_ext):
    """A command that builds shared libraries that are not Python modules.

    Their names have no Python version, and they have no init function.
    """

    user_options: ClassVar = [
        *build_ext.user_options,
        ("strict-cuda", None, "treat nvcc's warnings as errors"),
    ]
    boolean_options: ClassVar = [*build_ext.boolean_options, "strict-cuda"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.strict_cuda = False

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def build_extension(self, ext: Extension) -> None:
        if ext.language != "cuda":
            return super().build_extension(ext)
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        strict = STRICT_CUDA_FLAGS if self.strict_cuda else []
        self.spawn([nvcc(), *CUDA_FLAGS, *strict, *generated_code(), *ext.sources, "-o", str(library)])


class AnyPython(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def sources(pattern: str) -> list[str]:
    return sorted(map(str, Path("csrc").glob(pattern)))


def nvcc() -> str | None:
    """Return the path of nvcc, or None if there is none.

    If $CUDA_HOME is set, only its nvcc counts; otherwise it is the first one in $PATH.
    """
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def generated_code() -> list[str]:
    """Return nvcc's options for the architectures that it knows.

    They include intermediate code for the last one, which newer GPUs compile when a program starts.
    """
    listed = subprocess.run(
        [nvcc(), "--list-gpu-code"], capture_output=True, text=True, check=True
    ).stdout.split()
    known = [number for number in ARCHITECTURES if f"sm_{number}" in listed]
    binaries = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in known]
    return [*binaries, f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]


cpu = Extension(
    "hpcsgd.kernels.libhpcsgd_cpu",
    sources("*.cpp"),
    depends=sources("*.h"),
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler hpcsgd uses the reference in Python and reports that
)

cuda = Extension(
    "hpcsgd.kernels.libhpcsgd_cuda",
    sources("cuda/*.cu"),
    depends=sources("cuda/*.cuh"),
    language="cuda",
    optional=True,  # as above
)

setup(
    ext_modules=[cpu, cuda] if nvcc() else [cpu],
    cmdclass={"build_ext": SharedObjects, "bdist_wheel": AnyPython},
)
