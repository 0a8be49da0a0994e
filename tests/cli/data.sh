#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Data of a run: what manifests say of it, its token cache, malformed records by file and line, and
# going on in the middle of an epoch. What documents become is tested in tests/data.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "$0")/lib.sh"

mkdir words
cp "$source_root/tests/oracle/fixtures/tokenizer/llama3.json" words/tokenizer.json
echo '{ "bos_token": "<s>", "eos_token": "</s>" }' >words/tokenizer_config.json
write_model model.yaml
sed -i 's/vocab_size: 256/vocab_size: 809/; s/embeddings: 128/embeddings: 512/; $a chat_format: chatml' model.yaml

for ((i = 0; i < 40; i++)); do
    printf '{"messages": [{"role": "user", "content": "What is %d and one?"}, {"role": "assistant", "content": "%d."}]}\n' \
        $i $((i + 1))
done >chat.jsonl
awk 'BEGIN { for (i = 0; i < 30; i++) printf "{\"question\": \"Say %d.\", \"answer\": \" %d\"}\n", i, i }' >questions.jsonl
write_run run.yaml
sed -i 's/loader: text/tokenizer: words/; s/files: text.txt/files: chat.jsonl/' run.yaml

# ---- the cache ----------------------------------------------------------------------------------

expect 0 'data: files: tokenised' 'kept in' 'data: files: messages: 40 samples, ' -- plan run.yaml
expect 0 'data: files: messages: 40 samples, ' -- plan run.yaml
check 'tokenised once only' bash -c '! grep -q tokenised out'
sed -i 's/"39 and one/"38 and one/; s/"40\./"42./' chat.jsonl
expect 0 'data: files: tokenised' -- plan run.yaml
expect 0 'data: files: tokenised' -- plan run.yaml data.cache=off
expect 0 'kept in here/it/is' -- plan run.yaml data.cache=here/it/is
check 'in the folder that was named' test -n "$(compgen -G 'here/it/is/*.tokens')"

# ---- manifests ----------------------------------------------------------------------------------

sed 's/files: chat.jsonl/datasets:\n    - files: chat.jsonl\n      weight: 2\n    - files: questions.jsonl\n      columns: { prompt: question, completion: answer }/' \
    run.yaml >sets.yaml
expect 0 'data: datasets.0.files: messages: 40 samples' \
    'data: datasets.1.files: prompt_completion: 30 samples' -- plan sets.yaml
sed 's/weight: 2/wieght: 2/' sets.yaml >bad.yaml
expect 1 'bad.yaml:9:7: ' "'wieght'" "did you mean 'weight'?" -- plan bad.yaml
sed 's/completion: answer/completion: answer, txt: other/' sets.yaml >bad.yaml
expect 1 'bad.yaml:11:56: ' "'txt'" "did you mean 'text'?" -- plan bad.yaml
sed 's/weight: 2/weight: -2/' sets.yaml >bad.yaml
expect 1 'bad.yaml:9:15: ' 'is -2; expected a number above 0' -- plan bad.yaml
echo '{}' >keyless.jsonl
expect 1 "'data.files' begin with records without keys" -- plan run.yaml data.files=keyless.jsonl
for kind in '\xff\xfea is UTF-16' '\xfe\xff\x00a is UTF-16' '\x1f\x8b\x08 is compressed by gzip' \
    '\x28\xb5\x2f\xfd is compressed by zstd' 'PK\x03\x04 is a zip archive' 'PAR1 is a Parquet table'; do
    for file in kind.jsonl kind.txt; do
        # shellcheck disable=SC2059
        printf "${kind%% is*}" >$file
        expect 1 "$file: is${kind#* is}; expected text in UTF-8" -- plan run.yaml data.files=$file
    done
done
expect 1 'the records have the keys question, answer' 'data.columns' -- plan run.yaml data.files=questions.jsonl
expect 1 "is 'lst'; expected one of assistant, last, all" -- plan run.yaml data.train_on=lst
expect 1 'no chat format' -- plan run.yaml data.chat_format=none

