#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Bad input: every message names the file, the line where there is one, and what to do; the exit
# code is 1, and earlier checkpoints stay good.
. "$(dirname "$0")/lib.sh"

write_text text.txt
write_model model.yaml
write_run run.yaml
expect 0 'finished' -- train run.yaml train.max_steps=4
model=run/checkpoints/step-000004

# with SED-SCRIPT: bad.yaml is run.yaml changed.
with() { sed -E "$1" run.yaml >bad.yaml; }

# ---- manifests -----------------------------------------------------------------------------------

with 's/learning_rate/learning_rat/'
expect 1 'bad.yaml:13:3: ' "'learning_rat'" "did you mean 'learning_rate'?" -- train bad.yaml
with 's/max_steps: 12/max_steps: many/'
expect 1 'bad.yaml:10:' 'max_steps' 'many' -- train bad.yaml
with 's/max_seq_len: 64/max_seq_len: -64/'
expect 1 'bad.yaml:8:' 'max_seq_len' '-64' -- train bad.yaml
with 's/files: text.txt/files: *.txt/'
expect 1 'bad.yaml:7:' 'a value that begins with one of * @ % ` wants quotes' -- train bad.yaml
with 's/files: text.txt/files: *txt/'
expect 1 'bad.yaml:7:' 'wants quotes' -- train bad.yaml
with 's/files: text.txt/files: @txt/'
expect 1 'bad.yaml:7:' 'wants quotes' -- train bad.yaml
expect 1 "the pattern '*.nothing' matches no file" -- train run.yaml output_dir=new 'data.files=*.nothing'
with 's/^train:/train: {/'
expect 1 'bad.yaml:' -- train bad.yaml
expect 1 'learning_rat' "did you mean 'learning_rate'?" -- train run.yaml train.learning_rat=1
expect 1 'nowhere.yaml' 'No such file' -- train nowhere.yaml
with 's/files: text/filez: text/'
expect 1 'bad.yaml:' -- train bad.yaml
with 's/max_seq_len: 64/max_seq_len: 64\n  validation_spilt: 0.1/'
expect 1 'bad.yaml:9:3: ' "'validation_spilt'" "did you mean 'validation_split'?" -- train bad.yaml output_dir=new
with 's/max_seq_len: 64/max_seq_len: 512/'
expect 1 'bad.yaml:8:' '512 tokens' 'max_position_embeddings, 128' 'lower it' -- train bad.yaml output_dir=new
sed 's/num_key_value_heads: 2/num_key_value_heads: 3/' model.yaml >odd.yaml
expect 1 'odd.yaml:7:' 'num_key_value_heads' -- train run.yaml model=odd.yaml output_dir=new
expect 1 'odd.yaml:7:' -- inspect odd.yaml
expect 1 'run.yaml:1:' "'model' makes this a run manifest" 'its run folder' -- inspect run.yaml
expect 1 'run.yaml:1:' "'model' makes this a run manifest" -- generate run.yaml --device cpu
expect 1 'run.yaml:1:' "'model' makes this a run manifest" -- train run.yaml model=run.yaml output_dir=new
with 's/^train:/train:\n  eval_steps: 5/; s/^  eval_steps: 5$/&/'
expect 1 'bad.yaml:' 'eval_steps' -- train bad.yaml # given twice

awk 'BEGIN { for (i = 0; i < 100000; i++) printf "key%d: 1\n", i }' >keys.yaml
expect 1 'keys.yaml:4097:1: ' 'more than 4096 keys' -- train keys.yaml

# Sizes that would fill the memory before anything could be refused.
sed 's/num_hidden_layers: 2/num_hidden_layers: 1000000000000/' model.yaml >deep.yaml
expect 1 'deep.yaml:5:' '1000000000000' -- inspect deep.yaml
sed 's/num_attention_heads: 4/num_attention_heads: 8589934592/' model.yaml >many.yaml
expect 1 'many.yaml:6:' '8589934592' -- inspect many.yaml

# RoPE scaling that cannot be read must not be dropped.
for scaling in 'llama3' '[llama3]' '{factor: 2}'; do
    printf 'rope_scaling: %s\n' "$scaling" | cat model.yaml - >scaled.yaml
    expect 1 'scaled.yaml:9:' 'rope_scaling' 'rope_type' -- inspect scaled.yaml
