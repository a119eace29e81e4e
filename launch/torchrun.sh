#!/usr/bin/env bash
# Train a recipe on every GPU of this host, or as one of several hosts. All arguments go to `sinkdlm train`:
#
#     launch/torchrun.sh smdm-34m-sink --out runs/x --set train.lr=1e-4
#     NPROC=2 launch/torchrun.sh ...                                      two ranks, on a CPU too
#     NNODES=2 RDZV=10.0.0.1:29400 ADDRESS=10.0.0.1 launch/torchrun.sh ...  on each of two hosts, with its own ADDRESS
#     NNODES=2:4 RDZV=... ADDRESS=... launch/torchrun.sh ...               on two to four hosts, which may join and leave
#
# NPROC         ranks on this host; default: one for each GPU
# NNODES        hosts, as N or MIN:MAX; unset: this host alone
# RDZV          host:port of the rendezvous, the same on every host; the port must be free on the host that it names
# ADDRESS       name or address by which the other hosts reach this one
# MAX_RESTARTS  how often torchrun restarts the ranks after one was lost (3)
# RDZV_ID, RDZV_CONF   torchrun's --rdzv-id and --rdzv-conf
# PYTHON        the interpreter (python)
#
# On SIGTERM or Ctrl-C every rank finishes its step, saves and ends; the exit status is then 128 + the signal's number.
set -euo pipefail

python=${PYTHON:-python}
if [[ -z ${NPROC:-} ]]; then
    NPROC=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    if ((NPROC == 0)); then
        echo "launch/torchrun.sh: no GPU here; say how many ranks: NPROC=2 launch/torchrun.sh ..." >&2
        exit 2
    fi
fi

# Share the cores of this process among the ranks. torchrun's default is one thread a rank, with a warning.
if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(nproc)
    export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi

# torchrun kills ranks 30 s after SIGTERM by default. A long step with a large state takes more. Slurm has limits of its own, and
# ends them by SIGKILL.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

options=(--nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-3}")
if [[ -z ${NNODES:-} ]]; then
    options+=(--standalone)
else
    : "${RDZV:?host:port where the hosts meet}" "${ADDRESS:?the name or address by which the other hosts reach this one}"
    # torchrun keeps the address of the ranks' store over restarts (torch 2.13: DynamicRendezvousHandler.next_rendezvous), and would
    # look for it on a host that is lost. With this, each start has its own store, at rank 0.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # Tell torch whether this host is the rendezvous: it would resolve the name, which may give a loopback address.
    meets_here=$([[ ${RDZV%:*} == "$ADDRESS" ]] && echo 1 || echo 0)
    options+=(
        --nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$RDZV" --rdzv-id="${RDZV_ID:-sinkdlm}"
        --rdzv-conf="is_host=$meets_here${RDZV_CONF:+,$RDZV_CONF}" --local-addr="$ADDRESS"
    )
fi

# torchrun exits with 1 whether it was stopped or failed, and Slurm must know which. So this shell notes signals and forwards them.
# set -m gives torchrun its own process group, so that a signal to this shell's group reaches it once.
set -m
launcher=
asked=0
hand_on() {
    asked=$2
    [[ -z $launcher ]] || kill -"$1" "$launcher" 2>/dev/null || true
}
trap 'hand_on TERM 143' TERM
trap 'hand_on INT 130' INT
trap 'hand_on TERM 129' HUP # a closed terminal
"$python" -m torch.distributed.run "${options[@]}" -m sinkdlm train "$@" &
launcher=$!
((asked == 0)) || kill -TERM "$launcher" # the signal came before torchrun had started

status=0
wait "$launcher" || status=$?
while kill -0 "$launcher" 2>/dev/null; do # a trapped signal ends `wait`, not torchrun
    status=0
    wait "$launcher" || status=$?
done
exit $((asked && status ? asked : status))
