"""The code of csrc/cuda/, compiled for the CPU: headers in this folder stand in for those of CUDA.

g++ knows neither `kernel<<<…>>>(…)` nor `__shared__`; only these are rewritten before.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import programs

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc" / "cuda"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PATIENCE = 600.0  # seconds that g++ may take; the machine may be busy
LAUNCH = re.compile(r"(\w+)<<<(.+?), (\w+), 0, stream>>>\((.*?)\);", re.DOTALL)
SHARED = re.compile(r"__shared__ ([\w: ]+) (\w+)((?:\[[^\]]+\])?);")


def missing() -> str | None:
    """Return why the kernels cannot be built here, or None if they can."""
    if platform.machine() != "x86_64":
        return f"threads of a grid take turns on x86-64 alone, not on {platform.machine()}"
    return None if shutil.which("g++") else "no g++"


@functools.cache
def missing_sanitizers() -> str | None:
    """Return why g++ cannot build with the sanitizers here, or None if it can."""
    with tempfile.TemporaryDirectory() as folder:
        done = programs.run(
            ["g++", *SANITIZERS, "-x", "c++", "-", "-o", f"{folder}/program"],
            input="int main() {}", check=False,
        )  # fmt: skip
    return f"g++ has no sanitizers: {done.stderr.strip()}" if done.returncode else None


def sources() -> dict[str, str]:
    """Return the texts of the files of csrc/cuda/ by their names."""
    return {path.name: path.read_text() for path in sorted(CSRC.iterdir())}


def in_plain_words(text: str) -> str:
    """Return CUDA C++ rewritten as C++ that g++ accepts."""
    text = LAUNCH.sub(r"launch(\2, \3, stream, [=] { \1(\4); });", text)
    text = SHARED.sub(r"static const grid::Shared<\1\3> \2_of_block; auto& \2 = *\2_of_block;", text)
    assert "<<<" not in text
    assert "__shared__" not in text
    return text


def built(files: Mapping[str, str], *flags: str) -> Path:
    """Return the shared library built from `files`; the same files are built only once per checkout."""
    files = {name: in_plain_words(text) for name, text in files.items()}
    files |= {
        path.name: path.read_text() for path in sorted(HERE.glob("*.*")) if path.suffix in (".h", ".cpp")
    }
    content = repr((_compiler(), FLAGS, flags, sorted(files.items()))).encode()
    cache = ROOT / "build" / "kernels-on-cpu"
    library = cache / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _compile(files, Path(folder), flags).rename(library)
    return library


def _compile(files: Mapping[str, str], folder: Path, flags: tuple[str, ...]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    units = [str(folder / name) for name in files if name.endswith((".cu", ".cpp"))]
    library = folder / "libhpcsgd_cuda_on_cpu.so"
    command = ["g++", *FLAGS, *flags, f"-I{folder}", "-x", "c++", *units, "-o", str(library)]
    programs.run(command, timeout=PATIENCE)
    return library


@functools.cache
def _compiler() -> str:
    return programs.run(["g++", "--version"]).stdout
