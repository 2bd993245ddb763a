#!/usr/bin/env bash
# Stands in for ssh: mpiexec -launcher-exec net-agent.sh runs its command for 10.77.0.i as host i of HPCSGD_NET
# (the NAME given to net-up.sh), with a hostname and a /dev/shm of its own: no shared memory between hosts.
set -euo pipefail
while [[ $1 == -* ]]; do shift; done
host=${HPCSGD_NET:?NAME given to net-up.sh}-${1##*.}
shift
exec ip netns exec "$host" unshare --uts --mount --ipc \
  bash -c "hostname '$host' && mount -t tmpfs -o size=1g tmpfs /dev/shm && $*"
