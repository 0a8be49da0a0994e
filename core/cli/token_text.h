/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens one by one as text, and text on the standard output.
 */
#ifndef MT_CORE_CLI_TOKEN_TEXT_H
#define MT_CORE_CLI_TOKEN_TEXT_H

#include "utf8.h"

#include <megatrain/loader.h>

enum { TOKEN_TEXT_ROOM = 512 };

/* Bytes of a token inside a text, where no tokenizer drops a space; returns how many there are, at
 * most TOKEN_TEXT_ROOM. `flags` as of decode. */
int64_t token_text(const mt_tokenizer *tokenizer, const void *tokens, int32_t id, uint32_t flags,
                   char ret[TOKEN_TEXT_ROOM]);

/* Writes bytes to the standard output, as far as they make whole characters; at the end what a cut
 * one shows as. Neither flushes. */
void token_text_show(utf8_stream *out, const char *p, int64_t n);
void token_text_end(utf8_stream *out);

#endif
