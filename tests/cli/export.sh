#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Export: what goes in as BF16 comes out bit for bit, with everything that makes a model folder; and
# a trained run's tokenizer files travel through its checkpoints.
. "$(dirname "$0")/lib.sh"

fixture=$source_root/tests/oracle/fixtures/llama
cp -r "$fixture/mha_tied" tied
chmod -R u+w tied
for name in tokenizer.json tokenizer_config.json special_tokens_map.json generation_config.json chat_template.jinja; do
    echo "{\"file\": \"$name\"}" >tied/$name
done

# The masters, once more exported as they are: the files are equal, and so are the BF16 ones.
expect 0 'exported to fp32' -- export tied -o fp32 --dtype fp32
expect 0 -- export fp32 -o again --dtype fp32
check 'fp32 again: other bytes' cmp fp32/model.safetensors again/model.safetensors
expect 0 -- export fp32 -o bf16
expect 0 -- export bf16 -o bf16-again
check 'bf16 again: other bytes' cmp bf16/model.safetensors bf16-again/model.safetensors
check 'bf16: dtype of config.json' grep -q '"bfloat16"' bf16/config.json
expect 0 '0 parameters have no tensor, 0 tensors no parameter' -- inspect bf16
check 'a tied head is stored once' bash -c '! grep -aq lm_head bf16/model.safetensors'
check 'files: metadata' grep -aq '"__metadata__":{"format":"pt"}' bf16/model.safetensors
for name in tokenizer.json tokenizer_config.json special_tokens_map.json generation_config.json chat_template.jinja; do
    check "$name is carried over" cmp tied/$name bf16-again/$name
done

# What an export that was killed has left is neither kept nor taken for the next one's.
mkdir cut.tmp-export
touch cut.tmp-export/{config.json,model-00002-of-00009.safetensors}
expect 0 -- export tied -o cut
expect 0 -- export tied -o whole
check 'a killed export leaves nothing' diff -r cut whole
check 'a killed export leaves no folder' test ! -e cut.tmp-export
bash -c 'mkdir pid.tmp-$$ && touch pid.tmp-$$/left && exec "$0" export tied -o pid' "$megatrain" >out 2>&1
check 'what lies about is not in an export' test -f pid/config.json -a ! -e pid/left
mkdir busy.tmp-export
exec 9<busy.tmp-export
flock -x 9
expect 1 'busy.tmp-export: another process is exporting' -- export tied -o busy
exec 9<&-
expect 0 -- export tied -o busy

# A signal takes back what was written. (The disk must hold what the export would take: 4 GB.)
cat >wide.yaml <<END
{ model_type: llama, vocab_size: 256, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 30,
  num_attention_heads: 16, max_position_embeddings: 128 }
END
"$megatrain" export wide.yaml --init random -o wide >out 2>&1 &
for ((i = 0; i < 1000; i++)); do
    [[ -n $(find wide.tmp-export -type f 2>/dev/null) ]] && break
    sleep 0.01
done
kill -TERM $!
wait $!
rc=$?
if grep -q 'are free' out; then
    check 'a full disk' test $rc = 1
else
    check 'an export that a signal stops: exit code 75' test $rc = 75
    check 'an export that a signal stops says so' grep -q 'stopped by a signal; nothing was exported' out
fi
check 'an export that a signal stops leaves nothing' test ! -e wide -a ! -e wide.tmp-export

expect 0 -- export tied -o sharded --shard-size 4KB
check 'shards: an index' test -f sharded/model.safetensors.index.json
expect 0 '0 parameters have no tensor' -- inspect sharded
expect 0 -- export sharded -o one --dtype bf16
check 'from shards: other bytes' cmp one/model.safetensors bf16/model.safetensors

