#!/usr/bin/env bash
# `make wheels`: make a source distribution and a manylinux wheel in dist/, check them with the usual packaging tools,
# and try them in new virtual environments. The first argument is the Python whose environment gets MPI, too.
# Each installed Python from 3.11 on gets two environments in turn: one with all dependencies except torch, and one
# in which a pip that finds no compiler installs everything except MPI. That one is removed after its trial, because
# torch may take gigabytes in it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
glibc=2.28 # RHEL 8, and the oldest of torch's own wheels
work=$PWD/build/wheels
tools=$work/tools/bin
trials=$work/trials # a folder without hpcsgd/, so that the scripts import the installed one

mkdir -p "$work" dist
rm -rf "$work"/{glibc,plain,trials,bare} dist/*
"$python" -m venv "$work/tools"
"$tools/python" -m pip install -q --upgrade pip
"$tools/python" -m pip install -q -r packaging/requirements.txt

"$tools/python" packaging/older_glibc.py "$work/glibc" "$glibc"
LDFLAGS="-L$work/glibc ${LDFLAGS:-}" NVCC_APPEND_FLAGS="-L$work/glibc ${NVCC_APPEND_FLAGS:-}" \
  "$tools/python" -m build --outdir "$work/plain"
PATH=$tools:$PATH "$tools/auditwheel" repair --plat "manylinux_${glibc/./_}_$(uname -m)" --wheel-dir dist "$work"/plain/*.whl
cp "$work"/plain/*.tar.gz dist

"$tools/twine" check --strict dist/*
"$tools/check-wheel-contents" dist/*.whl
"$tools/auditwheel" show dist/*.whl
"$tools/cibuildwheel" --print-build-identifiers --platform linux --archs "$(uname -m)"
"$tools/python" packaging/contents.py dist

# Only commands that run count: pyenv leaves commands of versions that are not selected.
pythons() {
  local minor each
  for minor in 11 12 13 14; do
    for each in "python3.$minor" "$HOME"/.pyenv/versions/3."$minor".*/bin/python; do
      if "$each" -c 'import venv' 2>/dev/null; then
        echo "$each"
        break
      fi
    done
  done
}

environment() {
  "$1" -m venv "$2"
  "$2/bin/python" -m pip install -q --upgrade pip
}

# What a user types who has neither a compiler nor MPI. No other programs are in PATH.
by_torchrun() {
  environment "$1" "$work/bare"
  (
    export PATH=$work/bare/bin CC=false CXX=false
    pip install -q -c "$constraints" "$wheel"
    pip check
    python -P with_torch.py
    torchrun --nproc-per-node 2 by_torchrun.py
  )
  rm -rf "$work/bare"
}

cp -r packaging/trials "$trials"
wheel=$(echo "$PWD"/dist/*.whl)
constraints=$PWD/constraints.txt
cd "$trials"

environment "$python" "$work/full"
"$work/full/bin/python" -m pip install -q -c "$constraints" "${wheel}[mpich]"
"$work/full/bin/python" -P with_torch.py "$(command -v nvcc || true)"
"$work/full/bin/mpiexec" -n 2 "$work/full/bin/hpcsgd" doctor

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
tried=$(version "$python")
echo "tried on Python $tried: everything"
for each in $(pythons); do
  environment "$each" "$work/py$(version "$each")"
  here=$work/py$(version "$each")/bin
  "$here/python" without_torch.py --requirements "$wheel" >"$work/requirements"
  "$here/python" -m pip install -q -r "$work/requirements"
  "$here/python" -m pip install -q --no-deps "$wheel"
  "$here/python" -P without_torch.py
  "$here/hpcsgd" --version
  "$here/hpcsgd" train --help >"$work/help"
  echo "tried on Python $(version "$each"): kernels and command line, without torch"
  by_torchrun "$each"
  echo "tried on Python $(version "$each"): training by torchrun, without a compiler and MPI"
done
for minor in 11 12 13 14; do
  [ -d "$work/py3.$minor" ] || echo "not tried: Python 3.$minor, which is not here"
done
ls -l "${wheel%/*}"