# ---- malformed records --------------------------------------------------------------------------

sed '7s/"content": "[^"]*"/"content": 7/; 21s/assistant/narrator/' chat.jsonl >bad.jsonl
expect 1 "bad.jsonl:7: 'content' of a turn is a number" 'data.on_error: skip' -- plan run.yaml data.files=bad.jsonl
echo '{"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Ho."}]}' >other.jsonl
expect 1 "other.jsonl:1: 'messages' is " 'is of the format sharegpt, but the files are read as messages' \
    'data.datasets' -- plan run.yaml data.files='[chat.jsonl, other.jsonl]'
expect 0 'bad.jsonl:7: skipped: ' "bad.jsonl:21: skipped: a turn of 'narrator'" \
    'malformed records, skipped: 2' 'messages: 38 samples' -- plan run.yaml data.files=bad.jsonl data.on_error=skip

# An integer of more than 64 bits is none of our business, but for where ids are.
wide=1000000000000000019884624838656
sed "3s/^{/{\"id\": $wide, /" chat.jsonl >wide.jsonl
expect 0 'messages: 40 samples' -- plan run.yaml data.files=wide.jsonl
echo "{\"input_ids\": [1, $wide]}" >ids.jsonl
expect 1 'ids.jsonl:1: token 1 of input_ids is no integer' -- plan run.yaml data.files=ids.jsonl
echo "{\"id\": $wide, \"text\": \"Say one.\"}" >text.jsonl
expect 0 'tokens of 1 document' -- tokenize --tokenizer words --file text.jsonl -o text.bin

# ---- other files --------------------------------------------------------------------------------

"$megatrain" tokenize --tokenizer words --file "$source_root/LICENSE" --separator blank_line -o license.bin 2>/dev/null
expect 0 'data: files: token files: ' -- plan run.yaml data.files=license.bin
n=$(grep -o 'token files: [0-9]* samples, [0-9]* tokens' out)
cp "$source_root/LICENSE" license.txt
expect 0 'data: files: text files: ' -- plan run.yaml data.files=license.txt data.document_separator=blank_line
check "token files = text: $n" grep -qF "${n/token/text}" out

# ---- alpaca, for a model without a chat format --------------------------------------------------

sed -i '/chat_format/d' model.yaml
echo '[{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Sing.", "output": "La."}]' >alpaca.json
expect 0 'data: files: alpaca: 2 samples' -- plan run.yaml data.files=alpaca.json data.max_seq_len=512
echo 'chat_format: chatml' >>model.yaml

# ---- going on in the middle of the second epoch -------------------------------------------------

epochs=(data.train_on=all train.max_steps=null train.num_train_epochs=2 train.lr_scheduler_type=constant
    checkpoint.save_steps=0 train.eval_steps=0 data.datasets.1.weight=0.7)
expect 0 'finished: step' -- train sets.yaml "${epochs[@]}"
steps=$(grep -c '"loss"' run/metrics.jsonl)
check "two epochs are enough steps to stop between: $steps" test "$steps" -gt 12
last=$(printf 'step-%06d' "$steps")
stop=$((steps * 3 / 4))
# Stopped by the number of steps, which is not part of what is resumed.
expect 0 "finished: step $stop of $stop" -- train sets.yaml "${epochs[@]}" output_dir=parts train.num_train_epochs=null train.max_steps=$stop
check 'stopped in the second epoch' grep -q '"epoch": 1,' "parts/checkpoints/$(printf 'step-%06d' $stop)/state.json"
expect 0 'resuming from' "finished: step $steps of $steps" -- train sets.yaml "${epochs[@]}" output_dir=parts
check 'the same weights as in one go' same_checkpoint "run/checkpoints/$last" "parts/checkpoints/$last"

# One byte of a record, and it is other data, though as much.
sed -i 's/Say 3\./Say 4./' questions.jsonl
expect 1 'hold other text' -- train sets.yaml "${epochs[@]}" output_dir=parts train.num_train_epochs=3

# ---- caches that are no longer used --------------------------------------------------------------

