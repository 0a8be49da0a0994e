#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measurements: what they report and refuse. Not how fast anything is.
. "$(dirname "$0")/lib.sh"

write_model model.yaml
small=(bench step model.yaml device=cpu --document 64 --steps 2)

# ---- steps ---------------------------------------------------------------------------------------

# number KEY: its first number in bench.json.
number() { sed -nE "s/^ *\"$1\": ([-+.0-9e]+),?$/\1/p" bench.json | head -n 1; }
positive() {
    local x
    x=$(number "$1")
    check "$1 is a positive number, not '$x'" awk "BEGIN { exit !(\"$x\" != \"\" && $x + 0 > 0) }"
}

expect 0 '256 tokens a step: 1 micro-batch of 256' '1,024 tokens a step' '300 tokens a step' \
    'compute busy' 'optimizer' 'copy-out' 'bound by' \
    -- "${small[@]}" --tokens 256,1k,300 --json bench.json --trace trace.json
check 'three sizes' test "$(grep -c '"tokens":' bench.json)" = 3
check 'a trace' grep -q traceEvents trace.json
check 'no run folder' test ! -e runs
for key in parameters gemm_flops_per_second host_bytes_per_second seconds_median seconds_best \
    tokens_per_second predicted_tokens_per_second flops_6n_per_second model_flops_per_second \
    compute_busy copy_in_bytes copy_out_bytes copy_in_bytes_per_second updates_per_second loss \
    device_bytes host_bytes; do
    positive $key
done
check 'every byte of the plan is listed' test "$(number device_bytes)" = \
    "$(awk '/"tokens": 256/ { on = 1 } /"tokens": 1024/ { on = 0 }
        on && /"tier": "device"/ { d = 1 } on && /"tier": "host"/ { d = 0 }
        on && d && /"bytes"/ { gsub(/[^0-9]/, ""); n += $0 } END { print n }' bench.json)"

expect 0 '4 micro-batches of 64' 'no clipping' -- "${small[@]}" --tokens 256 train.micro_batch_size=1 \
    train.max_grad_norm=0 precision=bf16
# Gradients that wait on the device for their norm need no plane either.
expect 0 'deterministic: false changes nothing' 'making a store' -- "${small[@]}" --tokens 1k,64 \
    train.micro_batch_size=1 memory.gradients=device deterministic=false
check 'one store' test "$(grep -c 'making a store' out)" = 1
# Several groups that are summed on the host need a gradient plane, one group without clipping none:
# the store is made again.
expect 0 ' groups, ' '64 tokens a step: 1 micro-batch of 64 in 1 group,' -- "${small[@]}" --tokens 1k,64 \
    train.micro_batch_size=1 memory.activations=keep memory.gradients=host train.max_grad_norm=0 memory.gpu=2MiB
check 'two stores' test "$(grep -c 'making a store' out)" = 2
expect 0 '64 tokens a step: refused: memory.groups is 2' 'in 2 groups' -- "${small[@]}" --tokens 64,128 \
    memory.groups=2
expect 0 '131,072 tokens a step: refused: the run does not fit' '64 tokens a step: 1 micro-batch' \
    -- "${small[@]}" --tokens 131k,64 memory.host=8MiB memory.groups=1 train.micro_batch_size=2 --json bench.json
check 'the refusal is in the file' grep -q '"refused": "the run does not fit' bench.json
expect 1 'no size fits' 'refused' -- "${small[@]}" --tokens 64 memory.host=1KiB

expect 2 "--tokens must be numbers of tokens such as 8k,32k or 8192, not '8q'" -- "${small[@]}" --tokens 1k,8q
expect 2 "'train.max_steps' has no effect" -- "${small[@]}" train.max_steps=3
expect 2 "'max_steps' is no override" -- "${small[@]}" max_steps
expect 2 'which model?' -- bench step
expect 2 '--steps must be' -- "${small[@]}" --steps 0
expect 2 '--document must be' -- bench step model.yaml --document 1
expect 2 '--document must be at least 2 tokens, not 0' -- bench step model.yaml --document 0
expect 2 '--document must be at least 2 tokens, not 0' -- bench unit model.yaml --document 0
expect 2 "unknown 'stp'; did you mean 'step'?" -- bench stp
expect 0 'documents of 128 random tokens' -- bench step model.yaml device=cpu --steps 1 --tokens 256
expect 1 'max_position_embeddings, 128' -- bench step model.yaml device=cpu --document 256
expect 1 "names 'nothing.yaml', which does not exist" -- bench step nothing.yaml
expect 1 'precision' -- "${small[@]}" precision=fp8
expect 1 "unknown key 'bet1'" -- "${small[@]}" optimizer.bet1=0.9
expect 1 'no/such/folder/x: cannot write' -- "${small[@]}" --tokens 64 --json no/such/folder/x
expect 1 'no/such/folder/x: cannot write' -- "${small[@]}" --tokens 64,128 --trace no/such/folder/x
check 'no size is measured before' bash -c '! grep -q "64 tokens a step" out'

