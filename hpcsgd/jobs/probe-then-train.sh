#!/bin/bash
# Probe, then train with as many groups as the probe found:   jobs/probe-then-train.sh job.toml [--SECTION.KEY VALUE]...
#
# The training waits for the probe and never starts where that fails. Sizes and times are those in the two scripts, or
# in the environment, as SBATCH_TIMELIMIT.
set -eu
here=$(dirname "$0")
typed=$(printf '%s\n' "$@" | sed -n 's/^--run\.output_dir=//p; /^--run\.output_dir$/{n;p;}' | tail -n 1)
run=${typed:-runs/$(basename "${1:?usage: probe-then-train.sh job.toml [--SECTION.KEY VALUE]...}" .toml)}
probe=$(sbatch --parsable "$here/probe.sbatch" "$@")
sbatch --dependency="afterok:${probe%%;*}" --kill-on-invalid-dep=yes \
  "$here/train.sbatch" "$@" --probe "$run-probe/probe.json"
