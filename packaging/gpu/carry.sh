#!/usr/bin/env bash
# carry.sh FOLDER [PYTHON_VERSION]: put the wheels of requirements.txt into FOLDER, for run.sh on a machine that reaches
# no package registry (x86-64, Python 3.12 unless another version is named).
set -euo pipefail
folder=$(realpath -m "${1:?usage: carry.sh FOLDER [PYTHON_VERSION]}")
version=${2:-3.12}
cd "$(dirname "$0")"

rm -rf "$folder"
platforms=()
for glibc in 34 31 28 27 24 17 12 5; do
  platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$folder" -r requirements.txt
du -sh "$folder"
