#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The fine-tuning example end to end: a model folder and a JSONL file go in, a model folder that
# knows the dialogues by heart comes out; and a run that is killed in its second epoch goes on with
# exactly what it had not yet seen.
. "$(dirname "$0")/lib.sh"

example=$source_root/docs/examples/finetune
cd "$source_root" || exit 1 # the manifest names its data from here
run=(train "$example/finetune.yaml" "model=$scratch/base" device=cpu)

"$megatrain" export "$example/model.yaml" --init random --seed 1 --tokenizer "$example/tokenizer" \
    -o "$scratch/base" >"$scratch/out" 2>&1
check 'the base model is made' test -f "$scratch/base/model.safetensors"
for name in tokenizer.json tokenizer_config.json; do
    check "with its $name" cmp "$example/tokenizer/$name" "$scratch/base/$name"
done

# What transformers writes where no length was set, more than 64 bits.
wide=1000000000000000019884624838656
sed -i "s/\"model_max_length\": 128/\"model_max_length\": $wide/" "$scratch/base/tokenizer_config.json"
sed -i "1s/{/{ \"max_length\": $wide,/" "$scratch/base/config.json"
echo "{ \"eos_token_id\": 1, \"max_length\": $wide }" >"$scratch/base/generation_config.json"
check 'of tokenizer_config.json' grep -q "_length\": $wide" "$scratch/base/tokenizer_config.json"

# ---- killed in the middle of epoch 2 --------------------------------------------------------------

# 6 steps an epoch.
four=(train.num_train_epochs=4 checkpoint.save_steps=9 checkpoint.save_total_limit=0)
"$megatrain" "${run[@]}" "output_dir=$scratch/whole" "${four[@]}" >"$scratch/out" 2>&1
check 'four epochs are 24 steps' grep -q 'finished: step 24 of 24' "$scratch/out"
position=$(tr -d ' \n' <"$scratch/whole/checkpoints/step-000009/state.json")
check 'step 9 is inside epoch 2' grep -qE '"epoch":1,"index":0,"offset":3,' <<<"$position"

"$megatrain" "${run[@]}" "output_dir=$scratch/killed" "${four[@]}" >"$scratch/out" 2>&1 &
pid=$!
for ((i = 0; i < 3000; i++)); do
    [[ -f $scratch/killed/checkpoints/step-000009/state.json ]] && break
    sleep 0.02
done
kill -KILL $pid 2>/dev/null
wait $pid 2>/dev/null
rm -rf "$scratch"/killed/checkpoints/step-00001[0-9] "$scratch"/killed/checkpoints/step-00002?
"$megatrain" "${run[@]}" "output_dir=$scratch/killed" "${four[@]}" >"$scratch/out" 2>&1
check 'it resumes at step 9' grep -q 'step-000009: step 9 of 24 done' "$scratch/out"
check 'the weights and states are those of the whole run' \
    same_checkpoint "$scratch/whole/checkpoints/step-000024" "$scratch/killed/checkpoints/step-000024"
check 'so are all losses' diff <(timeless "$scratch/whole/metrics.jsonl") <(timeless "$scratch/killed/metrics.jsonl")

# ---- learnt by heart --------------------------------------------------------------------------------

"$megatrain" "${run[@]}" "output_dir=$scratch/run" >"$scratch/out" 2>&1
check 'finished and exported' grep -q "to $scratch/run/model" "$scratch/out"
loss=$(tail -n 1 "$scratch/run/metrics.jsonl" | sed 's/.*"loss": \([0-9.e-]*\),.*/\1/')
check "all 64 answers are learnt: loss $loss" awk "BEGIN { exit !($loss < 0.03) }"

says() { # TEXT MODEL QUESTION...
    local text=$1 model=$2 got
    shift 2
    got=$("$megatrain" generate "$model" --chat --temperature 0 --device cpu "$@" 2>"$scratch/err" </dev/null)
    check "$*: '$got' instead of '$text'" test "$got" = "$text"
}
for model in "$scratch/run" "$scratch/run/model"; do
    says 'Paris, by the Seine.' "$model" --prompt 'What is the capital of France?'
    says 'It is Berlin.' "$model" --prompt 'Name the capital of Germany.'
    says 'Rome does; it lies by the Tiber.' "$model" --prompt 'Which city governs Italy?'
    says 'Helsinki!' "$model" --prompt 'Finland: its capital?'
done
says 'Sofia.' "$scratch/run/model" --prompt 'Which city governs Bulgaria?' --system 'Be brief.'
check 'the card knows the base' grep -q 'base_model: "base"' "$scratch/run/model/README.md"
check 'the folder is complete' test -f "$scratch/run/model/config.json" -a \
    -f "$scratch/run/model/tokenizer.json" -a -f "$scratch/run/model/tokenizer_config.json"

check 'what it says of lengths is as it was' cmp "$scratch/base/tokenizer_config.json" "$scratch/run/model/tokenizer_config.json"

# ---- evaluated on any data ---------------------------------------------------------------------------

trained_on=$(sed -n 's/^ *files: *//p' "$scratch/run/run.yaml" | tr -d '"' | head -n 1)
"$megatrain" eval "$scratch/run/run.yaml" --data "$trained_on" >"$scratch/out" 2>&1
check 'the data that it was trained on: perplexity near 1' grep -qE 'perplexity 1\.0' "$scratch/out"
"$megatrain" eval "$scratch/run/run.yaml" --data "$trained_on" --checkpoint "$scratch/base" \
    >"$scratch/out" 2>&1
check 'the base model does not know it' grep -qE 'perplexity [0-9]{3}' "$scratch/out"
done_testing
