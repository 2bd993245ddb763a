#!/bin/bash
# Train under Flux:   flux batch jobs/train.flux job.toml [--SECTION.KEY VALUE]...
#
# Saves a checkpoint and stops shortly before its time is over, is submitted again and resumes, and so on until the
# training is complete. Comes back, too, after a killed rank, but not after a mistake. `hpcsgd job train` writes this
# script with the values filled in.

# --- values -------------------------------------------------------------------------------------------------------
# flux: --job-name=train
# flux: --nodes=1
# flux: --nslots=4
# flux: --cores-per-slot=1
# flux: --time-limit=3600s
# flux: --output=train.out

COMMAND=train    # of hpcsgd: train, or compare, which stops and goes on as that does
JOB=("$@")       # the job file, and overrides of its keys
SCRIPT=jobs/train.flux # this file, to be submitted again, from the folder of the first flux batch
NODES=1
RANKS=4          # in all: slots
CORES=1          # of a rank, and so its threads: cores per slot
PYTHON=python    # of the environment that hpcsgd is installed in
MODULES=()       # to load first
SETUP=           # a shell file to source then
FLUX_RUN=()      # further options of flux run, as -o pmi=pmix for Open MPI
ENVIRONMENT=()   # variables of all ranks, as NAME=value
RUN=             # the run folder; empty: that of the overrides, or runs/ and the name of the job file
MAX_RESTARTS=20  # the job comes back at most so many times
# ------------------------------------------------------------------------------------------------------------------

set -u
: "${JOB[0]:?usage: flux batch train.flux job.toml [--SECTION.KEY VALUE]...}"
typed=$(printf '%s\n' "${JOB[@]}" | sed -n 's/^--run\.output_dir=//p; /^--run\.output_dir$/{n;p;}' | tail -n 1)
RUN=${RUN:-${typed:-runs/$(basename "${JOB[0]}" .toml)}}
id=$(flux job id "$(flux getattr jobid)") || exit 1 # as a plain number
first=${HPCSGD_FIRST_JOB:-$id}
mkdir -p "$(dirname "$RUN")"
exec >>"$RUN-$COMMAND-$first.log" 2>&1 # one for all starts

say() { echo "train.flux: $*"; }
checkpoints() { find "$RUN/checkpoints" "$RUN-compare" -type d -name 'step-*' 2>/dev/null | sort; }
# To where this job came from. The next one waits until this one has left the run folder alone.
again() { flux --parent batch "--dependency=afterany:$id" "--env=HPCSGD_FIRST_JOB=$first" "$SCRIPT" "$@"; }

starts=$RUN-$COMMAND-$first.starts # a line for each
echo "$id" >>"$starts"
restarts=$(($(wc -l <"$starts") - 1))

# TERM or HUP to this shell means that Flux is ending the job (cancelled, out of time). Submitting it again here would
# bring back even a job that its owner cancelled.
ended_by_flux=
trap 'ended_by_flux=yes' TERM HUP

[ "${#MODULES[@]}" -eq 0 ] || module load "${MODULES[@]}" || { say "cannot load ${MODULES[*]}"; exit 1; }
# shellcheck source=/dev/null
[ -z "$SETUP" ] || . "$SETUP" || { say "cannot source $SETUP"; exit 1; }
[ "${#ENVIRONMENT[@]}" -eq 0 ] || export "${ENVIRONMENT[@]}"

resume=()
[ "$restarts" -eq 0 ] || resume=(--resume)

export OMP_NUM_THREADS=$CORES

# A rank that fails writes its last words here: flux run tells only that the others were killed.
export HPCSGD_FAILURE=$RUN-$id.failure

before=$(checkpoints)
say "start $((restarts + 1)), job $id: $RANKS ranks, run folder $RUN"
# One rank that ends ends all, soon: they would wait for it.
flux run --nodes="$NODES" --ntasks="$RANKS" --cores-per-task="$CORES" -o exit-timeout=20s \
  -o cpu-affinity=per-task ${FLUX_RUN[@]+"${FLUX_RUN[@]}"} \
  "$PYTHON" -m hpcsgd "$COMMAND" "${JOB[@]}" --run.output_dir "$RUN" ${resume[@]+"${resume[@]}"}
code=$?

if [ -s "$HPCSGD_FAILURE" ]; then
  say "failed, not restarted: $(head -n 1 "$HPCSGD_FAILURE")"
  rm -f "$HPCSGD_FAILURE"
  exit 1
fi
case $code in
  0) say "complete"; exit 0 ;;
  75) why="stopped with a checkpoint" ;;
  69) why="ranks lost touch with each other" ;;
  129 | 13[1-9] | 1[4-9]? | 2??) why="a rank was killed (exit code $code)" ;;
  *) say "failed with exit code $code: not restarted"; exit "$code" ;;
esac
if [ -n "$ended_by_flux" ]; then
  say "$why; ended by Flux"
elif [ "$code" -ne 75 ] && [ "$(checkpoints)" = "$before" ]; then
  say "$why before it came to a new checkpoint: not restarted, it would happen again"
elif [ "$restarts" -ge "$MAX_RESTARTS" ]; then
  say "$why; restarts: $restarts, MAX_RESTARTS=$MAX_RESTARTS: not again"
elif next=$(again "$@"); then
  say "$why; goes on as job $next"
else
  say "$why; Flux does not take it again: flux batch --env=HPCSGD_FIRST_JOB=$first $SCRIPT $*"
fi
exit "$code"
