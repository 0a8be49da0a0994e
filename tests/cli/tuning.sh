#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What a run does beyond plain steps: frozen parameters, groups with their own rates, routers that
# use experts evenly, the best checkpoint, early stopping, and a damaged checkpoint before an older one.
. "$(dirname "$0")/lib.sh"

write_text text.txt
write_model model.yaml
write_run run.yaml
short=(train.max_steps=3 train.warmup_steps=0 train.eval_steps=0 checkpoint.save_steps=0)
last=checkpoints/step-000003

# Bytes of a tensor of a checkpoint: tensor_of FOLDER NAME.
tensor_of() {
    local file=$1/model.safetensors header offsets n
    n=$(od -An -t u8 -N 8 "$file")
    header=$(dd if="$file" bs=1 skip=8 count="$((n))" status=none)
    offsets=$(grep -o "\"$2\":{[^}]*}" <<<"$header" | sed 's/.*\[\([0-9]*\),\([0-9]*\)\]}.*/\1 \2/')
    set -- $offsets
    tail -c +$((9 + n + $1)) "$file" | head -c $(($2 - $1))
}
same_tensor() { cmp -s <(tensor_of "$1" "$3") <(tensor_of "$2" "$3"); }
other_tensor() { ! same_tensor "$@"; }
has_state() { grep -aq "\"$2.m\"" "$1/optimizer.safetensors"; }

embed=model.embed_tokens.weight
query=model.layers.0.self_attn.q_proj.weight
other=model.layers.1.self_attn.q_proj.weight
norm=model.layers.1.input_layernorm.weight

# ---- frozen -------------------------------------------------------------------------------------

expect 0 -- train run.yaml output_dir=start train.max_steps=1 train.learning_rate=0 \
    train.warmup_steps=0 train.eval_steps=0 checkpoint.save_steps=0
begun=start/checkpoints/step-000001
for how in '' 'train.max_grad_norm=0'; do
    rm -rf frozen
    # shellcheck disable=SC2086
    expect 0 'frozen: 17,472 of' 'finished' -- train run.yaml output_dir=frozen "${short[@]}" $how \
        'train.freeze=["embed*", "block.0.*"]'
    for name in $embed $query; do
        check "$name stays $how" same_tensor $begun frozen/$last $name
        check "$name has no state $how" eval "! has_state frozen/$last $name"
    done
    check "others move $how" other_tensor $begun frozen/$last $other
    check "others have states $how" has_state frozen/$last $other
done
expect 0 'finished' -- train run.yaml output_dir=one "${short[@]}" 'train.freeze=model.layers.0.*q_proj*'
check 'a tensor inside a unit stays' same_tensor $begun one/$last $query
check 'its neighbours move' other_tensor $begun one/$last model.layers.0.self_attn.k_proj.weight
expect 0 'finished: step 5 of 5' -- train run.yaml output_dir=one "${short[@]}" train.max_steps=5 \
    'train.freeze=model.layers.0.*q_proj*'
check 'and after a resume' same_tensor $begun one/checkpoints/step-000005 $query
expect 1 "lacks the optimizer state 'model.layers.0.self_attn.q_proj.weight.m'" \
    'with the train.freeze that the checkpoint was made with' 'another output_dir' \
    -- train run.yaml output_dir=one "${short[@]}" train.max_steps=6
check 'a good checkpoint is not to be removed' bash -c '! grep -q "remove" out'
expect 1 'which is of no parameter that is trained' 'with the train.freeze that the checkpoint' \
    -- train run.yaml output_dir=one "${short[@]}" train.max_steps=6 \
    'train.freeze=["model.layers.0.*q_proj*", "block.1.*"]'
rm -rf all && expect 0 -- train run.yaml output_dir=all "${short[@]}"
"$megatrain" plan run.yaml >whole 2>&1
"$megatrain" plan run.yaml 'train.freeze=["embed*", "block.0.*"]' >less 2>&1
check 'the plan has fewer states' bash -c '! cmp -s <(grep -i "optimizer states" whole) <(grep -i "optimizer states" less)'
expect 1 "'train.freeze.1' is 'blok.*', which no parameter matches" 'block.0.' \
    -- train run.yaml output_dir=new 'train.freeze=["embed*", "blok.*"]'
expect 0 'finished' -- train run.yaml output_dir=thawed "${short[@]}" 'train.freeze=[]'
expect 1 'leaves no parameter to train' -- train run.yaml output_dir=new 'train.freeze="*"'

# ---- groups -------------------------------------------------------------------------------------

expect 0 -- train run.yaml output_dir=still "${short[@]}" \
    'optimizer.groups=[{pattern: block.0.*, learning_rate_scale: 0}]'
