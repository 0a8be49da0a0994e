#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One thing named where another is expected: a model for a run, weights for a model, a key of the
# model's for one of the run's. The message says what it is, and what to name in its place.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "$0")/lib.sh"

example=$source_root/docs/examples/finetune
write_text text.txt
write_model model.yaml
write_run run.yaml
expect 0 -- export "$example/model.yaml" --init random --tokenizer "$example/tokenizer" -o base
sed -i 's/"chat_format"/"unused"/' base/config.json

# ---- no run manifests ---------------------------------------------------------------------------

for command in plan train eval; do
    expect 1 "base: is a model; name it as 'model:' in a run manifest" -- $command base
    expect 1 "model.yaml: is a model ('model_type' stands in it); name it as 'model:' in a run manifest" \
        -- $command model.yaml
done
expect 1 "config.json: is a model ('model_type' stands in it)" -- train base/config.json
expect 0 'finished' -- train run.yaml train.max_steps=4
expect 1 'run.yml: there is no such file; did you mean run.yaml?' -- train run.yml
expect 1 'run/urn.yaml: there is no such file; did you mean run/run.yaml?' -- plan run/urn.yaml
expect 1 'nothing.yaml: cannot open: No such file' -- plan nothing.yaml
expect 1 'run/: is a run folder; name its manifest, run/run.yaml' -- train run/
expect 1 'is a folder; expected a run manifest' -- train run/checkpoints
expect 1 'is a binary file (.safetensors); expected a run manifest' -- train base/model.safetensors

# ---- no models ----------------------------------------------------------------------------------

hub=meta-llama/Llama-3.2-1B
fetch="fetch this one by \`hf download $hub --local-dir Llama-3.2-1B\`"
expect 1 "names '$hub', which does not exist" "$fetch" -- plan run.yaml "model=$hub"
expect 1 "$hub: cannot open the model: No such file" "$fetch" -- inspect "$hub"
expect 1 "$hub: cannot open the model: No such file" "$fetch" -- export "$hub" -o x
expect 1 "$hub: cannot open the model: No such file" "$fetch" -- generate "$hub" --device cpu
expect 1 "https://huggingface.co/$hub: cannot open the model" "$fetch" -- inspect "https://huggingface.co/$hub"
for command in train plan eval 'bench start'; do
    # shellcheck disable=SC2086
    expect 1 "$hub: there is no such file; expected a run manifest" "$fetch" "as 'model:' there" -- $command "$hub"
done
expect 1 "'data.tokenizer' names '$hub', which does not exist" "$fetch" -- plan run.yaml "data.tokenizer=$hub"
expect 1 "$hub: there is no such file or folder" "$fetch" -- tokenize --tokenizer "$hub" text
expect 1 "$hub: there is no such file or folder" "$fetch" -- export model.yaml -o x --init random --tokenizer "$hub"
for file in models/missing.yaml models/missing.json ./missing missing a/b/c; do
    expect 1 "$file" 'No such file' -- inspect "$file"
    check "$file is no name on a hub" bash -c '! grep -q "hf download" out'
done

expect 1 'rum: cannot open the model' 'did you mean run?' -- generate rum --prompt x
expect 1 'step-000005: cannot open' 'did you mean run/checkpoints/step-000004?' -- export run/checkpoints/step-000005 -o x
expect 1 "names 'bsae', which does not exist; did you mean base?" -- plan run.yaml model=bsae
expect 1 'modle.yaml: cannot open the model' 'did you mean model.yaml?' -- inspect modle.yaml

expect 1 'is one file of a model (.safetensors); name its folder, base' -- inspect base/model.safetensors
printf 'GGUF\3\0\0\0' >llama.gguf
expect 1 'llama.gguf: is a binary file (.gguf), and models in one file are not read; name a Hugging Face folder' -- inspect llama.gguf
expect 1 'llama.gguf: is a binary file (.gguf), and models in one file are not read; name a Hugging Face folder' -- plan run.yaml model=llama.gguf
mkdir adapter
echo '{ "peft_type": "LORA" }' >adapter/adapter_config.json
expect 1 'adapters are not offered: merge it into its base model' -- plan run.yaml model=adapter
expect 1 'adapters are not offered: merge it into its base model' -- train adapter

# ---- tokenizers and templates -------------------------------------------------------------------

tune=(plan "$example/finetune.yaml" device=cpu data.cache=off "data.files=$example/dialogues.jsonl")
cp -r base pieces
rm pieces/tokenizer*
touch pieces/tokenizer.model
expect 1 'holds tokenizer.model but no tokenizer.json, which alone is read' \
    'the model has no tokenizer' -- "${tune[@]}" model=pieces
cp -r base strange
echo '{ "eos_token": "<|im_end|>", "chat_template": "{{ messages }}" }' >strange/tokenizer_config.json
expect 1 'not the template of a known format; name the one to use with data.chat_format: ' \
    'the model has no chat format; name one with data.chat_format: ' 'chatml, ' -- "${tune[@]}" model=strange
expect 0 -- "${tune[@]}" model=strange data.chat_format=chatml

# ---- data, and where it is looked for ------------------------------------------------------------

expect 1 "'t/none.txt': cannot open: No such file or directory, tried $PWD/t/none.txt" \
    'relative to the working directory' -- plan run.yaml data.files=t/none.txt
expect 1 "matches no file that can be read (relative to the working directory)" -- plan run.yaml 'data.files=t/*.txt'
expect 1 "--data t/none.txt: 'data.validation_files' 't/none.txt': cannot open" -- eval run.yaml --data t/none.txt
mkdir "it's"
cp text.txt "it's/text.txt"
expect 0 'validation loss' -- eval run.yaml --data "it's/text.txt"

# ---- keys of the model's -------------------------------------------------------------------------

expect 1 "'output_router_logits': is a hyper-parameter: set it in the model's config.json or manifest" \
    -- train run.yaml output_router_logits=true
expect 1 "'router_aux_loss_coef': is a hyper-parameter" 'train.router_bias_update_rate' \
    -- train run.yaml train.router_aux_loss_coef=0.01

# ---- plugins of others ---------------------------------------------------------------------------

sed 's/model_type: llama/model_type: mini/' model.yaml >mini.yaml
expect 1 "no plugin provides arch 'mini'" '--plugin-dir DIR or MEGATRAIN_PLUGIN_PATH' -- inspect mini.yaml
done_testing
