#!/usr/bin/env bash
# What of the suite runs on N ranks, but for the long tests, as N processes: tests/mpi.sh MPIEXEC PYTHON N...
# --capture=sys: of what the MPI library writes when it ends a job nothing would be seen.
set -euo pipefail
mpiexec=${1:?mpiexec} python=${2:?python}
shift 2

export OMP_NUM_THREADS=1
# Only Open MPI reads these: root may start jobs, and more ranks than cores are no error.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

cd "$(dirname "$0")/.."
for n in "$@"; do
  echo "== $n ranks"
  timeout --kill-after=10 1200 "$mpiexec" -n "$n" \
    "$python" -m pytest --with-mpi -m "not long and not soak and not large" -q --color=no --capture=sys -p no:cacheprovider </dev/null ||
    { code=$?; echo "$n ranks: exit code $code" >&2; exit "$code"; }
done
