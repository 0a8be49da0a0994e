#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A run that is killed while it writes the token cache, a checkpoint, the link to the best one,
# while it removes older ones, while it exports; at random moments, too; and one whose disk is full.
# An export that is killed at any call. A disk that is slow, which is said.
# Every time what is there is whole, and what comes out in the end is, bit for bit, what the run
# that was left alone made.
# Usage: disk-faults.sh BUILD_FOLDER /PATH/OF/disk-fault.so [EVERY [TIMES [SEED]]]: every EVERYth call
# that changes files, TIMES random moments, TIMES sizes of the disk
# shellcheck source=tests/cli/lib.sh
. "$(dirname "$0")/lib.sh"

fault=$2
every=${3:-67}
times=${4:-3}
RANDOM=${5:-1}

write_model model.yaml
cp "$source_root/tests/cli/bytes-tokenizer.json" tokenizer.json
awk 'BEGIN { for (i = 0; i < 4000; i++) printf "{\"text\": \"Line %d says %d, and then some more of it.\"}\n", i, (i * 7919) % 1000 }' >text.jsonl
write_run run.yaml
sed -i 's/loader: text/loader: jsonl\n  tokenizer: tokenizer.json/; s/files: text.txt/files: text.jsonl/
    s/max_steps: 12/max_steps: 6/; s/eval_steps: 5/eval_steps: 2/
    s/save_steps: 4/save_steps: 1\n  save_total_limit: 2\n  save_best: true\n  export: true/' run.yaml
run=(train run.yaml)

# faulty VARIABLE=VALUE: the run, with a disk that fails so; its exit code.
faulty() {
    (
        export "$1" LD_PRELOAD="$fault"
        exec "$megatrain" "${run[@]}" >out 2>&1 </dev/null
    )
} 2>/dev/null

# What is there now: every checkpoint is complete, the link to the best one leads to one, and a
# model folder that has its name is whole.
check_folder() {
    local step
    for step in run/checkpoints/step-*; do
        [[ -e $step ]] || continue
        check "$1: $step is complete" test -s "$step/state.json" -a -s "$step/model.safetensors" -a \
            -s "$step/optimizer.safetensors" -a -s "$step/config.json"
    done
    [[ ! -L run/checkpoints/best ]] || check "$1: the best is there" test -s run/checkpoints/best/state.json
    [[ ! -e run/model ]] || check "$1: the export is whole" diff -rq whole/model run/model
}

# The run goes on to its end, and has made what the one that was left alone made. Where it was killed
# between its last save and the removal of an older checkpoint, that one is still there.
check_end() {
    local step
    expect 0 -- "${run[@]}"
    for step in whole/checkpoints/*; do
        check "$1: ${step#*/}" diff -rq "$step" "run/${step#*/}"
    done
    check "$1: the best one" test "$(readlink whole/checkpoints/best)" = "$(readlink run/checkpoints/best)"
    check "$1: at most one more" test "$(ls -A run/checkpoints | wc -l)" -le $(($(ls -A whole/checkpoints | wc -l) + 1))
    check "$1: the export" diff -rq whole/model run/model
    check "$1: the metrics" diff <(timeless whole/metrics.jsonl) <(timeless run/metrics.jsonl)
    check "$1: nothing is left over" bash -c \
        '! compgen -G "run/.tmp*" && ! compgen -G "run/*/.tmp*" && ! compgen -G "run/*tmp-export"'
}

milliseconds() { date +%s%3N; }

began=$(milliseconds)
faulty "DISK_COUNT=$PWD/count"
whole=$(($(milliseconds) - began))
check 'the run that is left alone' grep -q 'finished: step 6 of 6' out
mv run whole
read -r calls bytes <count
check "calls that change files: $calls, bytes: $bytes" test "$calls" -gt 100 -a "$bytes" -gt 1000000

# ---- killed at every so many calls ---------------------------------------------------------------

for ((n = 1 + RANDOM % every; n <= calls; n += every)); do
    rm -rf run cache
    faulty DISK_KILL_AT=$n
    check "killed at call $n" test $? = 137
    check_folder "killed at call $n"
    check_end "killed at call $n"
done

# ---- killed at random moments, again and again ---------------------------------------------------

rm -rf run cache
killed=0
for ((round = 0; killed < times && round < 20 * times; round++)); do
    ((round % 3)) || rm -rf cache # the tokens have to be made again
    "$megatrain" "${run[@]}" >out 2>&1 </dev/null &
    pid=$!
    sleep "$(printf '0.%03d' $((RANDOM % (whole > 999 ? 999 : whole))))"
    kill -KILL $pid 2>/dev/null
    wait $pid 2>/dev/null
    rc=$?
    case $rc in
        137)
            killed=$((killed + 1))
            check_folder "kill $killed"
            ;;
        0)
            check_end 'finished between kills'
            rm -rf run
            ;;
        *)
            fail "round $round: exit code $rc"
            sed 's/^/    /' out >&2
            ;;
    esac
done
check "$times kills" test $killed = "$times"
check_end 'killed at random moments'

# ---- metrics that cannot be written ----------------------------------------------------------------

