#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# megatrain tokenize: ids, pieces, text and token files. That ids are right is tested elsewhere.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "$0")/lib.sh"

fixtures=$source_root/tests/oracle/fixtures/tokenizer
mkdir model
cp "$fixtures/llama3.json" model/tokenizer.json
echo '{ "bos_token": "<s>", "eos_token": { "content": "</s>" } }' >model/tokenizer_config.json

tokenize() { "$megatrain" tokenize --tokenizer model "$@" 2>err; }

# ---- there and back ------------------------------------------------------------------------------

text=$'Hello  \u4e16\u754c, it\'s \U0001f600!'
tokenize "$text" >ids
check 'begins with the template'\''s token' test "$(head -n 1 ids)" = 0
check 'the same from a file' cmp -s ids <(printf %s "$text" >in.txt && tokenize --file in.txt)
check 'the same from the standard input' cmp -s ids <(printf %s "$text" | tokenize)
check 'the same by the file of the tokenizer' \
    cmp -s ids <("$megatrain" tokenize --tokenizer model/tokenizer.json "$text")
printf '\xef\xbb\xbf%s' "$text" >marked.txt
check 'a mark of byte order is no text, in a file' cmp -s ids <(tokenize --file marked.txt)
check 'nor on the standard input' cmp -s ids <(tokenize <marked.txt)
check 'a file need not be a regular one' cmp -s ids <(tokenize --file <(printf %s "$text"))
{ head -c 68000000 /dev/zero | tr '\0' ' ' && echo 0; } >large.txt
check 'nor of the size of a manifest' test "$(tokenize --decode --file large.txt)" = '<s>'
rm large.txt
check 'without special tokens' cmp -s <(tail -n +2 ids) <(tokenize --no-special "$text")
check 'count' test "$(tokenize --count "$text")" = "$(wc -l <ids)"
check 'decodes' test "$(tokenize --decode <ids)" = "<s>$text"
check 'decodes without special tokens' test "$(tokenize --decode --no-special <ids)" = "$text"
check 'decodes words of its argument' test "$(tokenize --decode "$(tr '\n' ' ' <ids)")" = "<s>$text"
check 'pieces have the ids' cmp -s ids <(tokenize --pieces "$text" | cut -f 1)
check 'pieces are seen' test "$(tokenize --pieces --no-special $'a\n<s>')" = "$(
    paste <(tokenize --no-special $'a\n<s>') <(printf 'a\n\\n\n<s>\n'))"
check 'parts of characters are bytes' grep -qF '\xf0' <(tokenize --pieces $'\U0001f6b2')
check 'special tokens in the text' test "$(tokenize --no-special '<s>')" = 0
check 'and as mere text' test "$(tokenize --no-special --literal --count '<s>')" -gt 1
check 'nothing' test -z "$(tokenize --no-special '')"
"$megatrain" tokenize --tokenizer "$fixtures/llama2.json" --no-special --pieces ' a b' >out
check 'pieces together are the text' test "$(cut -f 2 out | tr -d '\n')" = ' a b'

# ---- token files ---------------------------------------------------------------------------------

numbers() { od -A n -v -t "$1" -w"$2" "$3" | tr -d ' '; } # type, bytes a line, file

printf 'one\ntwo\n\n \nthree\n' >in.txt
expect 0 'out.bin' ' tokens of 2 documents' -- \
    tokenize --tokenizer model --file in.txt -o out.bin --separator blank_line
{ tokenize $'one\ntwo\n' && echo 1 && tokenize $'three\n' && echo 1; } >wanted
check 'header' test "$(numbers d4 4 out.bin | head -n 4 | tr '\n' ' ')" = "20240520 1 $(wc -l <wanted) 0 "
check 'tokens' cmp -s wanted <(tail -c +1025 out.bin >body && numbers u2 2 body)
check 'size' test "$(wc -c <out.bin)" = $((1024 + 2 * $(wc -l <wanted)))

