# Keeps one unit going as a job of Slurm. The lines above name its directory, on a disk that all nodes share. Slurm runs
# this on the first node; with the argument `node` it is the part of one node of several.
here="${homes[${SLURM_ARRAY_TASK_ID:-0}]}"
# Not SLURM_JOB_ID: of one task of an array that is the number of the whole array, and all would be requeued.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
job="${job:-$SLURM_JOB_ID}"
exec {clock}<> <(:) # a pipe in which nothing ever comes: to read from it is to wait, without a process for each time
is_leaving="" # SIGTERM has come: by Slurm, or passed on by the first node
trap 'is_leaving=yes' TERM

log() { printf '%(%FT%TZ)T atoll: %s\n' -1 "$*"; }

# What is known of the unit when Slurm has forgotten the job. A reader finds the old one or the new one. A disk that is
# full is waited for, for a quarter of an hour, but not when Slurm waits for the job to leave.
write_state() {
    local try
    log "$1: $2"
    for ((try = 0; try < 900; try++)); do
        if printf '%s\n' "state=$1" "cause=$2" "job=$job" "starts=$starts" "failures=$failures" >"$here/state.new" &&
            mv "$here/state.new" "$here/state"; then return 0; fi
        if [ -n "$is_leaving" ] || [ -e "$here/stopped" ]; then break; fi
        if [ "$try" -eq 0 ]; then log "this cannot be written down: is the disk full?"; fi
        read -r -t 1 -u "$clock"
    done
    return 1
}

# Of the starts before. Where that is not whole, each start of this job counts as a failure: a count that begins anew
# would have no end.
read_state() {
    starts=$(sed -n 's/^starts=//p' "$here/state") failures=$(sed -n 's/^failures=//p' "$here/state")
    if ! [[ "$starts $failures" =~ ^[0-9]+\ [0-9]+$ ]]; then
        starts=$(ls "$here" | grep -c '^start-') failures=${SLURM_RESTART_COUNT:-0}
    fi
}

# Of several nodes: all parts.
have_all_parts_left() { [ "$(cat "$here"/left.* 2>/dev/null | wc -l)" -eq "$nodes" ]; }

# What the unit has started and is still there, also in sessions of its own, as ranks of torchrun are.
find_leftovers() { grep -lzsxF "ATOLL_UNIT_MARK=$mark" /proc/[0-9]*/environ | cut -d / -f 3; }

# Its syncer has ended well, here or by another launcher: whoever joins now would wait for ever.
is_over() {
    [ -n "$syncer" ] || return 1
    grep -qs '^state=ended$' "$syncer/slurm/state" || grep -qs '"state": "ended"' "$syncer/supervisor.json" "$syncer/ray.json"
}