caches=$XDG_CACHE_HOME/megatrain/data
expect 0 -- cache clean --all
rm -rf "$caches" old.txt kept.txt new.txt
for name in old kept; do
    write_text $name.txt
    echo $name >>$name.txt
done
for name in old kept; do
    expect 0 -- plan run.yaml "data.files=$name.txt" data.datasets=null
    key=$(cd "$caches" && ls -t ./*.tokens | head -n 1)
    declare "$name=${key%.tokens}"
done
check 'two caches' test "$(ls "$caches" | grep -c tokens)" = 2
expect 0 "used 0 days ago  $PWD/old.txt" "used 0 days ago  $PWD/kept.txt" 'in 2 caches' -- cache
cp old.txt moved.txt
expect 0 -- plan run.yaml 'data.files=[moved.txt]' data.datasets=null
expect 0 "$PWD/moved.txt" 'in 2 caches' -- cache
expect 0 -- plan run.yaml 'data.files=[kept.txt, old.txt]' data.datasets=null data.cache=two
expect 0 "$PWD/kept.txt and 1 more" -- cache --dir two
touch -d '100 days ago' "$caches"/*
touch -d '60 days ago' "$caches/$kept.used"
expect 0 'used 100 days ago' 'used 60 days ago' -- cache list
write_text new.txt
touch "$caches/mine.txt" && touch -d '100 days ago' "$caches/mine.txt"
expect 0 'of caches that were not used for 90 days' -- plan run.yaml data.files=new.txt data.datasets=null
check 'the old one is gone' test ! -e "$caches/$old.tokens" -a ! -e "$caches/$old.used"
check 'the one that was used is not' test -e "$caches/$kept.tokens"
check 'nor what is not of this kind' test -e "$caches/mine.txt"
expect 0 'removed' 'in 0 caches' -- cache clean --older-than 70
expect 0 'removed' 'in 1 cache' -- cache clean
check 'which was the older one' test ! -e "$caches/$kept.tokens"
expect 0 'in 1 cache and ' -- cache list --dir "$caches"
key=$(cd "$caches" && ls ./*.tokens)
exec 9>"$caches/${key%.tokens}.lock"
flock 9
expect 0 'another process is making it' 'in 0 caches' -- cache clean --all
check 'a cache in the making is left alone' test -e "$caches/$key"
# Who waits for it, as who makes it, has nothing to save yet.
mv "$caches/$key" made
"$megatrain" train run.yaml data.files=new.txt data.datasets=null output_dir=waiting >out 2>&1 </dev/null 9>&- &
for ((i = 0; i < 500; i++)); do
    grep -q 'waiting for another process' out && break
    sleep 0.02
done
kill -TERM $!
for ((i = 0; i < 100; i++)); do
    kill -0 $! 2>/dev/null || break
    sleep 0.02
done
check 'a signal before the first step: exits at once' test $i -lt 100
exec 9>&-
wait $!
check 'a signal before the first step: exit code 75' test $? = 75
check 'a signal before the first step: says so' grep -q 'stopped before the first step' out
echo mine >own.txt
ln -s "$PWD/own.txt" "$caches/$key.part"
expect 0 -- plan run.yaml data.files=new.txt data.datasets=null
check 'a link in the place of a cache is not written through' test "$(cat own.txt)" = mine -a ! -L "$caches/$key"
mv made "$caches/$key"
expect 0 'removed' -- cache clean --all
check 'everything is gone but what is not of this kind' test "$(ls "$caches")" = mine.txt
expect 0 '0 B in 0 caches' -- cache list --dir nowhere
expect 2 "unknown 'tidy'; expected list or clean" -- cache tidy
expect 2 "unknown 'claen'; did you mean 'clean'?" -- cache claen
expect 2 "clean takes no argument, but 'all' was given" -- cache clean all
expect 2 '--all is for clean' -- cache --all
expect 2 'one of the two' -- cache clean --all --older-than 3
expect 2 '--older-than must be from 1' -- cache clean --older-than 0

done_testing
