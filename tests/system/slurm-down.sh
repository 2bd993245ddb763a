#!/usr/bin/env bash
# End the Slurm that slurm-up.sh ROOT started, and only that: its jobs, then the daemons whose pid files are in ROOT.
set -u
root=$(realpath -m "${1:?folder given to slurm-up.sh}")
export SLURM_CONF=$root/slurm.conf

mapfile -t jobs < <(timeout 5 squeue -h -o %A 2>/dev/null | sort -u)
if [ "${#jobs[@]}" -gt 0 ]; then
  timeout 5 scancel "${jobs[@]}"
  for _ in $(seq 20); do
    sleep 0.5
    [ -n "$(timeout 5 squeue -h -o %A 2>/dev/null)" ] || break
  done
fi

for file in "$root"/pid/slurmd.*.pid "$root"/pid/slurmctld.pid "$root"/munge/munged.pid; do
  [ -s "$file" ] || continue
  pid=$(cat "$file")
  kill "$pid" 2>/dev/null || continue
  for _ in $(seq 50); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -9 "$pid" 2>/dev/null
  rm -f "$file"
done
exit 0
