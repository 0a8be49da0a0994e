#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From dialogues to a model that repeats them: training on messages, generate and its chat mode.
. "$(dirname "$0")/lib.sh"

mkdir model
cp "$source_root/tests/chat/fixtures/tokenizers/qwen.json" model/tokenizer.json
printf '{"eos_token": "<|im_end|>"}' >model/tokenizer_config.json
cat >model.yaml <<END
model_type: llama
vocab_size: 768
hidden_size: 64
intermediate_size: 128
num_hidden_layers: 2
num_attention_heads: 4
num_key_value_heads: 2
max_position_embeddings: 256
END
cat >chat.jsonl <<'END'
{"messages": [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "It is Paris, on the Seine."}, {"role": "user", "content": "And of Japan?"}, {"role": "assistant", "content": "That one is Tōkyō: 東京."}]}
{"messages": [{"role": "user", "content": "Name a color."}, {"role": "assistant", "content": "Blue, like the sky."}]}
{"messages": [{"role": "system", "content": "Be loud."}, {"role": "user", "content": "Name a color."}, {"role": "assistant", "content": "RED!"}]}
END
cat >run.yaml <<END
model: model.yaml
device: cpu
seed: 3
output_dir: run
data:
  files: chat.jsonl
  tokenizer: model
  chat_format: chatml
  max_seq_len: 128
  validation_split: 0
train:
  max_steps: 60
  micro_batch_size: 2
  learning_rate: 1.0e-2
  lr_scheduler_type: constant
  warmup_steps: 3
END

# says TEXT ARGUMENTS...: generating greedily writes exactly this.
says() {
    local text=$1 got
    shift
    got=$("$megatrain" generate "$@" --temperature 0 --device cpu 2>err </dev/null)
    if [[ $got == "$text" ]]; then
        ok
    else
        fail "generate $*: '$got' instead of '$text'"
        cat err >&2
    fi
}

expect 0 'finished: step 60 of 60' -- train run.yaml

# ---- what is trained ------------------------------------------------------------------------------

labels() { "$megatrain" tokenize --tokenizer model --file chat.jsonl --show-labels "$@" >out 2>err; }
labels --chat-format chatml
check 'it says which format' grep -qx 'conversations as chatml' err
check 'answers with their end-of-turn tokens are trained, and nothing else' diff out - <<'END'
document 1: 106 tokens, 43 trained
<|im_start|>user
What is the capital of France?<|im_end|>
<|im_start|>assistant
⟦It is Paris, on the Seine.<|im_end|>⟧
<|im_start|>user
And of Japan?<|im_end|>
<|im_start|>assistant
⟦That one is Tōkyō: 東京.<|im_end|>⟧


document 2: 40 tokens, 15 trained
<|im_start|>user
Name a color.<|im_end|>
<|im_start|>assistant
⟦Blue, like the sky.<|im_end|>⟧


document 3: 47 tokens, 5 trained
<|im_start|>system
Be loud.<|im_end|>
<|im_start|>user
Name a color.<|im_end|>
<|im_start|>assistant
⟦RED!<|im_end|>⟧


END
labels --chat-format chatml --documents 1 train_on=last
check 'one document' test "$(grep -c '^document' out)" = 1
check 'of which the last answer is trained' test "$(grep -c ⟦ out)" = 1
expect 1 'has no chat format' -- tokenize --tokenizer model --file chat.jsonl --show-labels
echo '{"instruction": "Name a color.", "output": "Blue."}' >alpaca.jsonl
expect 0 'instructions as alpaca' '### Response:' -- tokenize --tokenizer model --file alpaca.jsonl --show-labels
# The folder of a model that names its format, as training finds it.
cp -r model named-model
echo '{"model_type": "llama", "chat_format": "alpaca"}' >named-model/config.json
expect 0 '### Instruction:' -- tokenize --tokenizer named-model --file chat.jsonl --show-labels --documents 1
expect 1 "did you mean 'train_on'" -- tokenize --tokenizer model --file chat.jsonl \
    --chat-format chatml --show-labels trainon=last
for option in --no-special --literal --pieces --count --decode '-o x.bin' '--separator none'; do
    # shellcheck disable=SC2086 # an option and its value
    expect 2 '--show-labels shows what training sees' -- tokenize --tokenizer model --show-labels $option
