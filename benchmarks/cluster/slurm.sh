#!/usr/bin/env bash
# Runs Slurm with two nodes on one machine, to test batch scripts with the real scheduler. As root:
#
#   slurm.sh start DIR        # starts the daemons, with state and logs in the new folder DIR
#   export SLURM_CONF=DIR/slurm.conf
#   srun -N2 hostname         # and sbatch, squeue, scontrol ...
#   slurm.sh kill DIR node2   # kills a node and all its processes; "boot DIR node2" restarts it
#   slurm.sh stop DIR         # stops the daemons and all jobs
#
# Every daemon runs on a virtual host: a UTS namespace with its own name, and a mount namespace with an /etc/hosts that resolves
# the names of all hosts to loopback addresses. The machine's own name and /etc/hosts do not change.
set -euo pipefail
nodes=(node1 node2)
port=16817 # of the controller; the nodes use the following ports
seconds=30 # to wait for the nodes

fail() {
  echo "slurm.sh: $*" >&2
  exit 1
}

on_host() { # HOST COMMAND...: starts the command in the background on the host; the first command creates the host's namespace
  local host=$1 uts=$dir/$1.uts
  shift
  if mountpoint -q "$uts"; then
    set -- nsenter --uts="$uts" unshare --mount "${inside[@]}" "$host" "$dir/hosts" "$@"
  else
    touch "$uts"
    set -- unshare --uts="$uts" --mount "${inside[@]}" "$host" "$dir/hosts" "$@"
  fi
  # Inherited descriptors would keep the caller's pipe open.
  setsid "$@" </dev/null >>"$dir/$host.err" 2>&1 &
  for _ in {1..50}; do
    mountpoint -q "$uts" && return
    sleep 0.1
  done
  fail "no namespace for $host: $(tail -n 1 "$dir/$host.err")"
}
# shellcheck disable=SC2016
inside=(sh -c 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"' sh)

of_host() { # the ids of a host's processes, by namespace
  [[ -e $dir/$1.uts ]] || return 0
  find -L /proc/[0-9]*/ns/uts -maxdepth 0 -samefile "$dir/$1.uts" 2>/dev/null | cut -d/ -f3 || true
}

end_host() { # HOST SIGNAL...: sends each signal to all processes of the host until none is left
  local host=$1 pids
  shift
  for signal in "$@" KILL; do
    for _ in {1..30}; do
      pids=$(of_host "$host")
      [[ $pids ]] || break 2
      # shellcheck disable=SC2086
      kill -s "$signal" $pids 2>/dev/null || true
      sleep 0.1
    done
  done
  if mountpoint -q "$dir/$host.uts"; then umount "$dir/$host.uts"; fi
  rm -f "$dir/$host.uts"
}

boot() { on_host "$1" slurmd -D -f "$dir/slurm.conf"; }

idle() { # whether all nodes are up and free
  [[ $(timeout 2 sinfo -h -N -o '%N %t' 2>/dev/null | grep -c ' idle$') == "${#nodes[@]}" ]]
}

wait_until_idle() {
  local end=$((SECONDS + seconds))
  while ((SECONDS < end)); do
    idle && return
    sleep 0.1
  done
  tail -n 15 "$dir"/*.err >&2 # the daemons' logs, and their output from before these were open
  fail "the nodes are not idle after $seconds s; see the logs above"
}

configure() {
  {
    echo "127.0.0.1 localhost controller"
    for place in "${!nodes[@]}"; do echo "127.0.0.$((place + 2)) ${nodes[place]}"; done
  } >"$dir/hosts"
  cat >"$dir/slurm.conf" <<CONF
ClusterName=one-machine
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
# A requeued job waits until its old credentials have expired: by default two minutes.
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
CompleteWait=0
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
# Each node reports all cores of this machine.
SlurmdParameters=config_overrides
CONF
  for place in "${!nodes[@]}"; do
    echo "NodeName=${nodes[place]} NodeAddr=127.0.0.$((place + 2)) Port=$((port + 1 + place)) CPUs=$(nproc)"
  done >>"$dir/slurm.conf"
  echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE" >>"$dir/slurm.conf"
}

[[ $# == 2 && $1 =~ ^(start|stop)$ || $# == 3 && $1 =~ ^(kill|boot)$ ]] ||
  fail "usage: slurm.sh start|stop DIR, or slurm.sh kill|boot DIR NODE"
PATH=$PATH:/usr/sbin:/sbin
dir=$(realpath -m "$2")
export SLURM_CONF=$dir/slurm.conf
[[ $EUID == 0 ]] || fail "must be run as root"
for program in slurmctld slurmd munged; do
  command -v "$program" >/dev/null || fail "$program not found; install Debian's packages slurm-wlm and munge"
done

case $1 in
  start)
    [[ ! -e $dir/slurm.conf ]] || fail "$dir has already been used; choose a new folder"
    mkdir -p "$dir/state" "${nodes[@]/#/$dir/spool-}"
    configure
    trap 'status=$?; ((status == 0)) || "$0" stop "$dir"' EXIT
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    # --force: other users may have no access to the folder.
    on_host controller munged --foreground --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
      --seed-file="$dir/munge.seed" --pid-file="$dir/munged.pid" --log-file="$dir/munged.log"
    for _ in {1..50}; do
      [[ -S $dir/munge.socket ]] && break
      sleep 0.1
    done
    on_host controller slurmctld -D -f "$dir/slurm.conf"
    for node in "${nodes[@]}"; do boot "$node"; done
    wait_until_idle
    ;;
  stop)
    for node in "${nodes[@]}"; do end_host "$node" TERM; done
    end_host controller TERM
    ;;
  kill) end_host "$3" ;;
  boot) boot "$3" ;;
esac
