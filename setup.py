"""The native kernels of csrc/, built where there is a C++ compiler; everything else is in pyproject.toml.

They are plain shared objects with a C interface that hpcsgd/kernels/native.py loads: one wheel for any
Python 3 and any torch.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]


class SharedObjects(build_ext):
    """Builds libraries that are no Python modules: no Python's version in the name, no init function."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols


class AnyPython(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def sources(*suffixes: str) -> list[str]:
    return sorted(str(path) for suffix in suffixes for path in Path("csrc").glob(f"*{suffix}"))


cpu = Extension(
    "hpcsgd.kernels.libhpcsgd_cpu",
    sources(".cpp"),
    depends=sources(".h"),
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler the reference in Python serves, and says so
)

setup(ext_modules=[cpu], cmdclass={"build_ext": SharedObjects, "bdist_wheel": AnyPython})
