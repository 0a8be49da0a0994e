#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A plugin outside the tree, from nothing but what `meson install` puts down: install, build
# sdk/example against the installed SDK, check it, train with it.
# Usage: out-of-tree.sh BUILD_FOLDER MESON PREFIX LIBDIR SANITIZER
set -euo pipefail

build=$(cd "$1" && pwd) prefix=$3 libdir=$4 sanitizer=$5
IFS=' ' read -r -a meson <<<"$2"
source_root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/mt-sdk-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
umask 022 # plugins that others may write are refused
unset MEGATRAIN_PLUGIN_PATH DESTDIR
export XDG_DATA_HOME=$scratch/nothing

fail() {
    printf 'FAILED  %s\n' "$*" >&2
    for log in ./*.log; do
        printf -- '---- %s\n' "$log" >&2
        tail -n 25 "$log" >&2
    done
    exit 1
}
# step TEXT LOG COMMAND...
step() {
    local text=$1 log=$2
    shift 2
    "$@" >"$log" 2>&1 </dev/null || fail "$text: exit code $?"
    printf 'ok      %s\n' "$text"
}
# refused TEXT LOG COMMAND...
refused() {
    local text=$1 log=$2
    shift 2
    if "$@" >"$log" 2>&1 </dev/null; then
        fail "$text: was accepted"
    fi
    printf 'ok      %s\n' "$text"
}
says() { grep -qF -- "$2" "$1" || fail "$1 does not say '$2'"; }

# ---- install, build ---------------------------------------------------------------------------

root=$scratch/root
step 'install' install.log "${meson[@]}" install -C "$build" --no-rebuild --destdir "$root"
megatrain=$root$prefix/bin/megatrain
[[ -x $megatrain ]] || fail "the program is not installed at $prefix/bin/megatrain"
[[ -f $root$prefix/$libdir/megatrain/plugins/llama.so ]] || fail 'plugins are not installed'

# A copy: nothing of the source tree may be in reach of the build.
cp -r "$source_root/sdk/example" mini
export PKG_CONFIG_SYSROOT_DIR=$root
export PKG_CONFIG_LIBDIR=$root$prefix/$libdir/pkgconfig
step 'the example is configured' setup.log "${meson[@]}" setup mini/build mini -Dwerror=true \
    -Dwarning_level=3 "-Db_sanitize=$sanitizer" -Db_lundef=false
step 'the example builds' build.log "${meson[@]}" compile -C mini/build
if grep -qF "$source_root" mini/build/build.ninja; then
    fail 'the example is built with headers of the source tree'
fi
nm -D --defined-only mini/build/mini.so >symbols.log
says symbols.log mt_plugin_entry_v1
[[ $sanitizer != none || $(wc -l <symbols.log) = 1 ]] || fail 'mini.so exports more than its entry'

mkdir plugins
cp mini/build/mini.so mini/build/mini.yaml plugins/

# ---- use --------------------------------------------------------------------------------------

step 'it is listed' list.log "$megatrain" plugins list --plugin-dir plugins
says list.log mini
says list.log llama
step 'it passes plugins check' check.log "$megatrain" plugins check plugins/mini.so
says check.log 'all tests passed'

awk 'BEGIN {
    split("warm bread on a wooden table while the rain falls on roof and garden and road", w, " ")
    for (i = x = 0; i < 4000; i++) {
        x = (x * 1103515245 + 12345) % 2147483648
        printf "%s%s", w[int(x / 65536) % 15 + 1], i % 9 == 8 ? ".\n" : " "
    }
}' >text.txt
cp mini/model.yaml .
cat >run.yaml <<'END'
model: model.yaml
device: cpu
output_dir: run
data: { files: text.txt, max_seq_len: 64 }
train: { max_steps: 30, micro_batch_size: 4, learning_rate: 1.0e-2, warmup_steps: 3 }
log: { logging_steps: 1 }
END

refused 'not without --plugin-dir' without.log "$megatrain" train run.yaml
says without.log "'mini'"
step 'it trains' train.log "$megatrain" train run.yaml --plugin-dir plugins
losses=$(sed -n 's/.*"step": [0-9]*, "loss": \([0-9.e+-]*\).*/\1/p' run/metrics.jsonl)
[[ $(wc -l <<<"$losses") = 30 ]] || fail 'not a loss for each of the 30 steps'
first=$(head -n 1 <<<"$losses") last=$(tail -n 1 <<<"$losses")
# The first is near ln 256; thirty steps learn at least which letters there are.
awk "BEGIN { exit !($first > 5.2 && $first < 6 && $last < 3.2) }" || fail "the loss: $first to $last"
printf 'ok      the loss falls: %s to %s\n' "$first" "$last"
step 'it generates' generate.log "$megatrain" generate run --plugin-dir plugins --prompt rain \
    --max-tokens 8

# ---- a hyper-parameter that cannot be -----------------------------------------------------------

sed 's/num_attention_heads: 4/num_attention_heads: 5/' mini/model.yaml >odd.yaml
refused 'a value that cannot be' odd.log "$megatrain" train run.yaml model=odd.yaml \
    output_dir=odd --plugin-dir plugins
says odd.log '5 heads of an even size do not add up to hidden_size 64'
says odd.log 'odd.yaml:6:'
