"""Check that the wheel and the source distribution contain all files that they need.

python contents.py dist
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = {"c++": "libhpcsgd_cpu.so", "nvcc": "libhpcsgd_cuda.so"}


def expected_in_wheel() -> set[str]:
    """Return the libraries that the tools of this machine build, and all other files of the package."""
    built = {f"hpcsgd/kernels/{library}" for tool, library in LIBRARIES.items() if shutil.which(tool)}
    return built | {str(path.relative_to(ROOT)) for path in (ROOT / "hpcsgd").rglob("*") if kept(path)}


def expected_in_sdist() -> set[str]:
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hpcsgd").rglob("*") if kept(path)}
    return kernels | modules | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}


def kept(path: Path) -> bool:
    return path.is_file() and path.suffix not in {".pyc", ".so"}


def require(expected: set[str], found: set[str], archive: Path) -> None:
    lacking = sorted(expected - found)
    if lacking:
        sys.exit(f"{archive.name} lacks {', '.join(lacking)}")
    print(
        f"{archive.name}: all of {len(expected)} files that it has to hold, {archive.stat().st_size:,} bytes"
    )


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    require(expected_in_wheel(), set(zipfile.ZipFile(wheel).namelist()), wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    require(expected_in_sdist(), names, sdist)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
