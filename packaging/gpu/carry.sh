#!/usr/bin/env bash
# carry.sh FOLDER [PYTHON_VERSION]: download the wheels of requirements.txt into FOLDER. run.sh installs them on a
# machine that reaches no package registry. They are for x86-64 and PYTHON_VERSION, by default 3.12.
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
