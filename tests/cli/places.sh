#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Places that cannot be written or are not there, disks and memory that do not suffice, streams that
# are closed: what is said, and that earlier checkpoints stay good.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "$0")/lib.sh"

write_trained_run

# Nobody can make a folder below a file; a folder without write permission does not stop root.
if ((EUID == 0)); then
    : >plain_file
    readonly_folder=$PWD/plain_file/run
else
    mkdir sealed && chmod 555 sealed
    readonly_folder=$PWD/sealed/run
fi
with "s#output_dir: run#output_dir: $readonly_folder#"
expect 1 'bad.yaml:4:' "${readonly_folder%/run}" 'name a folder that you can write to' -- train bad.yaml

expect 1 'No setting but a larger memory.gpu makes it fit' ' of 4.00 KiB (' -- plan run.yaml memory.gpu=4KiB
expect 1 'No setting but a larger memory.host makes it fit' -- plan run.yaml memory.host=4KiB
expect 1 'run.yaml:4:' 'step-000004' 'name another folder' -- train run.yaml checkpoint.resume_from_checkpoint=none
expect 1 'seed' 'set seed: 3' -- train run.yaml seed=4
# What is resumed from, or evaluated, is looked for before the data is.
for from in nowhere run text.txt; do
    expect 1 "'checkpoint.resume_from_checkpoint' names '$from', which " \
        'run/checkpoints holds step-000004: name the path of a checkpoint, auto for the newest' \
        -- train run.yaml checkpoint.resume_from_checkpoint=$from data.files=missing.txt
done
expect 1 '--checkpoint nowhere: there is no such file or folder below the working directory' \
    'run/checkpoints holds step-000004: name the path of' -- eval run.yaml --checkpoint nowhere data.files=missing.txt
expect 1 '--checkpoint /no/where: there is no such file or folder; new/checkpoints holds no complete checkpoint' \
    -- eval run.yaml output_dir=new --checkpoint /no/where
for command in 'eval run.yaml --checkpoint' 'export -o x' inspect generate; do
    # shellcheck disable=SC2086
    expect 1 "is the folder of a run's checkpoints; name the run folder" 'run/checkpoints holds step-000004' \
        -- $command run/checkpoints/
done

# Other data than that of the checkpoint would be trained on from the middle, unnoticed.
head -c 9000 text.txt >less.txt
expect 1 'data' 'go on with the same data' -- train run.yaml data.files=less.txt
expect 1 'data' 'go on with the same data' -- train run.yaml data.max_seq_len=32

# A model that is another one than it was, in keys that no shape shows, too.
cp model.yaml edited.yaml
expect 0 'finished' -- train run.yaml output_dir=edited model=edited.yaml train.max_steps=4
rm -rf changed && cp -r edited changed
go_on=(train run.yaml output_dir=changed model=edited.yaml train.max_steps=5)
sed 's/^hidden_size: 32/# as before\nhidden_size: 32.0/; $a bos_token_id: 7' model.yaml >edited.yaml
expect 0 'resuming from' 'finished: step 5 of 5' -- "${go_on[@]}"
rm -rf changed && cp -r edited changed
sed -e 's/num_key_value_heads: 2/num_key_value_heads: 4/' -e '$a rms_norm_eps: 1.0e-3' model.yaml >edited.yaml
expect 1 'cannot resume: ' "edited.yaml:7:1: 'num_key_value_heads' is 4, but was 2; 'rms_norm_eps' is 1.0e-3, but was not given" \
    'when changed/checkpoints/step-000004 was saved; put back what was' -- "${go_on[@]}"