check 'a rate of 0 moves nothing' same_tensor $begun still/$last $query
check 'and is that of the group only' other_tensor $begun still/$last $other
expect 0 -- train run.yaml output_dir=absolute "${short[@]}" \
    'optimizer.groups=[{pattern: "*", learning_rate_scale: 7}, {pattern: "*", learning_rate: 1.0e-2}]'
check 'the same rate, said otherwise; the last group counts' \
    cmp all/$last/model.safetensors absolute/$last/model.safetensors
expect 0 -- train run.yaml output_dir=decay "${short[@]}" \
    'optimizer.groups=[{pattern: block.1.*, weight_decay: 0.5}]'
check 'decay of a group' other_tensor all/$last decay/$last $other
expect 0 -- train run.yaml output_dir=decays "${short[@]}" optimizer.weight_decay=0.5
expect 0 -- train run.yaml output_dir=decay-all "${short[@]}" 'optimizer.groups=[{pattern: "*", weight_decay: 0.5}]'
check 'a group of all is the optimizer with that decay' \
    cmp decays/$last/model.safetensors decay-all/$last/model.safetensors
expect 1 "'optimizer.groups.0.pattern' is 'x*', which no parameter matches" \
    -- train run.yaml output_dir=new 'optimizer.groups=[{pattern: "x*"}]'
expect 1 'learning_rate_scal' 'learning_rate_scale' \
    -- train run.yaml output_dir=new 'optimizer.groups=[{pattern: "*", learning_rate_scal: 2}]'
expect 1 'exclude each other' \
    -- train run.yaml output_dir=new 'optimizer.groups=[{pattern: "*", learning_rate_scale: 2, learning_rate: 1}]'

# ---- biases of routers --------------------------------------------------------------------------

cat >routed.yaml <<END
model_type: deepseek_v3
vocab_size: 256
hidden_size: 32
intermediate_size: 48
moe_intermediate_size: 16
num_hidden_layers: 2
num_attention_heads: 2
n_routed_experts: 8
num_experts_per_tok: 2
n_group: 1
first_k_dense_replace: 1
kv_lora_rank: 16
q_lora_rank: null
qk_nope_head_dim: 8
qk_rope_head_dim: 8
v_head_dim: 8
max_position_embeddings: 128
END
bias=model.layers.1.mlp.gate.e_score_correction_bias
routed=(model=routed.yaml train.warmup_steps=0 train.eval_steps=0 train.lr_scheduler_type=constant
    checkpoint.save_steps=0)
for rate in 0 0.001; do
    expect 0 'finished' -- train run.yaml output_dir=whole$rate "${routed[@]}" train.max_steps=6 \
        train.router_bias_update_rate=$rate
    check 'how uneven experts were is told' grep -qE '"router_max_violation": [0-9]' whole$rate/metrics.jsonl
done
check 'biases stay at rate 0' \
    cmp -s <(tensor_of whole0/checkpoints/step-000006 $bias) <(head -c 32 /dev/zero)
check 'and move at another' other_tensor whole{0,0.001}/checkpoints/step-000006 $bias
check 'without a state' eval "! has_state whole0.001/checkpoints/step-000006 $bias"
routed+=(train.router_bias_update_rate=0.001)
for steps in 3 6; do
    expect 0 'finished' -- train run.yaml output_dir=halves "${routed[@]}" train.max_steps=$steps
done
check 'a resumed run moves them alike' same_checkpoint {whole0.001,halves}/checkpoints/step-000006
expect 0 -- export whole0.001 -o routed
check 'an export in BF16 has them as they are' \
    same_tensor {whole0.001/checkpoints/step-000006,routed} $bias
expect 0 'finished' -- train run.yaml output_dir=pinned "${routed[@]}" train.max_steps=2 \
    'train.freeze=block.0.*'
expect 1 'train.freeze matches the correction bias of every router' -- train run.yaml output_dir=new \
    "${routed[@]}" 'train.freeze="*_bias"'
expect 1 "'train.router_bias_update_rate' is 0.001, but no router of this model has" \
    -- train run.yaml output_dir=new train.router_bias_update_rate=0.001
expect 1 "it is called 'train.router_bias_update_rate' here" -- train run.yaml output_dir=new \
    train.bias_update_speed=0.001

# ---- the auxiliary loss of routers ---------------------------------------------------------------

