#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Exact parameter counts of published models, and the commands that need no model.
. "$(dirname "$0")/lib.sh"

models=$source_root/arch/llama/models
expect 0 'block.0 .. block.31' -- inspect "$models/llama-3.1-8b.yaml"
expect 0 '1,100,048,384 parameters' 'self_attn.k_proj.weight' '[256, 2048]' -- inspect "$models/tinyllama-1.1b.yaml"
expect 0 '"total_parameters": 1100048384' '"name": "model.layers.21.mlp.down_proj.weight"' \
    -- inspect "$models/tinyllama-1.1b.yaml" --json

# Every manifest of a release has its published number of parameters, which its first line says too.
listed=0
while read -r manifest total; do
    file=$source_root/arch/$manifest.yaml
    expect 0 "total     $total parameters" -- inspect "$file"
    check "$file: its first line says another number" grep -qF ": $total parameters." "$file"
    listed=$((listed + 1))
done <<'END'
llama/models/llama-2-7b 6,738,415,616
llama/models/llama-2-13b 13,015,864,320
llama/models/llama-2-70b 68,976,648,192
llama/models/llama-3-8b 8,030,261,248
llama/models/llama-3-70b 70,553,706,496
llama/models/llama-3.1-8b 8,030,261,248
llama/models/llama-3.1-70b 70,553,706,496
llama/models/llama-3.1-405b 405,853,388,800
llama/models/llama-3.2-1b 1,235,814,400
llama/models/llama-3.2-3b 3,212,749,824
llama/models/llama-3.3-70b 70,553,706,496
llama/models/tinyllama-1.1b 1,100,048,384
llama/models/smollm2-135m 134,515,008
llama/models/smollm2-360m 361,821,120
mistral/models/mistral-7b-v0.1 7,241,732,096
mistral/models/mistral-7b-v0.2 7,241,732,096
mistral/models/mistral-7b-v0.3 7,248,023,552
mistral/models/mistral-nemo-12b 12,247,782,400
mistral/models/mistral-small-22b 22,247,282,688
mistral/models/mistral-small-24b 23,572,403,200
mistral/models/mistral-small-3.1-24b 23,572,403,200
mistral/models/mistral-large-123b 122,610,069,504
mistral/models/ministral-8b 8,019,808,256
mistral/models/ministral-3-8b 8,489,553,920
qwen/models/qwen2.5-0.5b 494,032,768
qwen/models/qwen2.5-1.5b 1,543,714,304
qwen/models/qwen2.5-3b 3,085,938,688
qwen/models/qwen2.5-7b 7,615,616,512
qwen/models/qwen2.5-14b 14,770,033,664
qwen/models/qwen2.5-32b 32,763,876,352
qwen/models/qwen2.5-72b 72,706,203,648
qwen/models/qwen3-0.6b 596,049,920
qwen/models/qwen3-1.7b 1,720,574,976
qwen/models/qwen3-4b 4,022,468,096
qwen/models/qwen3-8b 8,190,735,360
qwen/models/qwen3-14b 14,768,307,200
qwen/models/qwen3-32b 32,762,123,264
gemma/models/gemma-2b 2,506,172,416
gemma/models/gemma-7b 8,537,680,896
gemma/models/gemma-2-2b 2,614,341,888
gemma/models/gemma-2-9b 9,241,705,984
gemma/models/gemma-2-27b 27,227,128,320
gemma/models/gemma-3-270m 268,098,176
gemma/models/gemma-3-1b 999,885,952
gemma/models/gemma-3-4b 3,880,263,168
gemma/models/gemma-3-12b 11,766,034,176
gemma/models/gemma-3-27b 27,009,346,304
mistral/models/mixtral-8x7b 46,702,792,704
mistral/models/mixtral-8x22b 140,630,071,296
qwen/models/qwen1.5-moe-a2.7b 14,315,784,192
qwen/models/qwen2-57b-a14b 57,408,658,944
qwen/models/qwen3-30b-a3b 30,532,122,624
qwen/models/qwen3-235b-a22b 235,093,634,560
qwen/models/qwen3.5-0.8b 752,393,024
qwen/models/qwen3.5-2b 1,881,825,088
qwen/models/qwen3.5-4b 4,205,751,296
qwen/models/qwen3.5-9b 8,953,803,264
qwen/models/qwen3.5-27b 26,895,998,464
qwen/models/qwen3.5-35b-a3b 34,660,610,688
qwen/models/qwen3-next-80b-a3b 79,674,391,296
gpt_oss/models/gpt-oss-20b 20,914,757,184
gpt_oss/models/gpt-oss-120b 116,829,156,672
deepseek/models/deepseek-moe-16b 16,375,728,128
deepseek/models/deepseek-v2-lite 15,706,484,224
deepseek/models/deepseek-v2 235,741,434,880
deepseek/models/deepseek-v3 671,026,419,200
END
[[ $listed -eq $(find "$source_root"/arch/*/models -name '*.yaml' ! -name 'tiny-*' | wc -l) ]] ||
    fail 'a model manifest is not in the list'

# ---- config.json as published: what it leaves out is the default of its model type ----------------

# Gemma 3 4B says little more than this of its language model.
cat >gemma.json <<'END'
{ "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
  "text_config": { "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "sliding_window": 1024, "rope_scaling": { "factor": 8.0, "rope_type": "linear" } },
  "vision_config": { "hidden_size": 1152 } }
END
expect 0 'type      gemma3_text' 'total     3,880,263,168 parameters' 'positions 131072' \
    'block.0 .. block.4 ' 'block_sliding' 'block.5 ' 'block_full' -- inspect gemma.json

# What repeats is listed once.
expect 0 'block.0 ' 'block.1 ' '.. block.35 ' 'these 2 lines 18 times' -- inspect "$models/../../gpt_oss/models/gpt-oss-120b.yaml"
check 'and not again' bash -c '! grep -q "^block.2 " out'

sed 's/num_hidden_layers: 2/num_hidden_layers: 8/; s/vocab_size: 61/vocab_size: 256/' \
    "$source_root/tests/engine/models/gpt_oss.yaml" >alternating.yaml
write_text text.txt
write_run run.yaml
expect 0 '  .. block.7 ' 'these 2 lines 4 times' -- plan run.yaml model=alternating.yaml device=cpu

# null is not absent.
cat >null.json <<'END'
{ "model_type": "qwen2", "num_key_value_heads": null, "head_dim": null, "rope_scaling": null,
  "num_attention_heads": 16, "sliding_window": null, "hidden_size": 1024, "intermediate_size": 64,
  "num_hidden_layers": 2, "vocab_size": 100 }
END
expect 0 'self_attn.k_proj.weight' '[1024, 1024]' -- inspect null.json

# DeepSeek V2: no number of experts is no expert, and those of every second layer.
cat >dense.json <<'END'
{ "model_type": "deepseek_v2", "n_routed_experts": null, "num_hidden_layers": 3, "hidden_size": 64 }
END
expect 0 'block.0 .. block.2 ' '[11008, 64]' -- inspect dense.json
# Its keys of experts are then known all the same.
cat >dense.yaml <<'END'
{ model_type: deepseek_v2, n_routed_experts: null, moe_intermediate_size: 1408, n_shared_experts: 2,
  num_hidden_layers: 3, hidden_size: 64 }
END
expect 0 'block.0 .. block.2 ' '[11008, 64]' -- inspect dense.yaml
printf '{ "model_type": "deepseek_v2", "q_lora_rank": 0 }' >no-rank.json
expect 1 'no-rank.json' 'q_lora_rank' 'or null for queries without a latent' -- inspect no-rank.json
printf '{ "model_type": "deepseek_v3", "qk_rope_head_dim": 63 }' >odd.json
expect 1 'odd.json' 'qk_rope_head_dim' 'must be even, found 63' -- inspect odd.json
cat >sparse.json <<'END'
{ "model_type": "deepseek_v2", "moe_layer_freq": 2, "first_k_dense_replace": 1, "num_hidden_layers": 4,
  "hidden_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2 }
END
expect 0 'block.0 .. block.1 ' 'block.2 ' 'block_moe' 'block.3 ' 'mlp.experts.down_proj' '[4, 64, 1407]' \
    -- inspect sparse.json

# A manifest may name the type outside of the hyper-parameters.
cat >outside.yaml <<'END'
arch: qwen3
config: { vocab_size: 100, hidden_size: 16, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 4 }
END
expect 0 'type      qwen3' 'self_attn.q_norm.weight' -- inspect outside.yaml

refuse() { # what it must say, model type, one more line
    printf 'model_type: %s\n%s\n' "$2" "$3" >refused.yaml
    expect 1 "$1" -- inspect refused.yaml
}
refuse "'gemma3n'" gemma3n 'hidden_size: 8'
refuse "'llama4_text'" llama4_text 'hidden_size: 8'
refuse "'longrope'" qwen2 'rope_scaling: { rope_type: longrope, factor: 2.0 }'
refuse "'layer_types.1' 'linear_attention' is not offered" qwen3 \
    $'num_hidden_layers: 2\nlayer_types: [full_attention, linear_attention]'
refuse "'layer_types' must be a list of num_hidden_layers entries, 3" gemma2 \
    $'num_hidden_layers: 3\nlayer_types: [full_attention]'
refuse 'use_sliding_window is not true' qwen2 $'num_hidden_layers: 1\nlayer_types: [sliding_attention]'
refuse "model_type 'ministral'" mistral $'num_hidden_layers: 1\nlayer_types: [full_attention]'
refuse "'gelu' is not offered" gemma2 'hidden_activation: gelu'
refuse "'use_bidirectional_attention'" gemma3_text 'use_bidirectional_attention: true'
refuse "'attn_logit_softcapping'" gemma3_text 'attn_logit_softcapping: 50.0'
refuse "'router_aux_loss_coef' must be 0 to 100, found -0.1" mixtral 'router_aux_loss_coef: -0.1'
refuse "'router_aux_loss_coef' must be 0 to 100, found 1e+300" mixtral 'router_aux_loss_coef: 1e300'
refuse "'router_aux_loss_coef' must be a finite number, found the number .inf" mixtral 'router_aux_loss_coef: .inf'
refuse "'aux_loss_alpha' must be 0 to 100, found 1000" deepseek_v2 'aux_loss_alpha: 1.0e3'
refuse "'rms_norm_eps' must be 0 to 1, found 1e+06" llama 'rms_norm_eps: 1.0e6'
refuse "'rms_norm_eps' must be a finite number, found the number .nan" llama 'rms_norm_eps: .nan'
refuse "'initializer_range' must be 0 to 100, found 2e+30" qwen3 'initializer_range: 2.0e30'
refuse "'query_pre_attn_scalar' must be above 0, at most 1e6, found 1e+40" gemma2 'query_pre_attn_scalar: 1.0e40'
refuse "'final_logit_softcapping' must be above 0, at most 1e6 (or null for none), found 1e+40" gemma2 \
    'final_logit_softcapping: 1.0e40'
refuse "'swiglu_limit' must be above 0, at most 1e6, found 1e+40" gpt_oss 'swiglu_limit: 1.0e40'
refuse "'routed_scaling_factor' must be above 0, at most 1000, found 1e+40" deepseek_v2 'routed_scaling_factor: 1.0e40'
refuse "llama_4_scaling_beta' must be 0 to 100, found 1e+40" ministral3 \
    'rope_parameters: { rope_type: default, llama_4_scaling_beta: 1.0e40 }'
refuse "'router_jitter_noise'" mixtral 'router_jitter_noise: 0.1'
refuse "'num_local_experts' is 5, but num_experts, which means the same, is 4" qwen3_moe \
    $'num_experts: 4\nnum_local_experts: 5'
refuse "'num_experts_per_tok' must be 1 to 4" qwen3_moe $'num_experts: 4\nnum_experts_per_tok: 5'
refuse "'topk_method' 'noaux_tc' is not offered" deepseek_v2 'topk_method: noaux_tc'
refuse "'topk_method' 'greedy' is not offered; expected 'noaux_tc'" deepseek_v3 'topk_method: greedy'
refuse "'scoring_func' 'softmax' is not offered" deepseek_v3 'scoring_func: softmax'
refuse "'n_group' 0 must divide" deepseek_v2 'topk_method: group_limited_greedy'
refuse "'n_group' 7 must divide the number of experts, 256" deepseek_v3 'n_group: 7'
refuse "'topk_group' must be 1 to n_group, 8" deepseek_v3 'topk_group: 9'
refuse "'topk_group' must be 1 to n_group, 64, and leave num_experts_per_tok experts, 8" deepseek_v3 \
    $'n_group: 64\ntopk_group: 1'
refuse "'n_group' must leave two experts a group" deepseek_v3 $'n_group: 256\ntopk_group: 8'
refuse "'num_key_value_heads' must be num_attention_heads, 128" deepseek_v3 'num_key_value_heads: 8'
refuse "'head_dim' must be qk_rope_head_dim, 64" deepseek_v3 'head_dim: 56'
refuse "'routed_scaling_factor' must be above 0" deepseek_v2 'routed_scaling_factor: 0.0'
refuse 'set it to false: train.router_bias_update_rate balances its experts' deepseek_v3 'output_router_logits: true'
refuse "'seq_aux' false is not offered" deepseek_v2 $'output_router_logits: true\nseq_aux: false'
refuse "'aux_loss_alpha' must be above 0" deepseek_v2 $'output_router_logits: true\naux_loss_alpha: 0.0'
refuse "'linear_num_key_heads' 16 must divide linear_num_value_heads 24" qwen3_next \
    'linear_num_value_heads: 24'
refuse "'sliding_attention' is not offered; expected full_attention or linear_attention" qwen3_5_text \
    $'num_hidden_layers: 1\nlayer_types: [sliding_attention]'
refuse "'router_aux_loss_coef' must be 0 to 100" qwen3_5_moe_text 'router_aux_loss_coef: -1.0'
refuse "needs 'factor' beside it" deepseek_v3 \
    'rope_scaling: { type: yarn, original_max_position_embeddings: 1024, mscale_all_dim: 1.0 }'
refuse "'deepseek_v32'" deepseek_v32 'hidden_size: 8'
refuse "'sliding_window' must be 1 to" mistral 'sliding_window: 0'
refuse "'swiglu_alpha' 1.5 is not offered" gpt_oss 'swiglu_alpha: 1.5'
refuse "'sliding_window' is null, but layer 0" gpt_oss 'sliding_window: null'
refuse 'full_attention and sliding_attention' gemma3_text 'rope_parameters: { rope_theta: 10000.0 }'

# ---- other commands ------------------------------------------------------------------------------

expect 0 'megatrain 0' 'plugin ABI 1.0' 'backend cpu' -- version
expect 0 'llama' 'adamw' 'safetensors' 'text' 'cpu' -- plugins list
expect 0 'provides' 'manifest' -- plugins info llama
expect 1 "there is no plugin 'lama'; did you mean 'llama'?" -- plugins info lama
expect 0 'all tests passed' 'gradients of every template' -- plugins check "$build/plugins/llama.so"
expect 0 'ok      defaults: the same updates in ranges' 'all tests passed' -- plugins check "$build/plugins/adamw.so"
expect 1 'some tests failed' -- plugins check "$build/plugins/nothing.so"

# check_optimizer RC NAME TEXT...: what `plugins check` finds in an optimizer of tests/plugins.
mkdir optimizers
chmod go-w . optimizers
check_optimizer() {
    cp "$build/tests/plugins/$2.so" optimizers/
    cat >"optimizers/$2.yaml" <<END
name: $2
version: 1.2.3
licence: Apache-2.0
kind: optim
abi: "1.0"
provides: [$2]
check:
  - { weight_decay: 0.1 }
  - {}
END
    expect "$1" "${@:3}" -- plugins check "optimizers/$2.so" --timeout "${limit:-60}"
}
check_optimizer 0 sample 'ok      check.0: the same' 'ok      check.1: the same' 'all tests passed'
cp optimizers/sample.{so,yaml} .
expect 0 'all tests passed' -- plugins check sample.so
check_optimizer 1 cut_matters 'FAILED  check.0' \
    'step 1 of a tensor of 6 x 35: element 1 of the weight depends on how the tensor is cut into ranges'
check_optimizer 1 writes_behind 'an update writes behind the range that it was given'
check_optimizer 1 not_finite 'element 0 of the weight becomes' 'of a gradient of'
# What ends or holds up its test's process has failed, with whatever exit code.
check_optimizer 1 exits 'FAILED  load, manifest, handshake: the plugin ended the process, with exit code 0' 'some tests failed'
check_optimizer 1 crashes 'FAILED  load, manifest, handshake: ended by signal 9' 'some tests failed'
limit=1 check_optimizer 1 hangs 'FAILED  load, manifest, handshake: not done after 1 second' 'some tests failed'

# A folder of MEGATRAIN_PLUGIN_PATH comes before the plugins that came with the program, and one of
# --plugin-dir before both.
mkdir mine given
chmod go-w . mine given
cp "$build"/plugins/llama.so "$build"/plugins/llama.yaml mine
cp mine/* given
MEGATRAIN_PLUGIN_PATH=$scratch/mine expect 0 "object       $scratch/mine/llama.so" -- plugins info llama
MEGATRAIN_PLUGIN_PATH=$scratch/mine expect 0 "object       $scratch/given/llama.so" -- \
    plugins info llama --plugin-dir "$scratch/given"
expect 0 "shadows      $scratch/mine/llama.so" -- \
    plugins info llama --plugin-dir "$scratch/given" --plugin-dir "$scratch/mine"
check 'a copy of the same version is not worth a line' bash -c '! grep -q "llama.so (version" out'
sed -i 's/^version: .*/version: 0.0.1/' mine/llama.yaml
expect 0 "$scratch/given/llama.so (version" "shadows $scratch/mine/llama.so (version 0.0.1)" -- \
    plugins list --plugin-dir "$scratch/given" --plugin-dir "$scratch/mine"

expect 0 'commands:' 'megatrain train first.yaml' -- --help
for command in train plan generate eval inspect bench 'bench step' plugins version; do
    # shellcheck disable=SC2086
    expect 0 "usage: megatrain $command" 'example' -- $command --help
    expect 0 "usage: megatrain $command" 'example' -- help $command
done

# ---- wrong usage ---------------------------------------------------------------------------------

expect 2 'commands:' --
expect 2 "unknown command 'trian'; did you mean 'train'?" -- trian
expect 2 "unknown option '--seriel'; did you mean '--serial'?" -- train run.yaml --seriel
expect 2 '--trace needs a value' -- train run.yaml --trace
expect 2 "'--serial'" -- train run.yaml --serail
expect 2 '--serial takes no value' -- train run.yaml --serial=yes
expect 2 "'max_steps' is no override" -- train run.yaml max_steps
expect 2 'which run?' -- train
expect 2 "--seed must be a whole number, not 'x'" -- generate model --seed x
expect 2 "--temperature must be a number, not 'warm'" -- generate model --temperature warm
expect 2 'one path at a time' -- inspect a b
expect 2 "unknown 'lst'; did you mean 'list'?" -- plugins lst
expect 2 'info needs' -- plugins info
# ---- layers without experts ----------------------------------------------------------------------

for type in qwen2_moe qwen3_moe qwen3_next; do
    {
        sed "s/llama/$type/" <<<"$(write_model /dev/stdout)"
        printf 'num_experts: 4\nnum_experts_per_tok: 2\nmoe_intermediate_size: 16\n'
        printf 'decoder_sparse_step: 1\nmlp_only_layers: [1, 0]\n'
    } >$type.yaml
    expect 0 -- inspect $type.yaml
    # Known also where no layer has experts to begin with.
    sed 's/sparse_step: 1/sparse_step: 9/' $type.yaml >dense.yaml
    expect 0 -- inspect dense.yaml
    for bad in 2 -1; do
        sed "s/\[1, 0\]/[1, $bad]/" $type.yaml >bad.yaml
        expect 1 "bad.yaml:" "'mlp_only_layers.1' must be a layer, 0 to 1, found $bad" -- inspect bad.yaml
    done
done

done_testing