done

# ---- the command line ----------------------------------------------------------------------------

expect 2 '--checkpoint is empty' -- eval run.yaml --checkpoint=
expect 2 "unknown option '-O'" -- export run -O x
expect 2 "unknown option '-x'" -- train run.yaml -x
expect 2 "unknown option '--max-steps'; the key of the run is set by train.max_steps=VALUE" -- train run.yaml --max-steps 3
expect 2 "unknown option '--seed'; the key of the run is set by seed=VALUE" -- plan run.yaml --seed=3
expect 2 "'Hello' is a word too many; a prompt is given with --prompt" -- generate run Hello
expect 1 "unknown chat format 'chatlm'; did you mean 'chatml'?" -- generate run --chat --chat-format chatlm --prompt a
expect 2 '--max-tokens must be from 1' -- generate run --max-tokens 9223372036854775807
expect 2 '--threads must be from 0' -- generate run --threads -1
expect 1 'shorten it to 127' -- generate run --prompt "$(head -c 200 text.txt)" --max-tokens 1
# What cannot be written is known before data is looked for.
expect 1 '/nowhere/trace: cannot write: there is no folder /nowhere' \
    -- train run.yaml output_dir=new --trace /nowhere/trace data.files=missing.txt
for key in output_dir checkpoint.export data.cache model data.tokenizer; do
    expect 1 "$key" '~' 'write the path out' -- train run.yaml output_dir=new data.loader=jsonl \
        "data.tokenizer=$source_root/tests/cli/bytes-tokenizer.json" "$key=~/here"
done
check 'no folder is called ~' test ! -e '~'
mkdir own && cp run.yaml own
expect 1 "'output_dir' is a folder where own/run.yaml stands, which is of no earlier run" -- train own/run.yaml output_dir=own model="$PWD/model.yaml"
check "the user's manifest stays" cmp run.yaml own/run.yaml
expect 1 'text.txt: not a folder' -- train run.yaml output_dir=text.txt/new data.files=missing.txt
expect 1 "'checkpoint.export' cannot be had: text.txt" \
    -- train run.yaml output_dir=new data.files=missing.txt checkpoint.export=text.txt/model
expect 0 'finished' -- train run.yaml output_dir=new train.max_steps=0 train.num_train_epochs=0.02
rm -rf new

# ---- data ------------------------------------------------------------------------------------------

with 's/text.txt/missing.txt/'
expect 1 'bad.yaml:7:' 'missing.txt' 'No such file' -- train bad.yaml output_dir=new
: >empty.txt
with 's/text.txt/empty.txt/'
expect 1 'bad.yaml:7:' 'empty.txt' 'is empty' -- train bad.yaml output_dir=new
with 's/max_seq_len: 64/max_seq_len: 64\n  validation_split: 0/'
expect 1 'bad.yaml:' 'eval_steps' 'there is no validation data' -- train bad.yaml output_dir=new

expect 1 "'data.tokenizer' names 'nowhere', which does not exist" \
    -- train run.yaml output_dir=new data.tokenizer=nowhere
expect 1 "'data.tokenizer' cannot be had" 'text.txt: is no tokenizer.json; expected one, or a folder that has one' \
    -- train run.yaml output_dir=new data.tokenizer=text.txt

cp "$source_root/tests/cli/bytes-tokenizer.json" tokenizer.json
echo '{ "eos_token_id": 1000000000000000019884624838656 }' >generation_config.json
expect 1 "generation_config.json: eos_token_id: found the number 1e+30, expected the id of a token" \
    -- tokenize --tokenizer tokenizer.json --file text.txt
rm generation_config.json
ln -s out linked
expect 1 'linked: cannot write: it is a symbolic link, which would be replaced' \
    -- tokenize --tokenizer tokenizer.json --file missing.txt -o linked
expect 1 '/dev/zero: cannot write: it is no regular file' \
    -- tokenize --tokenizer tokenizer.json --file missing.txt -o /dev/zero

# ---- plugins ---------------------------------------------------------------------------------------

