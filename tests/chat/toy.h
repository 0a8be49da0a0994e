/* SPDX-License-Identifier: Apache-2.0
 *
 * A toy tokenizer for the tests of this folder: special tokens, a few words that are taken where
 * they are the longest match, and bytes.
 */
#ifndef TEST_CHAT_TOY_H
#define TEST_CHAT_TOY_H

#include <megatrain/loader.h>

typedef struct toy {
    const char *bos, *eos;    /* "": none */
    const char *const *words; /* NULL-terminated; they do not reach over a special token */
} toy;

extern const mt_tokenizer toy_tokenizer;

#endif