# ---- units ---------------------------------------------------------------------------------------

cat >moe.yaml <<'END'
model_type: mixtral
vocab_size: 300
hidden_size: 32
intermediate_size: 48
num_hidden_layers: 3
num_attention_heads: 4
num_key_value_heads: 2
num_local_experts: 8
num_experts_per_tok: 2
sliding_window: null
max_position_embeddings: 128
END
unit=(bench unit moe.yaml device=cpu --document 64 --steps 2)
expect 0 '3 like block.0, 40,256 parameters' '1 like head, 9,632 parameters' 'keep' 'is hidden from' \
    -- "${unit[@]}" --tokens 128,300 --json bench.json
check 'two kinds' test "$(grep -c '"kind":' bench.json)" = 2
check 'of two sizes' test "$(grep -c '"tokens":' bench.json)" = 4
for key in parameters gemm_flops_per_second gemm_flops_per_token weight_bytes gradient_bytes \
    hidden_from_tokens forward_seconds backward_seconds copy_in_seconds copy_out_seconds active_flops \
    active_flops_per_second seconds_at_gemm_rate; do
    positive $key
done
# Of 8 experts 2 work: 3 matrices of 32 x 48 each, beside attention and router.
check 'only experts at work count' test "$(number gemm_flops_per_token)" = \
    "$((2 * (2 * 3 * 32 * 48 + 3072 + 8 * 32))).0"
expect 0 '3 like block.0' 'input' -- "${unit[@]}" --tokens 128 --unit block memory.activations=input \
    train.micro_batch_size=1 memory.gradient_dtype=bf16 --json bench.json
check 'one kind' test "$(grep -c '"kind":' bench.json)" = 1
check 'gradients of half the size' test "$(number gradient_bytes)" = \
    "$(awk "BEGIN { printf \"%.1f\", $(number weight_bytes) / 2 }")"
moe=(bench step moe.yaml device=cpu --document 64 --steps 1 --tokens 64)
expect 0 '64 tokens a step' -- "${moe[@]}" memory.segment_size=1KiB --json cut.json
check 'segments are planned' grep -q 'activations between segments' cut.json
expect 0 '64 tokens a step' -- "${moe[@]}" memory.segment_size=off --json whole.json
check 'no segments are planned' test -z "$(grep 'between segments' whole.json)"
check 'the same loss' test "$(grep '"loss"' cut.json)" = "$(grep '"loss"' whole.json)"
expect 1 "'memory.segment_size' must be" 'a size such as' -- "${moe[@]}" memory.segment_size=large
expect 1 "'memory.segment_size' must be" '"auto", "off" or a size of at least 1' -- "${moe[@]}" memory.segment_size=0
expect 0 '3 like block.2' -- "${unit[@]}" --tokens 64 --unit block.2
expect 1 '64  refused: the run does not fit' 'no size fits' -- "${unit[@]}" --tokens 64 memory.host=1KiB
expect 1 "--unit 'bloc' is neither" 'kinds: block, head' -- "${unit[@]}" --unit bloc
expect 1 "--unit 'embed' is neither" -- "${unit[@]}" --unit embed
expect 2 "'memory.groups' has no effect" -- "${unit[@]}" memory.groups=2
expect 2 "'optimizer.name' has no effect" -- "${unit[@]}" optimizer.name=adamw
expect 2 'which model?' -- bench unit
expect 2 '--steps must be' -- "${unit[@]}" --steps 0
expect 1 'no/such/folder/x: cannot write' -- "${unit[@]}" --tokens 64 --json no/such/folder/x

# ---- hardware ------------------------------------------------------------------------------------

expect 0 'copies between host and device' 'GEMM' 'attention' 'gated delta rule' 'Gparam/s' 'disk, read' 'profile  here.yaml' \
    -- bench hardware --device cpu --quick --disk . -o here.yaml