sed 's/model_type: llama/model_type: lama/' model.yaml >lama.yaml
expect 1 'lama.yaml' "'lama'" "'llama'" -- train run.yaml model=lama.yaml output_dir=new
with 's/loader: text/loader: txt/'
expect 1 'bad.yaml' "'txt'" 'text' -- train bad.yaml output_dir=new
with 's/^train:/optimizer:\n  name: adamv\ntrain:/'
expect 1 'bad.yaml' "'adamv'" 'adamw' -- train bad.yaml output_dir=new
with 's/device: cpu/device: tpu/'
expect 1 'bad.yaml:2:' "'tpu'" "there is: cpu" -- train bad.yaml output_dir=new

# ---- weights ---------------------------------------------------------------------------------------

weights() { # FOLDER: a fresh copy of the checkpoint
    rm -rf "$1"
    cp -r "$model" "$1"
}
pretrained=(run.yaml init=pretrained output_dir=new model=bad)

weights bad
expect 0 'new run: weights of' -- train "${pretrained[@]}" train.max_steps=4
rm -rf new

truncate -s -4 bad/model.safetensors
expect 1 'model.safetensors' -- train "${pretrained[@]}"

weights bad
cat >bad/model.safetensors.index.json <<END
{"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
END
rm bad/model.safetensors
expect 1 'model-00002-of-00002.safetensors' -- train "${pretrained[@]}"

# The header is JSON after 8 bytes of length; changes keep its length.
header() { LC_ALL=C sed -i -E "1,/\}\}/ $1" bad/model.safetensors; }

weights bad
header 's/"shape":\[64,32\]/"shape":[32,64]/'
expect 1 'model.safetensors' 'gate_proj' '[32, 64]' '[64, 32]' -- train "${pretrained[@]}"

# Two tensors of the same size that lie in the same bytes.
weights bad
offsets() { LC_ALL=C grep -aoE "\"$1\":\{[^}]*\}" bad/model.safetensors | grep -oE '\[[0-9]+,[0-9]+\]\}' | tr -d '[]}'; }
one=$(offsets model.layers.0.input_layernorm.weight)
two=$(offsets model.layers.0.post_attention_layernorm.weight)
pad=$(printf "%$((${#two} - ${#one}))s" '')
header "s/\\[$two\\]/[$pad$one]/"
check 'the header was changed' test "$(offsets model.layers.0.post_attention_layernorm.weight)" != "$two"
expect 1 'model.safetensors' 'overlap' -- train "${pretrained[@]}"

weights bad
header 's/("model.norm.weight":\{[^}]*"data_offsets":\[)[0-9]/\19/'
expect 1 'model.safetensors' -- train "${pretrained[@]}"

weights bad
sed -i -E 's/("num_hidden_layers": *)2/\11/' bad/config.json
expect 1 'model.safetensors' 'model.layers.1.' -- train "${pretrained[@]}"

weights bad
sed -i -E 's/("num_hidden_layers": *)2/\13/' bad/config.json
expect 1 'bad' 'model.layers.2.' -- train "${pretrained[@]}"

weights bad
sed -i 's/{/{{/' bad/config.json
expect 1 'config.json:1:' -- train "${pretrained[@]}"
weights bad
sed -i -E 's/("num_hidden_layers": *)2/\11000000000000000019884624838656/' bad/config.json
expect 1 'config.json' "'num_hidden_layers' must be a whole number of at most 64 bits, found the number 1e+30" \
    -- train "${pretrained[@]}"
check 'a refused run leaves no checkpoint' test ! -e new/checkpoints/step-000001

# ---- folders and space -------------------------------------------------------------------------------

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
    "$megatrain" train run.yaml output_dir=narrow train.gradient_accumulation_steps=100000000 >out 2>&1
)
rc=$?
if ((rc != 7)); then
    check 'a step beyond the memory: exit code 1' test $rc = 1
    check 'a step beyond the memory: says what to lower' \
        grep -q 'for the tokens of a step of 100000000 micro-batches; lower train.gradient_accumulation_steps' out
fi

# ---- what is blamed, and suggested ---------------------------------------------------------------

expect 1 "'output_dir' cannot be used: plain: not a folder" -- train run.yaml output_dir=plain checkpoint.export=true
for files in '[]' '{}' 3; do
    expect 1 "'data.files' must be a file or a pattern, or a list of at least one" -- train run.yaml "data.files=$files"