printf '{"text": "one\\ntwo\\n"}\n\n{"text": "three\\n", "more": 1}\n{"text": ""}\n' >in.jsonl
expect 0 ' tokens of 2 documents' -- tokenize --tokenizer model --file in.jsonl -o json.bin
check 'the same from JSON lines' cmp -s out.bin json.bin
expect 0 ' tokens of 1 document' -- tokenize --tokenizer model --file in.txt -o out.bin
expect 0 ' tokens of 2 documents' -- tokenize --tokenizer model --file in.txt -o out.bin --separator o
expect 0 ' tokens of 1 document' -- tokenize --tokenizer model --no-special -o out.bin text
check 'bare text' cmp -s <(tokenize --no-special text) <(tail -c +1025 out.bin >body && numbers u2 2 body)

# A vocabulary that needs 32 bits.
mkdir large
sed 's/"model":/"more":[],&/; s/"id":\(80[0-9]\),"content":"<|im_end|>"/"id":70000,"content":"<|im_end|>"/' \
    model/tokenizer.json >large/tokenizer.json
echo '{ "eos_token_id": [70000, 1] }' >large/generation_config.json
expect 0 'out.bin' -- tokenize --tokenizer large -o out.bin text
check 'header of 32 bits' test "$(numbers d4 4 out.bin | head -n 2 | tr '\n' ' ')" = '20240801 7 '
check 'tokens of 32 bits' test "$(tail -c 4 out.bin >body && numbers u4 4 body)" = 70000

# ---- what is refused -----------------------------------------------------------------------------

expect 2 'which tokenizer?' -- tokenize text
expect 2 'one text at a time' -- tokenize --tokenizer model a b
expect 2 'one of the two' -- tokenize --tokenizer model --file in.txt text
expect 2 'one at a time' -- tokenize --tokenizer model --count --pieces text
expect 2 '--separator is for -o' -- tokenize --tokenizer model --separator none text
expect 2 'each line is a document' -- tokenize --tokenizer model --file in.jsonl -o x.bin --separator none
expect 2 'not for --decode' -- tokenize --tokenizer model --literal --decode 1
expect 1 "found 'x'" 'from 0 to 808' -- tokenize --tokenizer model --decode '1 x'
expect 1 "found '809'" -- tokenize --tokenizer model --decode 809
expect 1 "found '-1'" -- tokenize --tokenizer model --decode -- -1
expect 1 'nowhere: there is no such file or folder' -- tokenize --tokenizer nowhere text
expect 1 'in.txt: is no tokenizer.json' -- tokenize --tokenizer in.txt text
expect 1 'names no token that ends a document' -- \
    tokenize --tokenizer "$fixtures/llama3.json" -o x.bin text
printf '{"text": "a"}\n{"text": 1}\n' >bad.jsonl
expect 1 "bad.jsonl:2: expected an object with a string at 'text'" -- \
    tokenize --tokenizer model --file bad.jsonl -o x.bin
printf '{"text": "a"}\n{"text": \n' >bad.jsonl
expect 1 'bad.jsonl:2:' -- tokenize --tokenizer model --file bad.jsonl -o x.bin
expect 1 'no text to write tokens of' -- tokenize --tokenizer model -o x.bin
expect 1 '/nowhere/x.bin: cannot write: there is no folder /nowhere' -- tokenize --tokenizer model -o /nowhere/x.bin text
check 'nothing is left of what failed' test -z "$(find . -name 'x.bin*')"

# A folder of another format says how to make the file.
mkdir sentencepiece && touch sentencepiece/tokenizer.model
expect 1 'sentencepiece: holds tokenizer.model but no tokenizer.json' "save_pretrained('sentencepiece')" \
    -- tokenize --tokenizer sentencepiece text
expect 1 'holds tokenizer.model but no tokenizer.json' \
    -- tokenize --tokenizer sentencepiece/tokenizer.model text
done_testing