# GPT-OSS: (in, out) matrices of all experts in one tensor, from either release, and a config.json
# that no longer speaks of a quantisation.
oss=$source_root/tests/oracle/fixtures/gpt_oss
expect 0 -- export "$oss/bf16" -o oss
check 'gate_up_proj: layout' grep -aq '"model.layers.0.mlp.experts.gate_up_proj":{"dtype":"BF16","shape":\[5,24,20\]' oss/model.safetensors
check 'down_proj: layout' grep -aq '"model.layers.0.mlp.experts.down_proj":{"dtype":"BF16","shape":\[5,10,24\]' oss/model.safetensors
expect 0 -- export "$oss/mxfp4" -o dequantised
check 'from MXFP4: layout' grep -aq '"model.layers.1.mlp.experts.gate_up_proj":{"dtype":"BF16","shape":\[4,32,64\]' dequantised/model.safetensors
check 'from MXFP4: no blocks' bash -c '! grep -aqE "_blocks|_scales" dequantised/model.safetensors'
check 'from MXFP4: config.json' bash -c '! grep -q quantization_config dequantised/config.json'
expect 0 '0 parameters have no tensor, 0 tensors no parameter' -- inspect dequantised
expect 0 -- export dequantised -o dequantised-again
check 'from MXFP4 again: other bytes' cmp dequantised/model.safetensors dequantised-again/model.safetensors

# DeepSeek: experts one by one, whichever form they came in; the layer for multi-token prediction is
# left out where the configuration speaks of one.
deepseek=$source_root/tests/oracle/fixtures/deepseek
expect 0 -- export "$deepseek/v3_fused" -o experts
check 'experts: a tensor each' grep -aq '"model.layers.2.mlp.experts.7.up_proj.weight":{"dtype":"BF16","shape":\[6,24\]' experts/model.safetensors
check 'experts: none fused' bash -c '! grep -aq gate_up_proj experts/model.safetensors'
check 'experts: the bias' grep -aq '"model.layers.2.mlp.gate.e_score_correction_bias":{"dtype":"F32","shape":\[8\]' experts/model.safetensors
expect 0 '0 parameters have no tensor, 0 tensors no parameter' -- inspect experts
check 'v3: a layer more' grep -aq '"model.layers.3.eh_proj.weight"' "$deepseek/v3/model.safetensors"
expect 0 -- export "$deepseek/v3" -o v3
check 'v3: no layer more' bash -c '! grep -aq "model.layers.3." v3/model.safetensors'
cp -r "$deepseek/v3" more
chmod -R u+w more
sed -i 's/"num_nextn_predict_layers": 1/"num_nextn_predict_layers": 0/' more/config.json
expect 1 'model.layers.3.' -- export more -o x

# Qwen3-Next: projections packed by head and a convolution's middle dimension come out as they went
# in; Qwen 3.5: the language model by itself, experts fused.
qwen=$source_root/tests/oracle/fixtures/qwen
expect 0 -- export "$qwen/qwen3_next" -o next
check 'in_proj_qkvz: packed' grep -aq '"model.layers.0.linear_attn.in_proj_qkvz.weight":{"dtype":"BF16","shape":\[224,24\]' next/model.safetensors
check 'in_proj_ba: packed' grep -aq '"model.layers.0.linear_attn.in_proj_ba.weight":{"dtype":"BF16","shape":\[8,24\]' next/model.safetensors
check 'conv1d: three dimensions' grep -aq '"model.layers.0.linear_attn.conv1d.weight":{"dtype":"BF16","shape":\[152,1,4\]' next/model.safetensors
expect 0 '0 parameters have no tensor, 0 tensors no parameter' -- inspect next
expect 0 -- export next -o next-again
check 'next again: other bytes' cmp next/model.safetensors next-again/model.safetensors
expect 0 -- export "$qwen/qwen3_5_moe" -o moe
check 'experts: fused' grep -aq '"model.layers.0.mlp.experts.gate_up_proj":{"dtype":"BF16","shape":\[6,12,24\]' moe/model.safetensors
check 'no vision, no layer more' bash -c '! grep -aqE "visual|mtp" moe/model.safetensors'

# A model manifest: an untrained model, the one that training would begin with.
write_text text.txt
write_model model.yaml
write_run run.yaml
expect 0 'exported to made' -- export model.yaml -o made --init random --seed 3 --dtype fp32 \
    --tokenizer "$source_root/tests/cli/bytes-tokenizer.json"
check 'made: the tokenizer' cmp made/tokenizer.json "$source_root/tests/cli/bytes-tokenizer.json"
check 'made: no card' test ! -e made/README.md
expect 0 -- train run.yaml train.max_steps=1 train.warmup_steps=0 train.learning_rate=0 \
    train.eval_steps=0 checkpoint.save_steps=1 output_dir=drawn
check 'made: the weights' cmp made/model.safetensors drawn/checkpoints/step-000001/model.safetensors
expect 1 'has weights of its own' -- export made -o x --init random
expect 1 'text.txt: is no tokenizer.json' -- export model.yaml -o x --init random --tokenizer text.txt

