#!/usr/bin/env bash
# What KIND-up.sh ARGS... makes, for as long as whoever starts this keeps its standard input open: held.sh KIND ARGS...
# Says "up" once it is there. However its starter ends, KIND-down.sh ARGS... then takes it away, and so does this with
# ARGS' first where that is a folder. To be started in a session of its own, where no Ctrl-C comes.
set -u
here=$(dirname "$(realpath "$0")") kind=${1:?kind}
shift
trap : PIPE # the starter may be gone before it has heard
ended=1
if "$here/$kind-up.sh" "$@" </dev/null >&2; then
  echo up
  ended=0
  cat >/dev/null
fi
"$here/$kind-down.sh" "$@" </dev/null >&2
[[ $1 == /* ]] && rm -rf "$1"
exit "$ended"
