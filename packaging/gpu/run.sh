#!/usr/bin/env bash
# run.sh WHEELS OUT [WORDS...]: run `benchmarks/gpu.py --out OUT WORDS` on a machine that has a GPU, torch and nvcc, but
# neither MPI nor a package registry. WHEELS is the folder that carry.sh filled. Everything is installed into
# build/gpu-python. This environment also sees the packages of $PYTHON; the installed ones come first. OUT/build.txt
# has the output of building the kernels.
set -euo pipefail
wheels=$(realpath "${1:?usage: run.sh WHEELS OUT [WORDS...]}")
mkdir -p "${2:?usage: run.sh WHEELS OUT [WORDS...]}"
out=$(realpath "$2")
shift 2
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
environment=$PWD/build/gpu-python
"$python" -m venv --without-pip --clear "$environment"
"$python" - "$environment" <<'PYTHON'
import site, sys
from pathlib import Path

own = Path(sys.argv[1], "lib", "python%d.%d" % sys.version_info[:2], "site-packages", "behind.pth")
folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
own.write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders))
PYTHON

install() {
  "$python" -m pip --python "$environment/bin/python" install --no-index --no-deps --no-cache-dir "$@"
}
install -q --no-compile "$wheels"/*.whl
export PATH=$environment/bin:$PATH
if ! install -v --no-build-isolation -e . >"$out/build.txt" 2>&1; then
  tail -n 30 "$out/build.txt" >&2
  exit 1
fi

# The launcher must belong to the MPI library that mpi4py loads; otherwise each rank has a world of size 1.
size='from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2, MPI.Get_library_version()'
mpiexec -n 2 "$environment/bin/python" -c "$size" </dev/null

exec "$environment/bin/python" benchmarks/gpu.py --out "$out" "$@"
