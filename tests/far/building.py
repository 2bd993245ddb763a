"""Compile the library of the device, once for all processes that run tests."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils import cpp_extension

import programs

NATIVE = Path(__file__).with_name("native")
ALONE = ("sanitized.cpp",)
"""Sources of separate programs, which are not in the library."""
PATIENCE = 600.0  # seconds; the machine may be busy
WARNINGS = ["-Wall", "-Wextra", "-Wshadow"]


def compiler() -> str | None:
    return shutil.which("g++")


def library(folder: Path) -> Path:
    """Return the path of the library in `folder`; its name has a hash of its sources.

    One process compiles it, and the others wait for that.
    """
    path = folder / f"libfar-{_key()}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            build(path)
    return path


def program(source: str, parts: Sequence[str], folder: Path, *flags: str) -> Path:
    """Compile a program from `source` and `parts`, none of which uses torch, and return its path."""
    path = folder / Path(source).stem
    files = [str(NATIVE / name) for name in (source, *parts)]
    _call("-std=c++20", "-g", "-pthread", *WARNINGS, *flags, *files, "-o", str(path))
    return path


def _key() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {WARNINGS}".encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(path: Path, *flags: str) -> None:
    """Compile all sources as one, because torch's headers take nearly all of the time."""
    sources = [source.name for source in sorted(NATIVE.glob("*.cpp")) if source.name not in ALONE]
    includes = [f"-I{NATIVE}", *(f"-isystem{folder}" for folder in cpp_extension.include_paths())]
    torch_libraries = Path(torch.__file__).parent / "lib"
    unfinished = path.with_suffix(".part")
    _call(
        "-std=c++20", "-O1", "-fPIC", "-shared", *WARNINGS, *flags, *includes,
        "-x", "c++", "-", "-o", str(unfinished),
        f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}", "-lc10", "-ltorch_cpu", "-ltorch",
        source="".join(f'#include "{name}"\n' for name in sources),
    )  # fmt: skip
    unfinished.rename(path)


def _call(*arguments: str, source: str = "") -> None:
    call = [compiler() or "g++", *arguments]
    programs.run(call, input=source, timeout=PATIENCE)