# A folder that lacks a tensor is shown as such.
cp -r bf16 lacking
chmod -R u+w lacking
sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' lacking/config.json
expect 1 'parameters have no tensor, 0 tensors no parameter' "'model.layers.2." 'the first of them' -- inspect lacking
expect 1 "'model.layers.2." -- inspect lacking --json

# What is refused, and leaves nothing.
expect 1 'drawn/checkpoints/step-000001/x lies in drawn/checkpoints/step-000001 itself' -- export drawn -o drawn/checkpoints/step-000001/x
expect 1 'made/x lies in made itself' -- export made -o made/x
check 'nothing was made there' test ! -e made/x -a ! -e made/x.tmp-export
expect 1 'the folder is not empty' -- export tied -o bf16
mkdir elsewhere
ln -s elsewhere link
ln -s nowhere dangling
for link in link link/ dangling; do
    expect 1 "${link%/}: is a symbolic link" -- export tied -o $link
done
mkdir mine && : >mine/own
ln -s mine x.tmp-export
expect 1 'x.tmp-export: is a symbolic link' -- export tied -o x
check 'what a link leads to stays as it is' test "$(ls mine)" = own -a ! -e x
rm x.tmp-export
check 'links stay' test -L link -a -L dangling -a ! -e link.tmp-export
mkdir empty
for dot in empty/. empty/../empty/./; do
    expect 1 "$dot: cannot be replaced by the finished export" 'name a new folder' -- export tied -o $dot
done
expect 1 '/proc: cannot be replaced by the finished export, since a file system is mounted there' -- export tied -o /proc
expect 1 'bf16/config.json/x: is, or lies below, a file' -- export tied -o bf16/config.json/x
expect 2 '--seed is for --init random' -- export tied -o x --seed 3
expect 1 'there are no weights to export' -- export "$source_root/arch/llama/models/llama-2-7b.yaml" -o x
expect 2 'name a folder with -o DIR' -- export tied
expect 2 'must be bf16 or fp32' -- export tied -o x --dtype int8
expect 2 'must be a size such as 5GB' -- export tied -o x --shard-size large
expect 1 'cannot open the model' -- export nowhere -o x
check 'nothing is left' bash -c '! ls -d x* 2>/dev/null'

# A run that starts from a model folder: its checkpoints carry the folder's files, too.
expect 0 'saved' -- train run.yaml train.max_steps=1 train.warmup_steps=0 checkpoint.save_steps=1 train.eval_steps=0
cp -r run/checkpoints/step-000001 start
cp "$source_root/tests/cli/bytes-tokenizer.json" start/tokenizer.json
short=(train.warmup_steps=0 train.eval_steps=0)
expect 0 'saved' 'exported second/checkpoints/step-000001 to second/model' \
    -- train run.yaml model=start output_dir=second train.max_steps=1 "${short[@]}"
expect 0 -- export second -o by-hand
check 'a run that began with a model folder is exported' diff -r second/model by-hand
rm -r second/model
expect 0 'exported second/checkpoints/step-000001 to second/model' \
    -- train run.yaml model=start output_dir=second train.max_steps=1 "${short[@]}"
expect 0 -- train run.yaml model=start output_dir=second train.max_steps=1 "${short[@]}"
check 'but not twice' bash -c '! grep -q exported out'
# Not only once the run is over.
for folder in new new/ ./new/checkpoints new/checkpoints//; do
    expect 1 "'checkpoint.export' is a folder of the run itself" 'or true for new/model' \
        -- train run.yaml output_dir=new checkpoint.export=$folder data.files=missing.txt
done

# Manifest and card tell how the run was trained: not what a run asked for that did nothing, nor
# that it began with what it did not begin with.
cp second/run.yaml as-trained.yaml
expect 0 'nothing is left to do' 'raise train.max_steps' 'another output_dir' \
    -- train run.yaml model=start output_dir=second train.max_steps=1 "${short[@]}" train.learning_rate=0.5
check 'nothing done: the manifest stays' cmp as-trained.yaml second/run.yaml
cp -r start other
expect 1 "argument 'model=other': 'model' is $PWD/other" "began with $PWD/start" 'another output_dir' \
    -- train run.yaml model=other output_dir=second train.max_steps=2 "${short[@]}"
