#!/usr/bin/env bash
# A throwaway Slurm of N virtual nodes on this host, without systemd: slurm-up.sh ROOT [NODES=4] [CPUS=4] [PORT=16817]
# Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Daemons keep everything under ROOT, which the
# user munge must be able to reach; slurm-down.sh ROOT ends them. Then: export SLURM_CONF=ROOT/slurm.conf
set -euo pipefail
root=$(realpath -m "${1:?folder for configuration, logs and state}")
nodes=${2:-4} cpus=${3:-4} port=${4:-16817}
host=$(hostname -s)
export SLURM_CONF=$root/slurm.conf

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

mkdir -p "$root"/{ctld,spool,log,pid,tmp}
chmod 755 "$root" "$root"/{ctld,spool,log,pid,tmp}

# Its own key and socket: the host's munge, if there is one, is not touched.
install -d -o munge -g munge -m 0755 "$root/munge"
[ -s "$root/munge/munge.key" ] || head -c 1024 /dev/urandom >"$root/munge/munge.key"
chown munge:munge "$root/munge/munge.key"
chmod 400 "$root/munge/munge.key"
alive "$root/munge/munged.pid" ||
  setpriv --reuid munge --regid munge --clear-groups munged --force \
    --key-file="$root/munge/munge.key" --socket="$root/munge/munge.socket" --pid-file="$root/munge/munged.pid" \
    --log-file="$root/munge/munged.log" --seed-file="$root/munge/munged.seed"

cat >"$SLURM_CONF" <<CONF
ClusterName=throwaway
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$root/munge/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$root/ctld
SlurmdSpoolDir=$root/spool/%n
SlurmctldPidFile=$root/pid/slurmctld.pid
SlurmdPidFile=$root/pid/slurmd.%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5
SwitchType=switch/none
TmpFS=$root/tmp/%n
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=3600
# MPICH names shared memory after the job, and what a killed job left of an earlier Slurm's would be in the way.
FirstJobId=$((RANDOM * 1000 + 1))
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
CONF
{
  for i in $(seq "$nodes"); do
    echo "NodeName=node$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=$cpus RealMemory=4096 State=UNKNOWN"
  done
  echo "PartitionName=main Nodes=node[1-$nodes] Default=YES MaxTime=INFINITE State=UP"
  echo "PartitionName=urgent Nodes=node[1-$nodes] PriorityTier=10 MaxTime=INFINITE State=UP"
} >>"$SLURM_CONF"

alive "$root/pid/slurmctld.pid" || slurmctld -f "$SLURM_CONF"
for i in $(seq "$nodes"); do
  mkdir -p "$root/spool/node$i" "$root/tmp/node$i"
  chmod 1777 "$root/tmp/node$i"
  alive "$root/pid/slurmd.node$i.pid" || slurmd -f "$SLURM_CONF" -N "node$i"
done

for _ in $(seq 60); do
  up=$(timeout 3 sinfo -h -N -p main -o %T 2>/dev/null | grep -cE '^(idle|mixed|allocated)$' || true)
  [ "$up" = "$nodes" ] && exit 0
  sleep 0.5
done
echo "Slurm did not come up: $up of $nodes nodes" >&2
tail -n 20 "$root"/log/*.log >&2
exit 1