check 'nothing else is left behind' test -z "$(find . -name '.megatrain-bench-*' -o -name 'here.yaml.tmp*')"
# A profile with a misspelled key names it.
write_run run.yaml
write_text text.txt
misspelled() {
    sed "$1" here.yaml >misspelled.yaml
    expect 1 "misspelled.yaml:" "$2" -- plan run.yaml --profile misspelled.yaml
}
misspelled 's/^pin:/pinn:/' "key 'pin' is missing; is it meant by 'pinn'?"
misspelled '0,/ copy:/s/ copy:/ copi:/' "copy' is missing; is it meant by 'copi'?"
misspelled 's/^gemms:/gems:/' "key 'gemms' is missing; is it meant by 'gems'?"
misspelled 's/^cpus:/fan: 1\ncpus:/' "unknown key 'fan'"
# And so does one with a number that cannot be.
misspelled 's/^cpus: .*/cpus: 5000000000/' "'cpus' is 5000000000, but must be from 1 to 2147483647"
misspelled 's/^host_memory_free: .*/host_memory_free: 0/' "'host_memory_free' is 0, but must be from 1 to "

expect 0 'GEMM' -- bench hardware --device cpu --quick
check 'a rough profile is not kept' test ! -e "$XDG_CACHE_HOME/megatrain"
expect 2 "'x' is no option" -- bench hardware x
expect 2 '-o needs a value: -o FILE' -- bench hardware -o
expect 2 "unknown option '--o'" -- bench hardware --o=x
# No place to write to, or to measure, is known before anything is measured.
expect 1 'no/such/here.yaml: cannot write: there is no folder no/such; name a file' \
    -- bench hardware --device cpu --quick -o no/such/here.yaml
check 'the machine is not measured before' bash -c '! grep -q GEMM out'
expect 1 '.: cannot write: it is a folder' -- bench hardware --device cpu --quick -o .
expect 1 'no-such: cannot measure this disk' -- bench hardware --device cpu --quick --disk no-such
check 'nor is it before its disk' bash -c '! grep -q GEMM out'
expect 1 "device 'tpu'" -- bench hardware --device tpu --quick
expect 2 "unknown 'hardwar'; did you mean 'hardware'?" -- bench hardwar

# ---- the cached profile --------------------------------------------------------------------------

write_text text.txt
write_run run.yaml
cached=$XDG_CACHE_HOME/megatrain/profile-$(uname -n)-cpu.yaml
mkdir -p "${cached%/*}"
today=$(date -u -d "@$(sed -n 's/^measured_at: //p' here.yaml)" +%Y-%m-%d)
# Of a rough figure, which a run may pass, nothing is a share.
rates='^  (model|  while computing|copy-in|copy-out|optimizer)'
# shellcheck disable=SC2016
expect 0 'ceilings   by a rough measurement; `megatrain bench hardware`' -- "${small[@]}" --tokens 64
check 'six rough ceilings' test "$(grep -E "$rates" out | grep -c ' roughly [0-9.]* ')" = 6
check 'no shares of them' test "$(grep -E "$rates" out | grep -c '%')" = 0
cp here.yaml "$cached"
expect 0 'ceilings   by the profile of' "$today" -- "${small[@]}" --tokens 64 --json bench.json
check 'six shares' test "$(grep -E "$rates" out | grep -cE 'of.* [0-9.]+ .*, [0-9]+%$')" = 6
check 'measured_at is that of the profile' test "$(number measured_at)" = \
    "$(sed -n 's/^measured_at: //p' here.yaml)"
expect 0 'predicted' 'by the profile of' -- plan run.yaml
check 'the plan is the same every time' test "$(cat out)" = "$("$megatrain" plan run.yaml 2>&1)"
sed 's/^megatrain: .*/megatrain: "0.0.1"/' here.yaml >"$cached"
expect 0 'the hardware profile is not used' "$cached" 'it is of megatrain 0.0.1' 'predicted' -- plan run.yaml
sed 's/^  name: .*/  name: "Another"/' here.yaml >"$cached"
expect 0 "not used" "it is of cpu 'Another'" 'predicted' -- plan run.yaml
printf 'format: megatrain-pro' >"$cached"
expect 0 "not used" "$cached:1:" 'predicted' -- plan run.yaml
rm "$cached"

# ---- a profile of another machine ----------------------------------------------------------------