done
expect 1 'the standard input is empty' -- tokenize --tokenizer model --show-labels
labels --chat-format chatml
mv out from-file
"$megatrain" tokenize --tokenizer model --show-labels --chat-format chatml <chat.jsonl >out 2>err
check 'the standard input has the labels of the file' cmp out from-file
echo 'Blue, like the sky.' | "$megatrain" tokenize --tokenizer model --show-labels >out 2>err
check 'text on the standard input' grep -q '⟦.*like the sky' out
echo '{"messages": 5}' | TMPDIR=$PWD "$megatrain" tokenize --tokenizer model --show-labels --chat-format chatml >out 2>&1
check 'a bad record on the standard input' grep -q 'standard-input.jsonl:1: ' out
check 'nothing is left of the standard input' test -z "$(find "$PWD" -name 'megatrain-*')"
# A reader that leaves early ends the program: nothing is left of the input all the same.
{ echo '{"text": "'"$(head -c 300000 /dev/zero | tr '\0' a)"'"}'; } |
    TMPDIR=$PWD "$megatrain" tokenize --tokenizer model --show-labels 2>/dev/null | head -c 10 >/dev/null
check 'nor when its reader leaves' test -z "$(find "$PWD" -name 'megatrain-*')"
# Nor when a signal ends it.
mkdir signalled
yes "$(head -c 900 /dev/zero | tr '\0' 'a ')" | head -c 20000000 |
    TMPDIR=$PWD/signalled "$megatrain" tokenize --tokenizer model --show-labels >/dev/null 2>&1 &
for ((i = 0; i < 1000; i++)); do
    [[ -n $(find signalled -name 'standard-input.txt') ]] && break
    sleep 0.02
done
check 'the input is kept in a file' test -n "$(find signalled -name 'standard-input.txt')"
kill -TERM $!
wait $!
check 'the signal is what ends it' test $? = 143
check 'nor when a signal ends it' test -z "$(find signalled -name 'megatrain-*')"
yes 'a long text' | head -c 20000000 >signalled/long.txt
"$megatrain" tokenize --tokenizer model --file signalled/long.txt -o signalled/long.bin >/dev/null 2>&1 &
for ((i = 0; i < 1000; i++)); do
    [[ -n $(find signalled -name 'long.bin.partial*') ]] && break
    sleep 0.01
done
check 'tokens are kept aside' test -n "$(find signalled -name 'long.bin.partial*')"
kill -TERM $!
wait $!
check 'the signal ends this, too' test $? = 143
check 'and leaves no half of a file' test "$(ls signalled)" = long.txt
# Two that write the same at once do not mix: the last one's is whole.
head -c 2000000 signalled/long.txt >signalled/some.txt
expect 0 'tokens of 1 document' -- tokenize --tokenizer model --file signalled/some.txt -o signalled/alone.bin
"$megatrain" tokenize --tokenizer model --file signalled/some.txt -o signalled/both.bin >/dev/null 2>&1 &
for ((i = 0; i < 1000; i++)); do
    [[ -n $(find signalled -name 'both.bin*') ]] && break
    sleep 0.01
done
expect 0 'tokens of 1 document' -- tokenize --tokenizer model -o signalled/both.bin 'a short text'
expect 0 'tokens of 1 document' -- tokenize --tokenizer model -o signalled/short.bin 'a short text'
wait $!
check 'two that write the same: both succeed' test $? = 0
check 'two that write the same: one is whole' bash -c \
    'cmp -s signalled/alone.bin signalled/both.bin || cmp signalled/short.bin signalled/both.bin'
# A mark of byte order is no part of the text, and does not hide that it is JSON.
printf '\xef\xbb\xbf' | cat - chat.jsonl | "$megatrain" tokenize --tokenizer model --show-labels --chat-format chatml >out 2>err
check 'a mark of byte order before records' cmp out from-file
cp chat.jsonl 'it is "quoted".jsonl'
"$megatrain" tokenize --tokenizer model --show-labels --chat-format chatml --file 'it is "quoted".jsonl' >out 2>err
check 'a name with quotes' cmp out from-file
expect 1 "--file nowhere: 'files' 'nowhere': cannot open" -- tokenize --tokenizer model --show-labels --file nowhere
# The format as one of the data's keys, by name and spelled out.
labels chat_format=chatml
check 'the format is a key of the data, too' cmp out from-file
labels 'chat_format={system: "S {content}", user: "U {content}|", assistant: "A {content}<|im_end|>", end_of_turn: "<|im_end|>"}'
check 'which may spell it out' grep -qF 'U What is the capital of France?|⟦A It is Paris' out
expect 1 "unknown key 'usr'" -- tokenize --tokenizer model --file chat.jsonl --show-labels --documents 1 \
    'chat_format={usr: "a", system: "S {content}", user: "U {content}|", assistant: "A {content}<|im_end|>", end_of_turn: "<|im_end|>"}'