expect 1 "'rms_norm_eps' is 1.0e-3" -- eval "${go_on[@]:1}"
expect 0 'targets' -- eval "${go_on[@]:1}" --checkpoint changed model=model.yaml
sed '$a rms_norm_eps: 1.0e-3' model.yaml >edited.yaml
expect 1 "edited.yaml:9:1: 'rms_norm_eps' is 1.0e-3, but was not given" -- "${go_on[@]}"
sed '/max_position/d' model.yaml >edited.yaml
expect 1 "edited.yaml" "'max_position_embeddings' is not given, but was 128" -- "${go_on[@]}"
sed '$a rms_norm_eps: 1.0e-3' model.yaml >edited.yaml
sed -i 's/^{/{ "rms_norm_eps": 0.001,/' changed/checkpoints/step-000004/config.json
expect 0 'resuming from' 'finished: step 5 of 5' -- "${go_on[@]}"
check 'the next checkpoint has the changed model' grep -q '"rms_norm_eps"' changed/checkpoints/step-000005/config.json
rm -rf changed && cp -r edited changed
echo '{' >changed/checkpoints/step-000004/config.json
expect 0 'cannot compare the model' 'finished: step 5 of 5' -- "${go_on[@]}"
rm -rf changed && cp -r edited changed
rm changed/checkpoints/step-000004/config.json
expect 0 'resuming from' 'finished: step 5 of 5' -- "${go_on[@]}"

# Values of state.json that make sense but are not what was saved.
rm -rf changed && cp -r run changed
sed -i 's/"optimizer_step": 4/"optimizer_step": 5/' changed/checkpoints/step-000004/state.json
expect 1 'state.json: its values have checksum' -- train run.yaml output_dir=changed

# Steps that are skipped must not push the checkpoints before them out.
expect 1 'not finite 11 times in a row' \
    'remove the checkpoints after skips/checkpoints/step-000004 and resume' \
    -- train run.yaml output_dir=skips train.learning_rate=1e6 \
    train.max_steps=60 checkpoint.save_steps=1
check 'the last good checkpoint stays' test -s skips/checkpoints/step-000004/state.json

expect 1 'gradient norm nan' 'then start again' -- train run.yaml output_dir=stops \
    train.learning_rate=1e6 train.on_bad_numbers=stop checkpoint.save_steps=0
touch plain
expect 1 'output_dir' 'plain: not a folder' -- train run.yaml \
    output_dir=plain/below
expect 2 '--chaos needs a seed above 0, not 0' -- train run.yaml --chaos 0

# A second process finds the folder locked before it looks at what is in it.
rm -rf busy && cp -r run busy
exec 9<busy/metrics.jsonl
flock 9
expect 1 'another process is training' -- train run.yaml output_dir=busy \
    checkpoint.resume_from_checkpoint=none
exec 9<&-

# Going back within a folder would mix two runs.
rm -rf changed && cp -r run changed
expect 0 'finished' -- train run.yaml output_dir=changed train.max_steps=6
expect 1 'goes back to step 4' 'step-000006' -- train run.yaml output_dir=changed \
    checkpoint.resume_from_checkpoint=run/checkpoints/step-000004
check 'what was there is still there' test -s changed/checkpoints/step-000006/state.json

# A damaged line of metrics must not take those behind it along.
sed -i '2s/^./x/' changed/metrics.jsonl
cp changed/metrics.jsonl before
expect 1 'metrics.jsonl:2:' 'mend the file' -- train run.yaml output_dir=changed
check 'the metrics are as they were' cmp before changed/metrics.jsonl

# What cannot be cut back is refused, and what somebody else cuts is not filled up with zeros.
mkdir piped && mkfifo piped/metrics.jsonl
expect 1 'piped/metrics.jsonl: is no regular file' 'remove it' -- train run.yaml output_dir=piped
"$megatrain" train run.yaml output_dir=cut train.max_steps=1000000 train.eval_steps=1000000 \
    log.logging_steps=1000000 >out 2>&1 </dev/null &
for ((i = 0; i < 1000; i++)); do
    [[ -s cut/metrics.jsonl ]] && break
    sleep 0.02
done
: >cut/metrics.jsonl
for ((i = 0; i < 1000; i++)); do
    [[ -s cut/metrics.jsonl ]] && break
    sleep 0.02
done
kill -TERM $!
wait $!
check 'cut metrics: the run goes on' test $? = 75
check 'cut metrics: says so' grep -q 'cut/metrics.jsonl: was cut by another program' out
check 'cut metrics: whole lines from the start' bash -c 'head -n 1 cut/metrics.jsonl | grep -q "^{\"step\": "'