expect 1 "'init' is random" 'began with pretrained weights' \
    -- train run.yaml model=start init=random output_dir=second train.max_steps=2 "${short[@]}"
check 'refused: the manifest stays' cmp as-trained.yaml second/run.yaml
cp -r second moved
sed -i "s#$PWD/start#$PWD/elsewhere-before/start#" moved/run.yaml
expect 0 'elsewhere-before/start, with which the run' "$PWD/start takes its place" 'finished: step 2' \
    -- train run.yaml model=start output_dir=moved train.max_steps=2 "${short[@]}"
ln -s start same
expect 0 'finished: step 3' -- train run.yaml model=same output_dir=moved train.max_steps=3 "${short[@]}"
cp -r start left
expect 0 -- train run.yaml model=left output_dir=orphan train.max_steps=1 "${short[@]}"
rm -rf left orphan/model
expect 0 -- export orphan -o orphan/model
check 'the base is gone: the card still names it' grep -q '^base_model: "left"' orphan/model/README.md
cp -r second more-steps
expect 0 'to more-steps/model' -- train run.yaml model=start output_dir=more-steps train.max_steps=2 "${short[@]}"
check 'more steps: another model' bash -c '! cmp -s second/model/model.safetensors more-steps/model/model.safetensors'
check 'the card says so' grep -q '| steps | 2 |' more-steps/model/README.md
for model in second/model second/checkpoints/step-000001; do
    expect 0 -- train run.yaml model=$model output_dir=again train.max_steps=1 "${short[@]}"
    check 'what began with a run says its name' grep -q '^base_model: "second"' again/model/README.md
    rm -r again
done
expect 0 -- train run.yaml model=start output_dir=third train.max_steps=1 "${short[@]}" checkpoint.export=false
check 'unless switched off' test ! -e third/model
expect 1 "'checkpoint.export' cannot be had" 'not empty' \
    -- train run.yaml output_dir=fourth "${short[@]}" checkpoint.export=start
expect 0 'to else/where' -- train run.yaml output_dir=fourth train.max_steps=1 "${short[@]}" checkpoint.export=else/where
expect 0 '0 parameters have no tensor' -- inspect else/where
check 'checkpoints carry the tokenizer' cmp start/tokenizer.json second/checkpoints/step-000001/tokenizer.json
expect 0 'exported to trained' -- export second -o trained --dtype fp32
check 'exports of runs carry it' cmp start/tokenizer.json trained/tokenizer.json
check 'no optimizer, no state' test "$(LC_ALL=C && echo trained/*)" = 'trained/README.md trained/config.json trained/model.safetensors trained/tokenizer.json'
check 'the card names what it came from' grep -q '^base_model: "start"' trained/README.md
check 'and has the manifest' grep -q '^  max_steps: 1$' trained/README.md
check 'the weights are the masters' cmp trained/model.safetensors second/checkpoints/step-000001/model.safetensors
cp -r second damaged
printf 'x' | dd of=damaged/checkpoints/step-000001/model.safetensors bs=1 seek=9001 conv=notrunc status=none
expect 1 'the file is damaged' -- export damaged -o never
check 'a failed export leaves nothing' bash -c '! ls -d never* 2>/dev/null'
expect 0 -- generate trained --prompt the --max-tokens 4 --device cpu
# Matrices of several blocks: the weights that are drawn are the same on any number of processors,
# and loading brings each where it belongs. A step of that size changes no weight.
sed -e 's/vocab_size: 256/vocab_size: 6000/' -e 's/hidden_size: 32/hidden_size: 256/' model.yaml >large.yaml
expect 0 -- export large.yaml -o large --init random --seed 5
if command -v taskset >/dev/null; then
    cpu=$(taskset -cp $$ | sed -E 's/.*: ([0-9]+).*/\1/')
    taskset -c "$cpu" "$megatrain" export large.yaml -o one-cpu --init random --seed 5 >out 2>&1
    check 'drawn by one thread: other bytes' cmp large/model.safetensors one-cpu/model.safetensors
fi
write_text text.txt
write_run large-run.yaml
expect 0 -- train large-run.yaml model=large output_dir=large-run train.max_steps=1 train.warmup_steps=0 \
    train.learning_rate=1e-30 optimizer.weight_decay=0 train.eval_steps=0
expect 0 -- export large-run -o large-again
check 'loaded and saved: other bytes' cmp large/model.safetensors large-again/model.safetensors

done_testing
