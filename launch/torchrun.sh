#!/usr/bin/env bash
# Trains a recipe on every GPU of this host, or as one of several hosts. All arguments go to `sinkdlm train`:
#
#     launch/torchrun.sh smdm-34m-sink --out runs/x --set train.lr=1e-4
#     NPROC=2 launch/torchrun.sh ...                                      two ranks, on a CPU too
#     NNODES=2 RDZV=10.0.0.1:29400 ADDRESS=10.0.0.1 launch/torchrun.sh ...  on each of two hosts, with its own ADDRESS
#     NNODES=2:4 RDZV=... ADDRESS=... launch/torchrun.sh ...               on two to four hosts, which may come and go
#
# NPROC         ranks on this host; by default one a GPU
# NNODES        hosts, exactly or MIN:MAX; unset: this one alone
# RDZV          host:port where they meet: the same words on every host, and a port that is free on the one named
# ADDRESS       the name or address by which the other hosts reach this one
# MAX_RESTARTS  how often torchrun starts the ranks anew after one was lost (3)
# RDZV_ID, RDZV_CONF   torchrun's --rdzv-id and --rdzv-conf
# PYTHON        the interpreter (python)
#
# A signal ends every rank after its step with a saved state; the exit status is then 128 + its number, as without ranks.
set -euo pipefail

python=${PYTHON:-python}
if [[ -z ${NPROC:-} ]]; then
    NPROC=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    if ((NPROC == 0)); then
        echo "launch/torchrun.sh: no GPU here; say how many ranks: NPROC=2 launch/torchrun.sh ..." >&2
        exit 2
    fi
fi

# Ranks share the cores that this process may use. torchrun's own default is one thread a rank, with a warning.
if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(nproc)
    export OMP_NUM_THREADS=$((cores > NPROC ? cores / NPROC : 1))
fi

# After SIGTERM torchrun kills ranks that are not gone in 30 s. A long step and a large state may take more; who cannot wait that
# long (Slurm, at its limits) ends them by SIGKILL.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

options=(--nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-3}")
if [[ -z ${NNODES:-} ]]; then
    options+=(--standalone)
else
    : "${RDZV:?host:port where the hosts meet}" "${ADDRESS:?the name or address by which the other hosts reach this one}"
    # torchrun's agents keep the address of the ranks' store over restarts (torch 2.13: DynamicRendezvousHandler.next_rendezvous).
    # When the host that had it is lost, those that stay would look for it there. So each start has a store of its own, at rank 0.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # torch would find out which host is the one to meet at from what its name resolves to, which may be a loopback address.
    meets_here=$([[ ${RDZV%:*} == "$ADDRESS" ]] && echo 1 || echo 0)
    options+=(
        --nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$RDZV" --rdzv-id="${RDZV_ID:-sinkdlm}"
        --rdzv-conf="is_host=$meets_here${RDZV_CONF:+,$RDZV_CONF}" --local-addr="$ADDRESS"
    )
fi

# torchrun ends with status 1 whether it was stopped or failed. Slurm must know which, so this shell notes signals and hands them on;
# and torchrun has a process group of its own (set -m), so that a signal to the group of this one comes to it once.
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
((asked == 0)) || kill -TERM "$launcher" # it came before there was anybody to hand it to

status=0
wait "$launcher" || status=$?
while kill -0 "$launcher" 2>/dev/null; do # a trapped signal ends `wait`, not torchrun
    status=0
    wait "$launcher" || status=$?
done
exit $((asked && status ? asked : status))