# A file-size limit stands for a full disk: the write fails where the file grows past it.
cp -r run full
(
    ulimit -f 100
    "$megatrain" train run.yaml output_dir=full >out 2>&1
)
check 'no space: exit code 1' test $? = 1
check 'no space: says what could not be written' grep -q 'cannot save step.*File too large' out
check 'no space: the checkpoint before is whole' same_checkpoint "$model" full/checkpoints/step-000004
expect 0 'resuming from full/checkpoints/step-000004' 'finished' -- train run.yaml output_dir=full

# A stream that was closed is nobody's file, and what cannot be written is told of any command.
"$megatrain" train run.yaml output_dir=closed train.max_steps=1000000 log.logging_steps=1000000 <&- >&- 2>&- &
for ((i = 0; i < 1000; i++)); do
    [[ -s closed/metrics.jsonl ]] && break
    sleep 0.02
done
check 'closed streams are held' test "$(readlink /proc/$!/fd/{0,1,2} | sort -u)" = /dev/null
kill -TERM $!
wait $!
check 'and training goes on without them' test $? = 75
"$megatrain" --help >/dev/full 2>out
check 'no space for the list of commands: exit code 1' test $? = 1
check 'no space for the list of commands: says so' grep -q 'the standard output cannot be written' out

# So do other writes, in any command.
cp "$source_root/tests/cli/bytes-tokenizer.json" tokenizer.json
for command in 'tokenize --tokenizer tokenizer.json --no-special --file text.txt -o tokens.bin' \
    'plan run.yaml data.loader=jsonl data.tokenizer=tokenizer.json'; do
    (
        ulimit -f 4
        # shellcheck disable=SC2086
        "$megatrain" $command >out 2>&1
    )
    check "no space: ${command%% *}: exit code 1" test $? = 1
    check "no space: ${command%% *}: says so" grep -q 'cannot write.*File too large' out
done

# What no disk can hold is known before the first byte, or the first step.
cat >vast.yaml <<END
{ model_type: llama, vocab_size: 256, hidden_size: 131072, intermediate_size: 524288, num_hidden_layers: 1000,
  num_attention_heads: 1024, num_key_value_heads: 1024 }
END
expect 1 'vast: the export needs 500 TiB, ' 'are free; free some space' -- export vast.yaml --init random -o vast
expect 1 'vast: the export needs 1000 TiB, ' 'or in bf16, which takes half' \
    -- export vast.yaml --init random -o vast --dtype fp32
check 'an export that does not fit leaves nothing' test ! -e vast -a ! -e vast.tmp-export
many=(train run.yaml train.max_steps=1000000000000 train.learning_rate=0 train.early_stopping_patience=1
    train.eval_steps=1 checkpoint.save_steps=1)
expect 0 'checkpoints: 1,000,000,000,000 checkpoints of ' ' that are free' 'save_total_limit' \
    -- "${many[@]}" output_dir=endless checkpoint.save_total_limit=0
expect 0 'stopping early' -- "${many[@]}" output_dir=few
check 'what is rotated out needs no room' bash -c '! grep -q "that are free" out'

# A limit of the address space is found before OpenBLAS tries for ever to get round it. (Sanitizers
# need more than any limit.)
for limit in 100000 200000; do
    (
        ulimit -v $limit
        "$megatrain" --help >/dev/null 2>&1 || exit 7
        timeout -k 1 60 "$megatrain" train run.yaml output_dir=narrow device=cpu threads=2 >out 2>&1
    )
    rc=$?
    ((rc == 7)) && continue
    check "address space of $limit kB: exit code 1" test $rc = 1
    check "address space of $limit kB: says so" grep -q '128 MiB of address space for each of .* threads\|cannot load OpenBLAS' out
done

(
    ulimit -v 20000000
    "$megatrain" --help >/dev/null 2>&1 || exit 7
    "$megatrain" train run.yaml output_dir=narrow train.micro_batch_size=32 \
        train.gradient_accumulation_steps=1048576 >out 2>&1
)
rc=$?
if ((rc != 7)); then
    check 'a step beyond the memory: exit code 1' test $rc = 1
    check 'a step beyond the memory: says what to lower' \
        grep -q 'for the tokens of a step of 1048576 micro-batches; lower train.gradient_accumulation_steps' out
fi
done_testing