expect 1 'one of the two' -- tokenize --tokenizer model --file chat.jsonl --show-labels --chat-format chatml chat_format=alpaca
expect 2 'at least 1, not 0' -- tokenize --tokenizer model --file chat.jsonl --show-labels --documents 0
expect 2 'key=value' -- tokenize --tokenizer model --file chat.jsonl --show-labels last
expect 2 '--documents is for --show-labels' -- tokenize --tokenizer model --documents 3 a
expect 2 'do not apply' -- tokenize --tokenizer model --file chat.jsonl --show-labels --count

# ---- one answer ---------------------------------------------------------------------------------

says 'Blue, like the sky.' run --chat --prompt 'Name a color.'
says 'It is Paris, on the Seine.' run --chat --prompt 'What is the capital of France?'
says 'RED!' run --chat --prompt 'Name a color.' --system 'Be loud.'
says 'RED!' run --chat --prompt 'Name a color.' --system 'Be loud.' --raw
says 'Blue, li' run --chat --prompt 'Name a color.' --max-tokens 8
echo 'Name a color.' >prompt.txt
says 'Blue, like the sky.' run --chat --prompt-file prompt.txt
"$megatrain" generate run --chat --temperature 0 --device cpu <prompt.txt >out 2>err
check 'a message from the standard input' grep -qx 'Blue, like the sky.' out
"$megatrain" generate run --chat --prompt-file - --temperature 0 --device cpu <prompt.txt >out 2>err
check 'the same, said so' grep -qx 'Blue, like the sky.' out

# The tokenizer and the format are the run's. Its checkpoints carry the tokenizer; one without needs
# to be told.
cp -r run/checkpoints/step-000060 moved
check 'a checkpoint carries the tokenizer that the run was given' cmp model/tokenizer.json moved/tokenizer.json
rm moved/tokenizer*.json
expect 1 'no tokenizer beside it' '--tokenizer' -- generate moved --prompt a
mkdir models checkpoints
cp -r moved models # where run.yaml is two folders above it, and of no run
cp -r moved checkpoints
rm checkpoints/moved/state.json
for moved in models/moved checkpoints/moved; do
    expect 1 'no tokenizer beside it' '--tokenizer' -- generate "$moved" --prompt a
done
rm -r models checkpoints
cp model/* moved
says 'Blue, like the sky.' moved --chat --prompt 'Name a color.'
check 'which knows the format that the run was given' grep -q '"chat_format": "chatml"' moved/config.json
sed -i '/"chat_format"/d' moved/config.json
expect 1 'does not say how it was taught' '--chat-format' -- generate moved --chat --prompt a
says 'Blue, like the sky.' moved --chat --prompt 'Name a color.' --chat-format chatml
says 'Blue, like the sky.' moved --chat --prompt 'Name a color.' --chat-format chatml --tokenizer model
echo '{"chat_template": "{{ \"<|im_start|>\" }} {{ \"<|im_end|>\" }}"}' >moved/chat_template.json
"$megatrain" generate moved --chat --prompt 'Name a color.' --temperature 0 --device cpu >out 2>err
check 'a template that looks like a known one' grep -qx 'Blue, like the sky.' out
check 'which is said' grep -q "taken for 'chatml'" err

# The model manifest says it for its runs, and its checkpoints keep it; what cannot be had is left
# out where nobody asked for it.
{ cat model.yaml && echo 'chat_format: chatml'; } >named.yaml
sed '/chat_format/d' run.yaml >named-run.yaml
short=(train.max_steps=4 output_dir=named)
expect 0 'finished' -- train named-run.yaml model=named.yaml "${short[@]}"
check 'a checkpoint names its format' grep -q '"chat_format": "chatml"' named/checkpoints/*/config.json
sed -i 's/chatml/gemma/' named.yaml
expect 1 "format is not used: chat format 'gemma' needs the token '<start_of_turn>'" \
    'has no chat format' -- train named-run.yaml model=named.yaml "${short[@]}" output_dir=other
