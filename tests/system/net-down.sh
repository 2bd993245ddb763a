#!/usr/bin/env bash
# Take away what net-up.sh NAME HOSTS made, as far as it came: what runs there, then the namespaces with their links.
set -u
name=${1:?name} hosts=${2:?number of hosts}
for i in $(seq 0 "$hosts"); do
  ip netns pids "$name-$i" 2>/dev/null | xargs -r kill -9
  ip netns del "$name-$i" 2>/dev/null
done
exit 0
