"""Compare the installed native library with numpy, in an environment without torch.

`python without_torch.py --requirements WHEEL` prints the wheel's other dependencies, to be installed first.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

LONG, INT, POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


def requirements(wheel: Path) -> list[str]:
    """Return the dependencies of the wheel, except torch and those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = re.findall(r"^Requires-Dist: (.+)$", archive.read(name).decode(), re.MULTILINE)
    return [each for each in lines if "extra ==" not in each and not re.match(r"torch\b", each)]


def folder() -> Path:
    """Return the folder of the installed kernels, without importing them, because that needs torch."""
    spec = importlib.util.find_spec("hpcsgd")
    assert spec is not None
    assert spec.origin is not None
    where = Path(spec.origin).parent
    assert where.is_relative_to(sysconfig.get_path("purelib")), f"{where} is not the installed one"
    return where / "kernels"


def main() -> None:
    import numpy as np  # with --requirements, numpy is not installed yet

    library = ctypes.CDLL(str(folder() / "libhpcsgd_cpu.so"))
    library.hpcsgd_instructions.restype = ctypes.c_char_p

    def call(name: str, *arguments: object) -> int:
        """Call a kernel with the types of csrc/kernels.h and return its result.

        An array is given by its address, a float as float32, an int as int64, and an `INT` as int32.
        """
        function = getattr(library, f"hpcsgd_{name}")
        function.restype = LONG
        kinds = {
            np.ndarray: lambda a: POINTER(a.ctypes.data),
            float: ctypes.c_float,
            int: LONG,
            INT: lambda a: a,
        }
        done = function(*[kinds[type(each)](each) for each in arguments])
        assert done >= 0, f"hpcsgd_{name}: {done}"
        return done

    random = np.random.default_rng(1)
    x = random.standard_normal(1_000_000, dtype=np.float32)
    x[::7] = x[0]  # ties
    for portable in (INT(0), INT(1)):
        # The reference sorts the largest first, and equal ones by their indices.
        expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:10_000])
        starts, stops, k = (np.array([each]) for each in (0, len(x), 10_000))
        chosen = np.empty(10_000, dtype=np.int64)
        call("largest", x, starts, stops, k, 1, chosen, INT(2), portable)
        assert (chosen == expected).all()

        expected = np.flatnonzero(np.abs(x) >= np.float32(2.5))
        found = np.empty(len(expected), dtype=np.int64)
        assert call("above", x, len(x), 2.5, found, len(found), INT(2), portable) == len(expected)
        assert (found == expected).all()

        acc, g = random.standard_normal((2, len(x)), dtype=np.float32)
        total, norms = acc + g, np.empty(2)
        bounds = np.array([0, 300_001, len(x)])
        call("accumulate", acc, g, INT(0), bounds, 2, norms, INT(2), portable)
        assert (acc == total).all()
        assert not g.any()
        squares = [(part.astype(np.float64) ** 2).sum() for part in np.split(total, [300_001])]
        np.testing.assert_allclose(norms, squares, rtol=1e-12)

        code, out = np.empty(4 * len(x) // 64 + len(x), dtype=np.uint8), np.empty_like(x)
        call("pack", x, len(x), 64, INT(8), INT(0), INT(0), code, INT(2), portable)
        scales = (np.abs(x).reshape(-1, 64).max(1) / np.float32(127))[:, None]
        assert (code[: 4 * len(scales)].view(np.float32) == scales[:, 0]).all()
        numbers = np.rint(x.reshape(-1, 64) / scales)
        assert (code[4 * len(scales) :].view(np.int8) == numbers.ravel()).all()
        call("unpack", code, len(x), 64, INT(8), out, INT(2), portable)
        assert (out == (numbers * scales).ravel()).all()

    code = np.empty(call("encoded_bytes", chosen, len(chosen)), dtype=np.uint8)
    call("encode", chosen, len(chosen), code)
    again = np.empty_like(chosen)
    call("decode", code, len(code), len(chosen), again)
    assert (again == chosen).all()

    cuda = folder() / "libhpcsgd_cuda.so"
    if cuda.exists():
        assert ctypes.CDLL(str(cuda)).hpcsgd_cuda_usable
    versions = f"numpy {np.__version__}, Python {sys.version.split()[0]}"
    print(f"hpcsgd {importlib.metadata.version('hpcsgd')}, {versions}")
    print(f"{library.hpcsgd_instructions().decode()} kernels as numpy; CUDA library: {cuda.exists()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--requirements"]:
        print(*requirements(Path(sys.argv[2])), sep="\n")
    else:
        main()