cat >evenly.yaml <<END
model_type: mixtral
vocab_size: 256
hidden_size: 32
intermediate_size: 16
num_hidden_layers: 2
num_attention_heads: 2
num_key_value_heads: 2
num_local_experts: 8
num_experts_per_tok: 2
max_position_embeddings: 128
initializer_range: 0.3
output_router_logits: true
router_aux_loss_coef: 0.5
END
sed 's/^output_router_logits: true/output_router_logits: false/' evenly.yaml >freely.yaml
# The first and the last of a run, and what a step says.
aux_losses() { grep -o '"aux_loss": [0-9.]*' "$1/metrics.jsonl" | sed -n '1p;$p' | cut -d ' ' -f 2; }
evenly=(train.warmup_steps=0 train.eval_steps=0 train.lr_scheduler_type=constant
    train.learning_rate=0.01 checkpoint.save_steps=0)
for how in evenly freely; do
    expect 0 'finished' -- train run.yaml output_dir=$how model=$how.yaml "${evenly[@]}" train.max_steps=20
done
check 'the loss is told in every step' test "$(grep -c '"aux_loss": [0-9]' evenly/metrics.jsonl)" = 20
check 'and is nowhere without one' eval '! grep -q aux_loss freely/metrics.jsonl'
# Evenly used, 2 experts a token: 0.5 times 2.
check "it falls towards 1: $(aux_losses evenly | tr '\n' ' ')" \
    eval 'aux_losses evenly | tr "\n" " " | awk "{ exit !(\$1 > 1.1 && \$2 < 0.97 * \$1 && \$2 > 0.99) }"'
for steps in 9 20; do
    expect 0 'finished' '  aux 1.' -- train run.yaml output_dir=evenly-halves model=evenly.yaml \
        "${evenly[@]}" train.max_steps=$steps
done
check 'a resumed run is the same' same_checkpoint {evenly,evenly-halves}/checkpoints/step-000020

# ---- the best checkpoint, early stopping --------------------------------------------------------

# A rate far too high: the loss falls at first, and is never as good again.
wild=(train.max_steps=40 train.eval_steps=2 train.learning_rate=0.4 train.warmup_steps=4
    train.max_grad_norm=1 checkpoint.save_steps=0 checkpoint.save_total_limit=1)
expect 0 'finished' -- train run.yaml output_dir=best "${wild[@]}" checkpoint.save_best=true
noted=$(sed -n 's/{"step": \([0-9]*\), "validation_loss": \([0-9.e+-]*\),.*/\2 \1/p' best/metrics.jsonl |
    sort -g | head -n 1)
step=${noted#* }
check "the link names the best one, of step $step" \
    test "$(readlink best/checkpoints/best)" = "step-$(printf %06d "$step")"
check 'which is not the last' test "$step" -lt 40
check 'both are there' test -f best/checkpoints/best/state.json -a -f best/checkpoints/step-000040/state.json
check 'and no others' test "$(find best/checkpoints -maxdepth 1 -type d -name 'step-*' | wc -l)" = 2
expect 0 "$(printf '%.4f' "${noted% *}" | cut -c 1-5)" -- eval run.yaml train.eval_batches=2 --checkpoint best/checkpoints/best

patient=("${wild[@]}" train.early_stopping_patience=3)
expect 0 'stopping early after step' '3 evaluations in a row' -- train run.yaml output_dir=early "${patient[@]}"
ended=$(sed -n 's/.*stopping early after step \([0-9]*\):.*/\1/p' out)
check "ended at $ended, three evaluations after the best" \
    test "$ended" = "$(sed -n 's/.*the one after step \([0-9]*\),.*/\1/p' out | awk '{ print $1 + 6 }')"
check 'and was saved' test -f "early/checkpoints/step-$(printf %06d "$ended")/state.json"
expect 0 'stopping early' -- train run.yaml output_dir=early "${patient[@]}"
expect 1 'set eval_steps' -- train run.yaml output_dir=new train.early_stopping_patience=2 train.eval_steps=0
expect 1 'no validation data to tell which is best' -- train run.yaml output_dir=new train.eval_steps=0 \
    checkpoint.save_best=true data.validation_split=0

# ---- a damaged checkpoint -----------------------------------------------------------------------

expect 0 -- train run.yaml output_dir=damaged train.max_steps=8
printf 'x' | dd of=damaged/checkpoints/step-000008/model.safetensors bs=1 seek=9001 conv=notrunc status=none
expect 1 'cannot resume' 'the one before it is damaged/checkpoints/step-000004' \
    'remove damaged/checkpoints/step-000008' -- train run.yaml output_dir=damaged
rm -r damaged/checkpoints/step-000008
expect 0 'resuming from damaged/checkpoints/step-000004' -- train run.yaml output_dir=damaged train.max_steps=8
done_testing
