# Runs one unit as a Slurm job. The lines above name its directory, on a disk that all nodes share. Slurm runs this
# script on the first node. With the argument `node` it runs the part of one node of several.
here="${homes[${SLURM_ARRAY_TASK_ID:-0}]}"
# Not SLURM_JOB_ID: in an array it may be the number of the whole array, and all tasks would be requeued.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
job="${job:-$SLURM_JOB_ID}"
exec {clock}<> <(:) # an empty pipe: reading from it with a timeout waits without starting a process
is_leaving="" # set when SIGTERM arrives, from Slurm or from the first node
trap 'is_leaving=yes' TERM

log() { printf '%(%FT%TZ)T atoll: %s\n' -1 "$*"; }

# Stores the state of the unit for the time when Slurm has forgotten the job. The file is replaced as a whole. On a full
# disk it retries for 15 minutes, but not while Slurm waits for the job to exit.
write_state() {
    local try
    log "$1: $2"
    for ((try = 0; try < 900; try++)); do
        if printf '%s\n' "state=$1" "cause=$2" "job=$job" "starts=$starts" "failures=$failures" >"$here/state.new" &&
            mv "$here/state.new" "$here/state"; then return 0; fi
        if [ -n "$is_leaving" ] || [ -e "$here/stopped" ]; then break; fi
        if [ "$try" -eq 0 ]; then log "cannot write the state file: is the disk full?"; fi
        read -r -t 1 -u "$clock"
    done
    return 1
}

# Reads the counts of earlier starts. If the file is damaged, each start of this job counts as a failure: a count that
# restarts from zero would never reach the limit.
read_state() {
    starts=$(sed -n 's/^starts=//p' "$here/state") failures=$(sed -n 's/^failures=//p' "$here/state")
    if ! [[ "$starts $failures" =~ ^[0-9]+\ [0-9]+$ ]]; then
        starts=$(ls "$here" | grep -c '^start-') failures=${SLURM_RESTART_COUNT:-0}
    fi
}

# True when the parts of all nodes have exited.
have_all_parts_left() { [ "$(cat "$here"/left.* 2>/dev/null | wc -l)" -eq "$nodes" ]; }

# Lists processes that the unit started and that still run, also in other sessions, as ranks of torchrun do.
find_leftovers() { grep -lzsxF "ATOLL_UNIT_MARK=$mark" /proc/[0-9]*/environ | cut -d / -f 3; }

# True when the syncer has finished, under any launcher. A learner that joined now would wait forever.
is_over() {
    [ -n "$syncer" ] || return 1
    grep -qs '^state=ended$' "$syncer/slurm/state" || grep -qs '"state": "ended"' "$syncer/supervisor.json" "$syncer/ray.json"
}

# Starts "$@" in its own process group. Sets `code` to its exit code after all its processes have exited. A signal
# interrupts nothing here: the trap sets a variable that the loop reads, so no signal is missed. `wait` is called once,
# after the process has exited.
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
            # When Slurm ends a job, it may not notify srun that the tasks have exited.
            kill -KILL -- "-$child" 2>/dev/null
            break
        fi
        read -r -t 0.2 -u "$clock"
    done
    trap '' TERM # a signal from here on would make `wait` return the signal instead of the exit code
    wait "$child"
    code=$?
    # Processes that are left have received no signal, and must not run next to the next incarnation.
    deadline=${deadline:-$((SECONDS + notice))}
    orphans=$(find_leftovers)
    if [ -n "$orphans" ]; then kill -TERM $orphans 2>/dev/null; fi
    while orphans=$(find_leftovers) && [ -n "$orphans" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then kill -KILL $orphans 2>/dev/null; fi
        if [ "$SECONDS" -ge $((deadline + 30)) ]; then break; fi # stuck on a disk or a device; Slurm drains the node
        read -r -t 0.2 -u "$clock"
    done
}

forward_signal() {
    if [ "$part" = nodes ]; then
        # Signal the parts of all nodes; srun would kill them at once. If Slurm itself ends the job this hangs, but then
        # Slurm has sent the signal.
        timeout 60 scancel --signal=TERM "$job" </dev/null &
    else
        kill -TERM -- "-$1" 2>/dev/null # ranks and torchrun: any of them may be the one that handles it
    fi
}

# Sets what torchrun reads, so that one command works on one node and on many. PET_ variables are option defaults.
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

# Runs in a subshell: only the command and its children have the secrets.
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

# Retries for 15 minutes, for a controller that is being restarted.
requeue() {
    local try
    for ((try = 0; try < 180; try++)); do
        if scontrol requeue "$job"; then exit 0; fi
        read -r -t 5 -u "$clock"
    done
    write_state failed "$cause; scontrol requeue was refused"
    exit 1
}

# Prints what ends the job: `queue` (Slurm has requeued it), `cancel` (a user has cancelled it) or `none`.
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
        echo none
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
    part=nodes notice=$((notice + 5)) # each part observes the notice itself; the rest is for a part that hangs
    rm -f "$here"/left.*
    run_supervised parts_of_nodes
else
    run_supervised unit
fi

cause="left with exit code $code"
# Query Slurm even if no signal was seen: the command may have received it before this script.
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
    write_state waiting "requeued by Slurm; $cause"
    exit 0
elif [ -n "$is_leaving" ]; then # preemption or the time limit
    write_state waiting "preempted or out of time; $cause"
    requeue
elif [ "$code" -eq 0 ] && { [ "$with_syncer" = no ] || is_over; }; then # a shard that leaves a run is restarted
    write_state ended "$cause"
    exit 0
fi
failures=$((failures + 1))
if [ "$failures" -gt "$restarts" ]; then
    write_state failed "$cause, and all $restarts restarts are used"
    exit "$code"
fi
if write_state waiting "$cause (failure $failures, restarts $restarts)"; then requeue; fi # an uncounted failure would repeat forever
exit 1
