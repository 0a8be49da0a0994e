/* SPDX-License-Identifier: Apache-2.0
 *
 * Showing tokens.
 */
#include "token_text.h"

#include <stdio.h>
#include <string.h>

int64_t token_text(const mt_tokenizer *tokenizer, const void *tokens, int32_t id, uint32_t flags,
                   char ret[TOKEN_TEXT_ROOM])
{
    /* The second of two is inside a text. */
    const int32_t two[2] = { id, id };
    char text[2 * TOKEN_TEXT_ROOM];
    int64_t n = tokenizer->decode(tokens, two, 2, flags, text, sizeof text);
    int64_t skip = tokenizer->decode(tokens, two, 1, flags, NULL, 0);
    if (skip < 0 || n < skip || n > (int64_t)sizeof text || n - skip > TOKEN_TEXT_ROOM)
        return 0;
    memcpy(ret, text + skip, (size_t)(n - skip));
    return n - skip;
}

void token_text_show(utf8_stream *out, const char *p, int64_t n)
{
    char shown[UTF8_ROOM];
    for (int64_t i = 0; i < n; i++) {
        int count = utf8_put(out, (unsigned char)p[i], shown);
        fwrite(shown, 1, (size_t)count, stdout);
    }
}

void token_text_end(utf8_stream *out)
{
    char shown[UTF8_ROOM];
    fwrite(shown, 1, (size_t)utf8_end(out, shown), stdout);
}