rm -rf run
faulty DISK_REFUSES=metrics.jsonl
check 'without metrics: exit code 0' test $? = 0
check 'without metrics: the run is the same' diff -rq whole/checkpoints run/checkpoints
check 'without metrics: it is exported' diff -rq whole/model run/model
check 'without metrics: says so once' test "$(grep -c 'warning: run/metrics.jsonl: cannot write: No space left on device' out)" = 1
check 'without metrics: says what is lost' grep -q "warning: run/metrics.jsonl: .*: $(wc -l <whole/metrics.jsonl) lines are lost" out
check 'without metrics: nothing half written' test ! -s run/metrics.jsonl

# The folder of a run is removed while it trains: it is there again when the run is saved.
rm -rf run
"$megatrain" "${run[@]}" train.max_steps=10000000 checkpoint.save_steps=0 checkpoint.save_best=false >out 2>&1 </dev/null &
pid=$!
until [[ -s run/metrics.jsonl ]] || ! kill -0 $pid; do sleep 0.05; done
mv run removed # at once: else a file made anew may be in the way
rm -rf removed
until grep -q 'run/metrics.jsonl: cannot write: No such file' out || ! kill -0 $pid; do sleep 0.05; done
kill -TERM $pid
wait $pid
check 'a folder that was removed: exit code 75' test $? = 75
check 'a folder that was removed: the checkpoint' test -s run/checkpoints/step-*/state.json
check 'a folder that was removed: lines that waited' test "$(tail -n 1 run/metrics.jsonl | sed 's/.*"step": \([0-9]*\),.*/\1/')" = \
    "$(echo run/checkpoints/step-* | sed 's/.*step-0*//')"

# ---- a disk that will be full --------------------------------------------------------------------

# will_save N KEY=VALUE...: as many checkpoints are said not to fit, at most, and no more come to be.
will_save() {
    local n=$1 what=checkpoints
    shift
    ((n > 1)) || what=checkpoint
    rm -rf run
    LD_PRELOAD=$fault DISK_FREE=1 expect 1 "run/checkpoints: $n $what of " -- \
        "${run[@]}" checkpoint.export=false train.max_steps=12 "$@"
    rm -rf run
    LD_PRELOAD=$fault DISK_FREE=1000000000 expect 0 'finished' -- \
        "${run[@]}" checkpoint.export=false train.max_steps=12 "$@"
    check "$*: nothing is said where there is room" bash -c '! grep -q "will not fit" out'
    check "$*: no more" test "$(find run/checkpoints -name 'step-*' | wc -l)" -le "$n"
}
will_save 3 train.eval_steps=5 checkpoint.save_best=false checkpoint.save_steps=4 checkpoint.save_total_limit=0
will_save 5 train.eval_steps=5 checkpoint.save_steps=4 checkpoint.save_total_limit=0
will_save 4 train.eval_steps=5 checkpoint.save_steps=4
will_save 3 train.eval_steps=4 checkpoint.save_steps=4 checkpoint.save_total_limit=0
will_save 4 train.eval_steps=4 checkpoint.save_steps=6 checkpoint.save_total_limit=0
will_save 3 train.eval_steps=5 checkpoint.save_steps=0 checkpoint.save_total_limit=0
will_save 1 train.eval_steps=0 checkpoint.save_steps=0

# ---- the disk is full ----------------------------------------------------------------------------

for ((n = bytes / (2 * times + 1); n < bytes; n += bytes / times + 1)); do
    rm -rf run cache
    faulty DISK_FULL_AFTER=$n
    check "full after $n bytes: exit code 1" test $? = 1
    check "full after $n bytes: says why, and what to do" grep -q 'error: .*No space left on device.*free' out
    [[ ! -e run/checkpoints/step-000001 || -e run/model.tmp-export ]] || grep -q 'cannot be exported' out ||
        check "full after $n bytes: says what is there" grep -q 'goes on from run/checkpoints/step-' out
    check_folder "full after $n bytes"
    check_end "full after $n bytes"
done

# ---- an export is killed at every call -----------------------------------------------------------

run=(export whole/checkpoints/step-000006 -o exported)
faulty "DISK_COUNT=$PWD/count"
mv exported exported-whole
read -r calls bytes <count
check "calls of an export: $calls" test "$calls" -gt 8
for ((n = 1; n <= calls; n++)); do
    faulty DISK_KILL_AT=$n
    check "an export killed at call $n" test $? = 137
    [[ ! -e exported ]] || check "killed at call $n: it is whole" diff -r exported-whole exported
    rm -rf exported
    expect 0 -- "${run[@]}"
    check "after the kill at call $n: the same" diff -r exported-whole exported
    check "after the kill at call $n: nothing is left over" bash -c '! compgen -G "*tmp-export"'
    rm -rf exported
done

# ---- a slow disk ---------------------------------------------------------------------------------

run=(train run.yaml output_dir=slow train.max_steps=3 train.warmup_steps=0 train.eval_steps=0 checkpoint.save_best=false checkpoint.export=false)
faulty DISK_SLOW=300
check 'a slow disk: saved' grep -q 'step 3: saved slow/checkpoints/step-000003 in ' out
check 'a slow disk: how much, and how fast' grep -qE 'saved .* in [0-9.]+s: [0-9.]+ [KM]iB at [0-9.]+ [KM]?i?B/s$' out
check 'a slow disk: what to do' grep -qE 'saves take [0-9]+% of the time: .* checkpoint.save_steps=[125]0*0 they would take' out
check 'a slow disk: said once' test "$(grep -c 'saves take' out)" = 1
done_testing
