# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
#
# What the tests of the program share: a scratch folder, expectations, a tiny model and text.
# Usage of a test: NAME.sh BUILD_FOLDER

set -u
build=$(cd "$1" && pwd)
megatrain=$build/megatrain
source_root=$(cd "$(dirname "$0")/../.." && pwd)
export MEGATRAIN_PLUGIN_PATH=$build/plugins
scratch=$(mktemp -d "${TMPDIR:-/tmp}/mt-cli-XXXXXX")
trap 'chmod -R u+w "$scratch"; rm -rf "$scratch"' EXIT
cd "$scratch" || exit 1
# What is measured of this machine must not change what a test sees.
export XDG_CACHE_HOME=$scratch/cache

passed=0 failed=0

ok() { passed=$((passed + 1)); }
fail() {
    failed=$((failed + 1))
    printf 'FAILED  %s\n' "$*" >&2
}

# check TEXT COMMAND...: the command succeeds.
check() {
    local what=$1
    shift
    if "$@"; then ok; else fail "$what"; fi
}

# expect RC TEXT... -- ARGUMENTS...: megatrain exits with RC and says every TEXT.
expect() {
    local rc=$1 texts=() got
    shift
    while [[ $1 != -- ]]; do
        texts+=("$1")
        shift
    done
    shift
    "$megatrain" "$@" >out 2>&1 </dev/null
    got=$?
    if ((got != rc)); then
        fail "megatrain $*: exit code $got, expected $rc"
        sed 's/^/    /' out >&2
        return
    fi
    local t
    for t in "${texts[@]}"; do
        if ! grep -qF -- "$t" out; then
            fail "megatrain $*: does not say '$t'"
            sed 's/^/    /' out >&2
            return
        fi
    done
    ok
}

done_testing() {
    printf '%d passed, %d failed\n' "$passed" "$failed"
    ((failed == 0 && passed > 0))
    exit
}

# Text with some structure, the same every time.
write_text() {
    awk 'BEGIN {
        split("the light of a small house by the river where nobody had ever seen it rain", w, " ")
        x = 12345
        for (i = 0; i < 6000; i++) {
            x = (x * 1103515245 + 12345) % 2147483648
            printf "%s%s", w[int(x / 65536) % 16 + 1], i % 11 == 10 ? ".\n" : " "
        }
    }' >"$1"
}

write_model() {
    cat >"$1" <<END
model_type: llama
vocab_size: 256
hidden_size: 32
intermediate_size: 64
num_hidden_layers: 2
num_attention_heads: 4
num_key_value_heads: 2
max_position_embeddings: 128
END
}

write_run() {
    cat >"$1" <<END
model: model.yaml
device: cpu
seed: 3
output_dir: run
data:
  loader: text
  files: text.txt
  max_seq_len: 64
train:
  max_steps: 12
  micro_batch_size: 2
  gradient_accumulation_steps: 2
  learning_rate: 1.0e-2
  lr_scheduler_type: constant
  warmup_steps: 3
  eval_steps: 5
  eval_batches: 2
log:
  logging_steps: 1
checkpoint:
  save_steps: 4
END
}

# Text, model and a run of it that has trained for 4 steps; its checkpoint is $model.
write_trained_run() {
    write_text text.txt
    write_model model.yaml
    write_run run.yaml
    expect 0 'finished' -- train run.yaml train.max_steps=4
    model=run/checkpoints/step-000004
}

# with SED-SCRIPT: bad.yaml is run.yaml changed.
with() { sed -E "$1" run.yaml >bad.yaml; }

# What of metrics.jsonl does not depend on the clock or on the machine, as the plan does.
timeless() {
    sed -E 's/, "(tokens_per_second|model_flops_per_second|seconds|wait_[a-z]+_seconds|(device|host)_bytes|rss)": [^,}]*//g' \
        "$1"
}

# same_checkpoint A B: every file byte for byte.
same_checkpoint() { diff -rq "$1" "$2" >&2; }
