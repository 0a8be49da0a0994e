#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Bad input: every message names the file, the line where there is one, and what to do; the exit
# code is 1, and earlier checkpoints stay good.
. "$(dirname "$0")/lib.sh"

write_trained_run

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
sed 's/layers: 2/layers: 10000/; s/hidden_size: 32/hidden_size: 536870912/; s/heads: 4/heads: 1048576/
    s/intermediate_size: 64/intermediate_size: 536870912/' model.yaml >huge.yaml
expect 1 "with 'model.layers.0.self_attn.q_proj.weight' the model has more than 1125899906842624 parameters" \
    -- inspect huge.yaml
sed 's/intermediate_size: 64/intermediate_size: 2147483647/; s/embeddings: 128/embeddings: 1073741824/' model.yaml >wide.yaml
expect 1 "template 'block': a value of [1073741824, 2147483647] would take 8388608 TiB" 'lower data.max_seq_len' \
    -- plan run.yaml model=wide.yaml data.max_seq_len=1073741824 train.micro_batch_size=1 --no-data

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
ln -s /nowhere/trace to-nowhere
expect 1 '/nowhere/trace: cannot write: there is no folder /nowhere' \
    -- train run.yaml output_dir=new --trace to-nowhere data.files=missing.txt
ln -s itself itself
expect 1 'itself: cannot write: Too many levels of symbolic links' \
    -- train run.yaml output_dir=new --trace itself data.files=missing.txt
ln -s below-here to-new
expect 1 'missing.txt' -- train run.yaml output_dir=new --trace to-new data.files=missing.txt
check 'nothing stays where a link leads to' test ! -e below-here
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

# What is written takes the place of its own kind only.
cp model.yaml was.yaml
for command in 'train run.yaml output_dir=new --trace' 'bench step model.yaml --tokens 256 --json' \
    'bench step model.yaml --tokens 256 --trace' 'bench unit model.yaml --tokens 256 --json' \
    'bench hardware --quick -o' 'tokenize --tokenizer tokenizer.json --no-special --file text.txt -o'; do
    # shellcheck disable=SC2086
    expect 1 'model.yaml: cannot write: what is there is a file of another kind' 'name a file' -- $command model.yaml
    check "$command: the file stays" cmp model.yaml was.yaml
    if [[ $command != train* ]]; then
        : >made
        # shellcheck disable=SC2086
        expect 0 -- $command made
        # shellcheck disable=SC2086
        expect 0 -- $command made
    fi
    rm -f made
done
for name in metrics.jsonl run.yaml; do
    expect 1 "new/$name: is a file of the run itself" -- train run.yaml output_dir=new --trace new/$name
done
check 'nothing was begun' test ! -e new

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

# ---- what is blamed, and suggested ---------------------------------------------------------------

touch plain
expect 1 "'output_dir' cannot be used: plain: not a folder" -- train run.yaml output_dir=plain checkpoint.export=true
for files in '[]' '{}' 3; do
    expect 1 "'data.files' must be a file or a pattern, or a list of at least one" -- train run.yaml "data.files=$files"
done
printf 'model_type: qwen3_moe\nnum_hidden_layers: 1\nmlp_only_layers: 0\n' >dense.yaml
for layers in 0 0.5 all true; do
    sed -i "s/only_layers: .*/only_layers: $layers/" dense.yaml
    expect 1 "dense.yaml:3:" "'mlp_only_layers' must be a list of layers" -- inspect dense.yaml
done
expect 1 "no plugin provides backend 'tpu'" 'a backend is built where' -- train run.yaml device=tpu
expect 1 "device 'gpu'" "did you mean 'cuda'?" -- train run.yaml device=gpu
expect 1 "no plugin provides backend 'tpu'" 'a backend is built where' -- train run.yaml device=tpu
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

# A plan's limits have their place.
with 's/^log:/memory:\n  groups: 3\nlog:/'
expect 1 "bad.yaml:19:11: 'memory.groups' is 3; expected 1 to the 2 micro-batches of a step" -- plan bad.yaml
expect 1 "argument 'memory.groups=2': 'memory.groups' is 2; expected 1 to the 1 micro-batch of a step" -- plan run.yaml \
    memory.groups=2 train.gradient_accumulation_steps=1
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
expect 2 '--timeout is for check' -- plugins list --timeout 5
expect 2 '--timeout is for check' -- plugins info llama --timeout 60
expect 2 "unknown 'x'; expected list, info or check" -- plugins x
expect 2 "unknown 'lost'; did you mean 'list'?" -- plugins lost
expect 2 "unknown 'disk'; expected hardware, step, unit or start" -- bench disk
expect 2 '--seed must be 0 or more, not -1' -- export model.yaml -o x --init random --seed -1
done_testing
