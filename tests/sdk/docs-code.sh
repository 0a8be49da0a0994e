#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What docs/plugins.md shows of the example stands there word for word: every ```c block is found in
# sdk/example/mini.c (which out-of-tree.sh compiles and runs), every ```yaml block in mini.yaml. A
# line with only "..." stands for any number of lines. And links of all pages lead somewhere.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
failed=0

check_blocks() { # LANGUAGE FILE
    awk -v language="$1" -v file="$root/$2" '
        # Pieces between lines of dots, each found after the one before.
        function check(    i, j, k, found, at) {
            at = 1
            for (i = 1; i <= n; i = j + 1) {
                for (j = i; j <= n && block[j] != "..."; j++)
                    continue
                for (found = 0; at <= lines && !found; at++) {
                    found = 1
                    for (k = 0; k < j - i && found; k++)
                        found = text[at + k] == block[i + k]
                }
                if (!found) {
                    printf "docs/plugins.md:%d: not in %s: %s\n", first + i, file, block[i]
                    bad = 1
                    return
                }
            }
            blocks++
        }
        BEGIN { while ((getline line < file) > 0) text[++lines] = line }
        $0 == "```" language { inside = 1; n = 0; first = NR; next }
        $0 == "```" && inside { inside = 0; check(); next }
        inside { block[++n] = $0 }
        END {
            printf "%d blocks of %s\n", blocks, file
            exit bad || !blocks
        }' "$root/docs/plugins.md" || failed=1
}
check_blocks c sdk/example/mini.c
check_blocks yaml sdk/example/mini.yaml

for page in "$root"/README.md "$root"/docs/*.md "$root"/sdk/example/README.md; do
    while IFS= read -r link; do
        if [[ ! -e $(dirname "$page")/$link ]]; then
            printf '%s: a link to %s, which does not exist\n' "${page#"$root"/}" "$link"
            failed=1
        fi
    done < <(grep -oE '\]\([^)#]+' "$page" | sed 's/^](//' | grep -v '^https\?:' || true)
done
exit "$failed"