done
printf 'model_type: qwen3_moe\nnum_hidden_layers: 1\nmlp_only_layers: 0\n' >dense.yaml
for layers in 0 0.5 all true; do
    sed -i "s/only_layers: .*/only_layers: $layers/" dense.yaml
    expect 1 "dense.yaml:3:" "'mlp_only_layers' must be a list of layers" -- inspect dense.yaml
done
expect 1 "device 'gpu'" "did you mean 'cuda'?" -- train run.yaml device=gpu
expect 1 "device 'gpu'" "did you mean 'cuda'?" -- generate model.yaml --init random --device gpu
expect 1 "did you mean 'learning_rate_scale'?" -- train run.yaml 'optimizer.groups=[{pattern: "*", lr_scale: 2}]'
expect 1 "did you mean 'learning_rate'?" -- train run.yaml 'optimizer.groups=[{pattern: "*", lr: 2}]'
expect 1 "called 'optimizer.groups.0.learning_rate_scale' here" -- train run.yaml train.lr_scale=2

# The default length gives way to the model's positions; one that is asked for does not.
sed '/max_seq_len/d' run.yaml >default-length.yaml
expect 0 'data.max_seq_len is not given: 128, the model' '2 x 2 x 128 tokens a step' \
    -- train default-length.yaml output_dir=default-length
expect 0 'resuming from' -- train default-length.yaml output_dir=default-length train.max_steps=13
expect 0 '3 micro-batches of 256 tokens' -- plan default-length.yaml train.gradient_accumulation_steps=null \
    train.tokens_per_step=768
expect 1 'expected a multiple of micro_batch_size * max_seq_len = 2 * 128' -- plan default-length.yaml \
    train.gradient_accumulation_steps=null train.tokens_per_step=700
expect 1 'max_position_embeddings, 128' -- train default-length.yaml data.max_seq_len=1024

# A run that ends amid steps that changed nothing is no finished one.
end=(train run.yaml train.learning_rate=1e6 train.warmup_steps=0 checkpoint.export=true)
expect 1 'the run ends with 2 steps' 'those after step 3' 'not exported' '`megatrain export amid -o DIR`' \
    -- "${end[@]}" output_dir=amid train.max_steps=5
check 'its checkpoint is saved' test -s amid/checkpoints/step-000005/state.json
check 'it is not exported' test ! -e amid/model
expect 1 'the run ends with 2 steps' -- "${end[@]}" output_dir=amid train.max_steps=5
expect 0 -- export amid -o by-hand

# ---- options out of range ------------------------------------------------------------------------

random=(generate model.yaml --init random --max-tokens 1 --device cpu)
expect 2 '--temperature must be 0 (greedy) or positive, not -1' -- "${random[@]}" --temperature -1
expect 2 '--top-k must be 0 (all) or positive, not -1' -- "${random[@]}" --top-k -1
expect 2 '--top-p must be above 0 and at most 1, not 2' -- "${random[@]}" --top-p 2
expect 2 '--context must be from 1 to' 'not 0' -- "${random[@]}" --chat --context 0
expect 2 '--seed must be 0 or more, not -1' -- "${random[@]}" --seed -1
expect 2 "--init must be pretrained or random, not 'zero'" -- generate model.yaml --init zero
expect 2 "--init must be pretrained or random, not 'zero'" -- export model.yaml -o x --init zero
expect 2 "--precision must be auto, fp32 or bf16, not 'fp16'" -- generate model.yaml --precision fp16
expect 2 "--dtype must be bf16 or fp32, not 'int8'" -- export model.yaml -o x --dtype=int8
expect 2 '--timeout must be from 1 to 86400 seconds, not 4294967297' -- plugins check x.so --timeout 4294967297
expect 2 "unknown 'x'; expected list, info or check" -- plugins x
expect 2 "unknown 'lost'; did you mean 'list'?" -- plugins lost
expect 2 "unknown 'disk'; expected hardware, step, unit or start" -- bench disk
expect 2 '--seed must be 0 or more, not -1' -- export model.yaml -o x --init random --seed -1
done_testing
