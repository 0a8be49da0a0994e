#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Exact parameter counts of published models, and the commands that need no model.
. "$(dirname "$0")/lib.sh"

models=$source_root/arch/llama/models
expect 0 '8,030,261,248 parameters' 'block.0 .. block.31' -- inspect "$models/llama-3.1-8b.yaml"
expect 0 '6,738,415,616 parameters' -- inspect "$models/llama-2-7b.yaml"
expect 0 '1,100,048,384 parameters' 'self_attn.k_proj.weight' '[256, 2048]' -- inspect "$models/tinyllama-1.1b.yaml"
expect 0 '"total_parameters": 1100048384' '"name": "model.layers.21.mlp.down_proj.weight"' \
    -- inspect "$models/tinyllama-1.1b.yaml" --json

expect 0 'megatrain 0' 'plugin ABI 1.0' 'backend cpu' -- version
expect 0 'llama' 'adamw' 'safetensors' 'text' 'cpu' -- plugins list
expect 0 'provides' 'manifest' -- plugins info llama
expect 1 "there is no plugin 'lama'; did you mean 'llama'?" -- plugins info lama
expect 0 'all tests passed' 'gradients of every template' -- plugins check "$build/plugins/llama.so"
expect 0 'all tests passed' -- plugins check "$build/plugins/adamw.so"
expect 1 'some tests failed' -- plugins check "$build/plugins/nothing.so"

# A folder of MEGATRAIN_PLUGIN_PATH comes before the plugins that came with the program, and one of
# --plugin-dir before both.
mkdir mine given
chmod go-w . mine given
cp "$build"/plugins/llama.so "$build"/plugins/llama.yaml mine
cp mine/* given
MEGATRAIN_PLUGIN_PATH=$scratch/mine expect 0 "object       $scratch/mine/llama.so" -- plugins info llama
MEGATRAIN_PLUGIN_PATH=$scratch/mine expect 0 "object       $scratch/given/llama.so" -- \
    plugins info llama --plugin-dir "$scratch/given"

expect 0 'commands:' -- --help
for command in train plan generate eval inspect bench 'bench step' plugins version; do
    # shellcheck disable=SC2086
    expect 0 "usage: megatrain $command" 'example' -- $command --help
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
done_testing