# Starts "$@" in a process group of its own and sets `code` to its exit code when nothing of it is left. Nothing here is
# interrupted by a signal: the trap only sets a word that the loop reads, so a signal is never missed, and the exit code
# is asked for once, when the process is known to be gone.
run_supervised() {
    local child deadline="" orphans looks=0
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        if [ "$with_syncer" = yes ] && ((looks++ % 25 == 0)) && is_over; then is_leaving=yes; fi
        if [ -z "$deadline" ] && [ -n "$is_leaving" ]; then
            deadline=$((SECONDS + notice))
            forward_signal "$child"
        elif [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
            log "still there after $notice s: killed"
            kill -KILL -- "-$child" 2>/dev/null
            break
        elif [ -n "$deadline" ] && [ "$part" = nodes ] && have_all_parts_left; then
            # Slurm, when it ends a job by itself, may forget to tell its srun that the tasks are gone.
            kill -KILL -- "-$child" 2>/dev/null
            break
        fi
        read -r -t 0.2 -u "$clock"
    done
    trap '' TERM # what comes now is asked of Slurm, and `wait` would answer with the signal instead of the exit code
    wait "$child"
    code=$?
    # Whatever has stayed was told by nobody, and the next incarnation must not meet it.
    deadline=${deadline:-$((SECONDS + notice))}
    orphans=$(find_leftovers)
    if [ -n "$orphans" ]; then kill -TERM $orphans 2>/dev/null; fi
    while orphans=$(find_leftovers) && [ -n "$orphans" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then kill -KILL $orphans 2>/dev/null; fi
        if [ "$SECONDS" -ge $((deadline + 30)) ]; then break; fi # it waits for a disk or a device; Slurm drains the node
        read -r -t 0.2 -u "$clock"
    done
}

forward_signal() {
    if [ "$part" = nodes ]; then
        # The parts of all nodes; srun itself would kill them at once. Where Slurm ends the job this hangs: it has told them.
        timeout 60 scancel --signal=TERM "$job" </dev/null &
    else
        kill -TERM -- "-$1" 2>/dev/null # ranks and the torchrun above them: each may be the one that has to know
    fi
}

# What torchrun reads: the same command is right on one node and on many. PET_ are the defaults of its options.
set_rendezvous() {
    export NNODES="$nodes" NODE_RANK="${SLURM_NODEID:-0}" MASTER_ADDR=127.0.0.1
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two islands may share a node
    if [ "$nodes" -gt 1 ]; then
        local first address
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        address=$(scontrol show node -o "$first" | grep -o ' NodeAddr=[^ ]*')
        MASTER_ADDR="${address#*=}"
    fi
    export PET_NNODES="$NNODES" PET_NODE_RANK="$NODE_RANK" PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT"
}

# In a process of its own: nothing but the command and what it starts has the secrets.
unit() {
    exec {clock}<&-
    set_rendezvous
    export ATOLL_UNIT_MARK="$mark"
    . "$here/environment"
    if [ -e "$here/secrets" ]; then . "$here/secrets"; fi
    exec "${command[@]}"
}

parts_of_nodes() {
    exec {clock}<&-
    exec srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --label --kill-on-bad-exit=1 bash "$here/job.sh" node
}

# Also while the controller is being restarted, for a quarter of an hour.
requeue() {
    local try
    for ((try = 0; try < 180; try++)); do
        if scontrol requeue "$job"; then exit 0; fi
        read -r -t 5 -u "$clock"
    done
    write_state failed "$cause; scontrol requeue was refused"
    exit 1
}

# Who ends the job: Slurm has queued it again already, or somebody wants it gone, or nobody yet.
find_canceller() {
    local shown state restarts_now
    shown=$(scontrol show job -o "$job")
    state=$(grep -o ' JobState=[A-Z_]*' <<<"$shown")
    restarts_now=$(grep -o ' Restarts=[0-9]*' <<<"$shown")
    if [ "${restarts_now#*=}" ] && [ "${restarts_now#*=}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then
        echo queue
    elif [ "${state#*=}" = COMPLETING ] || [ "${state#*=}" = CANCELLED ]; then
        echo cancel
    else
        echo nobody
    fi
}

cd "${here%/slurm}" || exit 1 # sbatch knows one directory for all tasks of an array
. "$here/settings" # command, nodes, notice, restarts, setup, syncer, with_syncer
mark="$here job $SLURM_JOB_ID start ${SLURM_RESTART_COUNT:-0} node ${SLURM_NODEID:-0}"
part=whole
if [ "${1:-}" = node ]; then
    run_supervised unit
    echo "$code" >"$here/left.${SLURM_NODEID:-0}"
    exit "$code"
fi

read_state
if [ -e "$here/stopped" ]; then
    write_state stopped "before it was started"
    exit 0
elif is_over; then
    write_state stopped "the run is over: its syncer has ended"
    exit 0
fi
starts=$((starts + 1))
exec >>"$here/start-$starts.log" 2>&1
write_state running "on ${SLURM_JOB_NODELIST:-this machine}"
eval "$setup"
if [ "$nodes" -gt 1 ]; then
    part=nodes notice=$((notice + 5)) # each node's part keeps to the notice; this is for one that does not answer
    rm -f "$here"/left.*
    run_supervised parts_of_nodes
else
    run_supervised unit
fi

cause="left with exit code $code"
# Slurm is asked, whether or not its signal was seen: it may have come to the command first, and here too late.
ending=$(find_canceller)
if [ -e "$here/stopped" ]; then
    write_state stopped "$cause"
    exit 0
elif is_over && { [ "$code" -ne 0 ] || [ -n "$is_leaving" ]; }; then
    write_state stopped "the run is over: its syncer has ended; $cause"
    exit 0
elif [ "$ending" = cancel ]; then
    write_state stopped "cancelled; $cause"
    exit 0
elif [ "$ending" = queue ]; then
    write_state waiting "queued again by Slurm; $cause"
    exit 0
elif [ -n "$is_leaving" ]; then # a notice: of pre-emption, or of the time limit
    write_state waiting "its time here was over; $cause"
    requeue
elif [ "$code" -eq 0 ] && { [ "$with_syncer" = no ] || is_over; }; then # a shard that leaves a run is brought back
    write_state ended "$cause"
    exit 0
fi
failures=$((failures + 1))
if [ "$failures" -gt "$restarts" ]; then
    write_state failed "$cause, and of $restarts restarts none is left"
    exit "$code"
fi
if write_state waiting "$cause (failure $failures, restarts $restarts)"; then requeue; fi # uncounted, it would be for ever
exit 1