large() { # SED-SCRIPT...: other.yaml is a profile of a large GPU, further changed
    sed -E -e 's/^host: .*/host: "far"/' -e 's/^  kind: .*/  kind: "cuda"/' \
        -e 's/^  name: .*/  name: "Imagined"/' -e 's/^  unified: .*/  unified: false/' \
        -e 's/^  memory_free: .*/  memory_free: 150000000000/' \
        -e 's/^  default_precision: .*/  default_precision: bf16/' \
        -e 's/^host_memory_free: .*/host_memory_free: 1500000000000/' "$@" here.yaml >other.yaml
}
large
sed 's/device: cpu/device: cuda/' run.yaml >far.yaml
expect 0 'for far: cuda Imagined' 'compute bf16' 'predicted' -- plan far.yaml --profile other.yaml
expect 0 'for far' 'compute fp32' -- plan far.yaml --profile other.yaml precision=fp32
expect 1 "device 'cpu': the profile is of a device 'cuda'" -- plan run.yaml --profile other.yaml
# Its memory counts, not that of the machine here.
large -e 's/^host_memory_free: .*/host_memory_free: 3000/'
expect 1 'the run does not fit' 'host ' -- plan far.yaml --profile other.yaml
large -e 's/^  memory_free: .*/  memory_free: 300000000/'
expect 1 'the run does not fit' 'device ' -- plan far.yaml --profile other.yaml train.micro_batch_size=4096
expect 0 'predicted' -- plan far.yaml --profile other.yaml train.micro_batch_size=4096 memory.gpu=64GiB

# Host memory that updates and copies share, in a slow hour: no products are made again for it.
sed -E 's/(threads: 16, .* update: )[^ ]+/\11.0e+11/' "$source_root/docs/profiles/h200.yaml" >slow.yaml
check 'the profile is another' bash -c '! diff -q slow.yaml "$1" >/dev/null' - "$source_root/docs/profiles/h200.yaml"
printf 'model: %s\ndata: { max_seq_len: 1024 }\n' "$source_root/arch/qwen/models/qwen2.5-7b.yaml" >7b.yaml
expect 0 '16 micro-batches of 8192 tokens in 4 groups of up to 4' 'summed in fp32 in device memory' -- plan 7b.yaml \
    --profile slow.yaml train.micro_batch_size=8 train.gradient_accumulation_steps=16 train.max_grad_norm=0

# Small micro-batches add gradients up more often: the plan says by what a step would be faster.
expect 0 'with train.micro_batch_size=8 and train.gradient_accumulation_steps=16 the same tokens would take ' -- \
    plan 7b.yaml --profile slow.yaml train.gradient_accumulation_steps=128 train.max_grad_norm=0
expect 0 'with train.micro_batch_size=8 the same tokens would take ' -- \
    plan 7b.yaml --profile slow.yaml train.tokens_per_step=131072 train.max_grad_norm=0
expect 0 'predicted' -- plan 7b.yaml --profile slow.yaml train.micro_batch_size=8 train.tokens_per_step=131072 train.max_grad_norm=0
check 'nothing is faster' bash -c '! grep -q "would take" out'

# The profile that comes along plans a model of any size on any machine, without data or tokenizer.
cat >405b.yaml <<END
model: $source_root/arch/llama/models/llama-3.1-405b.yaml
data:
  max_seq_len: 4096
END
h200=(--profile "$source_root/docs/profiles/h200.yaml")
expect 0 'NVIDIA H200, 7.28 TiB of host memory' 'no data was read' 'documents of up to 4,096 tokens' \
    '405853.389 M parameters' 'predicted' -- plan 405b.yaml "${h200[@]}" memory.host=8TB
check 'how many steps nobody knows' bash -c '! grep -q "steps: about" out'
expect 0 '  500 steps: about ' -- plan 405b.yaml "${h200[@]}" memory.host=8TB train.max_steps=500
expect 1 'more memory is needed' -- plan 405b.yaml "${h200[@]}" memory.host=2TB
check 'this is the other machine' bash -c '! grep -q "plan --profile" out'
# What is missing is counted from the plan that is nearest to fitting.
expect 1 'are missing' 'optimizer states' -- plan 405b.yaml "${h200[@]}" memory.host=2TB \
    train.max_grad_norm=0 train.gradient_accumulation_steps=4
check 'without clipping no gradient waits for others' bash -c '! grep -q "gradient plane" out'
expect 1 'train.max_grad_norm: 0' 'memory.gradient_dtype: bf16' -- plan 405b.yaml "${h200[@]}" memory.host=6TB
expect 0 'predicted' -- plan 405b.yaml "${h200[@]}" memory.host=6TB memory.gradient_dtype=bf16
expect 1 'No setting but a larger memory.host' -- plan 405b.yaml "${h200[@]}" memory.host=3TB
# Many micro-batches in little device memory are several groups, whose gradients are summed somewhere.
printf 'model: %s/arch/qwen/models/qwen2.5-7b.yaml\ndata: { max_seq_len: 1024 }\n' "$source_root" >7b.yaml
small_gpu=("${h200[@]}" memory.gpu=10GiB train.gradient_accumulation_steps=32)
expect 1 'It fits with at most 16 micro-batches a step (train.gradient_accumulation_steps) and train.max_grad_norm: 0' \
    -- plan 7b.yaml "${small_gpu[@]}"