expect 1 "'data.chat_format' cannot be had" "'gemma' needs the token" -- train run.yaml data.chat_format=gemma output_dir=other

# A model may spell it out as well, and a run's own goes along with its checkpoints.
{
    cat model.yaml
    printf 'chat_format:\n  system: "S: {content}\\n"\n  user: "Q: {content}\\n"\n  assistant: "A: {content}<|im_end|>\\n"\n'
    printf '  end_of_turn: "<|im_end|>"\n'
} >spelled.yaml
expect 0 'conversations as custom' -- train named-run.yaml model=spelled.yaml train.max_steps=4 output_dir=spelled
expect 0 -- export spelled -o spelled-out
for folder in spelled/checkpoints/* spelled-out; do
    check "$folder spells the format out" grep -q '"user": "Q: {content}' "$folder/config.json"
done
cp model/tokenizer* spelled-out/
expect 0 'Q: What is the capital of France?' -- tokenize --tokenizer spelled-out --file chat.jsonl --show-labels
expect 0 -- generate spelled-out --chat --prompt a --max-tokens 2 --device cpu
expect 0 -- inspect spelled.yaml
sed 's/  user:/  usr:/' spelled.yaml >misspelled.yaml
expect 1 "misspelled.yaml:" "'chat_format.user' is missing" -- train named-run.yaml model=misspelled.yaml output_dir=other
sed '$a\  generation_promt: "A:"' spelled.yaml >misspelled.yaml
expect 1 "unknown key 'generation_promt' in 'chat_format'; did you mean 'generation_prompt'?" \
    -- train named-run.yaml model=misspelled.yaml output_dir=other
expect 0 -- train run.yaml 'data.chat_format={system: "S {content}", user: "U {content}", assistant: "A {content}<|im_end|>", end_of_turn: "<|im_end|>"}' \
    train.max_steps=4 output_dir=given
check "the run's format is kept" grep -q '"user": "U {content}"' given/checkpoints/*/config.json

# ---- text ---------------------------------------------------------------------------------------

rendered=$'<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n'
says "${rendered}Blue, like the sky." run --prompt "$rendered"
says 'Blue, like the sky.' run --prompt "$rendered" --raw
printf %s "$rendered" >prompt.txt
says 'Blue, like the sky.' run --prompt-file prompt.txt --raw

# ---- a conversation at a terminal -----------------------------------------------------------------

if command -v script >/dev/null; then
    printf '%s\n' 'What is the capital of France?' 'And of Japan?' '' '/clear' 'Name a color.' \
        '/exit' 'never read' |
        script -qec "'$megatrain' generate run --chat --temperature 0 --device cpu" /dev/null |
        tr -d '\r' >out
    check 'the format is named' grep -q "chat format 'chatml'" out
    check 'a first answer' grep -qx '> It is Paris, on the Seine.' out
    check 'a second one knows the first' grep -qx '> That one is Tōkyō: 東京.' out
    check 'a new beginning' grep -qx '> > > Blue, like the sky.' out
    printf '%s\n' 'What is the capital of France?' 'And of Japan?' '/clear' 'Name a color.' |
        script -qec "'$megatrain' generate run --chat --temperature 0 --device cpu --context 60" \
            /dev/null | tr -d '\r' >out
    check 'a conversation that is too long: said' grep -q 'there is room for 60; begin anew' out
    check 'and gone on with' grep -q 'Blue, like the sky.' out
    script -qec "'$megatrain' generate run --chat --device cpu --context 100000" /dev/null </dev/null >out
    check 'a conversation longer than the model has positions' test $? = 1
    check 'is refused' grep -q -- "--context 100000 is more than the model's [0-9]* positions; lower it" out
fi

# ---- usage --------------------------------------------------------------------------------------

expect 2 'give one of the two' -- generate run --prompt a --prompt-file b
expect 2 '--system is for --chat' -- generate run --system a
expect 2 '--chat-format is for --chat' -- generate run --chat-format a
expect 2 'at a terminal' -- generate run --chat --context 9
expect 1 "unknown chat format 'x'; there are chatml, " 'qwen2.5' -- generate run --chat --prompt a --chat-format x
expect 1 'none.txt' -- generate run --prompt-file none.txt
expect 1 'lower --max-tokens to' -- generate run --chat --prompt a --max-tokens 256
done_testing
