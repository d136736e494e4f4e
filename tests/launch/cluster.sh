#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, for tests:
#
#     tests/launch/cluster.sh start FOLDER    # then: export SLURM_CONF=FOLDER/slurm.conf
#     tests/launch/cluster.sh stop FOLDER
#
# The cluster is munged, slurmctld and two slurmd on free ports. They write all their files to FOLDER and do not touch a
# SLURM that is installed on this machine. Needs root (slurmd starts jobs), and `apt-get install slurm-wlm munge`.
#
# The nodes are called 127.0.0.2 and 127.0.0.3, because these names resolve without /etc/hosts. Each node claims to have 8
# processors and 2 GPUs. The GPUs do not exist, but SLURM refuses jobs that ask for three.
set -euo pipefail

free_ports() {
    python3 - "$1" <<'PYTHON'
import random, socket, sys

ports = []
while len(ports) < int(sys.argv[1]):
    with socket.socket() as one:
        try:  # below 32768: Linux takes no port there for a connection or for port 0
            one.bind(("", random.randrange(10_000, 20_000)))
        except OSError:
            continue
        if one.getsockname()[1] not in ports:
            ports.append(one.getsockname()[1])
print(*ports)
PYTHON
}

configure() {
    local controller first second
    read -r controller first second < <(free_ports 3)
    cat > slurm.conf <<CONF
ClusterName=tessera-test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
AuthType=auth/munge
# a requeued job waits until its credential expires
AuthInfo=socket=$PWD/munge.socket,cred_expire=5
StateSaveLocation=$PWD/state
SlurmdSpoolDir=$PWD/spool-%n
SlurmctldPidFile=$PWD/slurmctld.pid
SlurmdPidFile=$PWD/slurmd-%n.pid
SlurmctldLogFile=$PWD/slurmctld.log
SlurmdLogFile=$PWD/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
EnforcePartLimits=ALL
KillWait=30
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=127.0.0.2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$first CPUs=8 RealMemory=8000 Gres=gpu:2
NodeName=127.0.0.3 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$second CPUs=8 RealMemory=8000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=2-0 PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=2-0 PriorityTier=2
CONF
    printf "Name=gpu File=%s\n" /dev/null /dev/zero > gres.conf  # every GPU needs its own device file
    dd if=/dev/urandom of=munge.key bs=1 count=1024 status=none
    mkdir -p state
    chown -R munge . && chmod 755 . && chmod 600 munge.key
}

start() {
    mkdir -p "$1" && cd "$1"
    configure
    export SLURM_CONF=$PWD/slurm.conf
    setpriv --reuid=munge --regid=munge --clear-groups munged --force --key-file="$PWD/munge.key" \
        --socket="$PWD/munge.socket" --pid-file="$PWD/munged.pid" --log-file="$PWD/munged.log" \
        --seed-file="$PWD/munge.seed"
    slurmctld
    slurmd -N 127.0.0.2
    slurmd -N 127.0.0.3
    for _ in {1..120}; do
        [[ $(sinfo --noheader --Node --partition=main --format=%T 2> sinfo.log) == $'idle\nidle' ]] && return
        sleep 0.5
    done
    echo "the cluster did not come up: $(cat sinfo.log; tail -n 20 slurmctld.log slurmd-*.log)" >&2
    stop "$1"
    return 1
}

stop() {
    cd "$1"
    local file pid
    for file in slurmd-*.pid slurmctld.pid munged.pid; do
        if [[ -e $file ]]; then
            pid=$(< "$file")
            kill "$pid" && tail --pid="$pid" -f /dev/null
        fi
    done
}

case ${1:-} in
    start | stop) "$1" "${2:?a folder}" ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