expect 1 'It fits with at most 16 micro-batches a step' -- plan 7b.yaml "${small_gpu[@]}" train.max_grad_norm=0
expect 0 'predicted' -- plan 7b.yaml "${small_gpu[@]}" train.max_grad_norm=0 train.gradient_accumulation_steps=16
expect 0 'compute works 4% of a step: more tokens a step cost little (train.gradient_accumulation_steps)' \
    -- plan 7b.yaml "${h200[@]}"
expect 0 'bound by compute' -- plan 7b.yaml "${h200[@]}" train.gradient_accumulation_steps=64
check 'compute has enough' bash -c '! grep -q "compute works" out'
# shellcheck disable=SC2016
expect 1 'more memory is needed; `megatrain plan --profile FILE`' -- plan 405b.yaml device=cpu
expect 1 "unknown key 'fils'" -- plan 405b.yaml "${h200[@]}" memory.host=8TB data.fils=text.txt
expect 1 "key 'data.files' is missing" -- train 405b.yaml device=cpu
expect 1 'not-here.txt' -- plan run.yaml data.files=not-here.txt
expect 0 'no data was read' '12 steps: about' -- plan run.yaml data.files=not-here.txt data.shuffle=false --no-data
expect 1 'max_position_embeddings, 128' -- plan run.yaml --no-data data.max_seq_len=256

# bad PLACE TEXT SED-SCRIPT: the message names the place.
bad() {
    sed -E "$3" here.yaml >bad.yaml
    expect 1 "bad.yaml:$1" "$2" -- plan run.yaml --profile bad.yaml
}
expect 1 'none.yaml: cannot read the profile' 'bench hardware -o' -- plan run.yaml --profile none.yaml
bad '2:9' "this is no profile" 's/megatrain-profile/recipe/'
bad '3:10' "reads version 2" 's/^version: 2/version: 1/'
bad '' "'cpus'" '/^cpus:/d'
bad '' 'a rate is above 0' 's/^pin: .*/pin: 0/'
bad '' "must be a" 's/^pin: .*/pin: fast/'
bad '' "unknown key 'pins'" 's/^pin: (.*)/pin: \1\npins: 1/'
bad '' "'gemms' has 0 records" 's/^gemms:/gemms: []\nothers:/'
bad '' 'fp32 or bf16' 's/precision: bf16, rows/precision: int3, rows/'
bad '' "gemms.0.inner" '0,/inner: [0-9]+, /s///'
# ---- starts --------------------------------------------------------------------------------------

write_text text.txt
write_run run.yaml
expect 0 -- export model.yaml -o folder --init random
expect 0 '1 files of weights' 'from the disk' 'files in memory' 'weights ' 'first step' 'in all' \
    -- bench start run.yaml model=folder
check 'no run folder' test ! -e run
for phase in device model tokenizer data plan memory engine weights 'first step' 'in all'; do
    check "$phase: two times" grep -qE "^$phase +[0-9]+\.[0-9]{3} s .* [0-9]+\.[0-9]{3} s" out
done
check 'weights: sizes and rates' grep -qE '^weights( +[0-9.]+ s +[0-9.]+ GB +[0-9.]+ GB/s){2}' out
check 'too few for shares' grep -q '^weights of less than 32 MB are too few' out
check 'so there are none' bash -c '! grep -q % out'
sed -e 's/vocab_size: 256/vocab_size: 33000/' -e 's/hidden_size: 32/hidden_size: 256/' model.yaml >wide.yaml
expect 0 -- export wide.yaml -o wide --init random
expect 0 'first step' -- bench start run.yaml model=wide data.loader=text
check 'weights: shares' grep -qE '^weights( +[0-9.]+ s +[0-9.]+ GB +[0-9.]+ GB/s +[0-9]+%){2}' out
expect 0 'first step' -- bench start run.yaml init=random
check 'no files, no rates' bash -c '! grep -q "from the disk" out'
expect 1 'has no weights; name a Hugging Face folder' -- bench start run.yaml init=pretrained
expect 2 'which' -- bench start

done_testing
