# Keeps one unit going as a job of Slurm. The lines above name its directory, on a disk that all nodes share. Slurm runs
# this on the first node; with the argument `node` it is the part of one node of several.
here="${homes[${SLURM_ARRAY_TASK_ID:-0}]}"
# Not SLURM_JOB_ID: of one task of an array that is the number of the whole array, and all would be requeued.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
job="${job:-$SLURM_JOB_ID}"
exec {clock}<> <(:) # a pipe in which nothing ever comes: to read from it is to wait, without a process for each time
told="" # SIGTERM has come: by Slurm, or passed on by the first node
trap 'told=yes' TERM

say() { printf '%(%FT%TZ)T atoll: %s\n' -1 "$*"; }

# What is known of the unit when Slurm has forgotten the job. A reader finds the old one or the new one. A disk that is
# full is waited for, for a quarter of an hour, but not when Slurm waits for the job to leave.
note() {
    local try
    say "$1: $2"
    for ((try = 0; try < 900; try++)); do
        if printf '%s\n' "standing=$1" "why=$2" "job=$job" "starts=$starts" "failures=$failures" >"$here/state.new" &&
            mv "$here/state.new" "$here/state"; then return 0; fi
        if [ -n "$told" ] || [ -e "$here/stopped" ]; then break; fi
        if [ "$try" -eq 0 ]; then say "this cannot be written down: is the disk full?"; fi
        read -r -t 1 -u "$clock"
    done
    return 1
}

# Of the starts before. Where that is not whole, each start of this job counts as a failure: a count that begins anew
# would have no end.
recall() {
    starts=$(sed -n 's/^starts=//p' "$here/state") failures=$(sed -n 's/^failures=//p' "$here/state")
    if ! [[ "$starts $failures" =~ ^[0-9]+\ [0-9]+$ ]]; then
        starts=$(ls "$here" | grep -c '^start-') failures=${SLURM_RESTART_COUNT:-0}
    fi
}

# Of several nodes: all parts.
have_left() { [ "$(cat "$here"/left.* 2>/dev/null | wc -l)" -eq "$nodes" ]; }

# What the unit has started and is still there, also in sessions of its own, as ranks of torchrun are.
left_behind() { grep -lzsxF "ATOLL_KEPT_IN=$mark" /proc/[0-9]*/environ | cut -d / -f 3; }

# Its syncer has ended well, here or by another engine: whoever joins now would wait for ever.
is_over() {
    [ -n "$syncer" ] || return 1
    grep -qs '^standing=ended$' "$syncer/slurm/state" || grep -qs '"standing": "ended"' "$syncer/keeper.json" "$syncer/ray.json"
}

# Starts "$@" in a process group of its own and sets `code` to its exit code when nothing of it is left. Nothing here is
# interrupted by a signal: the trap only sets a word that the loop reads, so a signal is never missed, and the exit code
# is asked for once, when the process is known to be gone.
keep() {
    local child deadline="" orphans looks=0
    set -m
    "$@" </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do
        if [ "$with_syncer" = yes ] && ((looks++ % 25 == 0)) && is_over; then told=yes; fi
        if [ -z "$deadline" ] && [ -n "$told" ]; then
            deadline=$((SECONDS + notice))
            pass_on "$child"
        elif [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
            say "still there after $notice s: killed"
            kill -KILL -- "-$child" 2>/dev/null
            break
        elif [ -n "$deadline" ] && [ "$part" = nodes ] && have_left; then
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
    orphans=$(left_behind)
    if [ -n "$orphans" ]; then kill -TERM $orphans 2>/dev/null; fi
    while orphans=$(left_behind) && [ -n "$orphans" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then kill -KILL $orphans 2>/dev/null; fi
        if [ "$SECONDS" -ge $((deadline + 30)) ]; then break; fi # it waits for a disk or a device; Slurm drains the node
        read -r -t 0.2 -u "$clock"
    done
}

pass_on() {
    if [ "$part" = nodes ]; then
        # The parts of all nodes; srun itself would kill them at once. Where Slurm ends the job this hangs: it has told them.
        timeout 60 scancel --signal=TERM "$job" </dev/null &
    else
        kill -TERM -- "-$1" 2>/dev/null # ranks and the torchrun above them: each may be the one that has to know
    fi
}

# What torchrun reads: the same command is right on one node and on many. PET_ are the defaults of its options.
meet() {
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
    meet
    export ATOLL_KEPT_IN="$mark"
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
    note failed "$why; scontrol requeue was refused"
    exit 1
}

# Who ends the job: Slurm has queued it again already, or somebody wants it gone, or nobody yet.
ended_by() {
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
    keep unit
    echo "$code" >"$here/left.${SLURM_NODEID:-0}"
    exit "$code"
fi

recall
if [ -e "$here/stopped" ]; then
    note stopped "before it was started"
    exit 0
elif is_over; then
    note stopped "the run is over: its syncer has ended"
    exit 0
fi
starts=$((starts + 1))
exec >>"$here/start-$starts.log" 2>&1
note running "on ${SLURM_JOB_NODELIST:-this machine}"
eval "$setup"
if [ "$nodes" -gt 1 ]; then
    part=nodes notice=$((notice + 5)) # each node's part keeps to the notice; this is for one that does not answer
    rm -f "$here"/left.*
    keep parts_of_nodes
else
    keep unit
fi

why="left with exit code $code"
# Slurm is asked, whether or not its signal was seen: it may have come to the command first, and here too late.
ending=$(ended_by)
if [ -e "$here/stopped" ]; then
    note stopped "$why"
    exit 0
elif is_over && { [ "$code" -ne 0 ] || [ -n "$told" ]; }; then
    note stopped "the run is over: its syncer has ended; $why"
    exit 0
elif [ "$ending" = cancel ]; then
    note stopped "cancelled; $why"
    exit 0
elif [ "$ending" = queue ]; then
    note waiting "queued again by Slurm; $why"
    exit 0
elif [ -n "$told" ]; then # a notice: of pre-emption, or of the time limit
    note waiting "its time here was over; $why"
    requeue
elif [ "$code" -eq 0 ] && { [ "$with_syncer" = no ] || is_over; }; then # a shard that leaves a run is brought back
    note ended "$why"
    exit 0
fi
failures=$((failures + 1))
if [ "$failures" -gt "$restarts" ]; then
    note failed "$why, and of $restarts restarts none is left"
    exit "$code"
fi
if note waiting "$why (failure $failures, restarts $restarts)"; then requeue; fi # uncounted, it would be for ever
exit 1
