/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening streams of the documents loader over the toy language, for its two test programs.
 */
#ifndef TEST_DATA_DOCUMENTS_H
#define TEST_DATA_DOCUMENTS_H

#include "toy_language.h"

static const mt_data *d;
static char folder[64];

/* What a model brings along; a test that changes it puts it back. */
static toy language = { .begins = true, .fingerprint = 1 };
static const toy usual = { .begins = true, .fingerprint = 1 };
static bool with_tokenizer = true, with_chat = true, with_format = true;
static const char *cache_folder = NULL;

static inline mt_status open_stream(const support_config *c, mt_split split, int64_t len, int rank,
                                    int world, void **ret)
{
    const mt_data_request request = { .struct_size = sizeof request,
                                      .split = split,
                                      .config = &c->base,
                                      .max_seq_len = len,
                                      .seed = 7,
                                      .rank = rank,
                                      .world = world,
                                      .tokenizer = with_tokenizer ? &toy_tokenizer : NULL,
                                      .tokens = with_tokenizer ? &language : NULL,
                                      .chat = with_chat ? &toy_chat : NULL,
                                      .conversation = with_chat && with_format ? &language : NULL,
                                      .cache_folder = cache_folder };
    return d->open(&request, ret);
}

static inline void *must_open(const support_config *c, mt_split split, int64_t len, int rank,
                              int world)
{
    void *s = NULL;
    mt_status status = open_stream(c, split, len, rank, world, &s);
    if (status) {
        fprintf(stderr, "open: %s\n", status_text());
        exit(1);
    }
    return s;
}

static inline int64_t documents(const void *s)
{
    int64_t n, tokens;
    d->size(s, &n, &tokens);
    return n;
}

static inline int64_t inputs(const void *s)
{
    int64_t n, tokens;
    d->size(s, &n, &tokens);
    return tokens;
}

/* An epoch of a training stream, its documents parted by " / ". */
static inline const char *all_documents(const support_config *c, int64_t len)
{
    static char text[1 << 16];
    void *s = must_open(c, MT_SPLIT_TRAIN, len, 0, 1);
    mt_document doc;
    text[0] = '\0';
    for (int64_t i = 0; i < documents(s); i++) {
        CHECK(d->next(s, &doc) == MT_OK, "%s", status_text());
        size_t at = strlen(text);
        if (i)
            snprintf(text + at, sizeof text - at, " / ");
        toy_write(&doc, text, sizeof text);
    }
    d->close(s);
    return text;
}

static inline void write_text(const char *path, const char *text)
{
    support_write(path, text, strlen(text));
}

/* In the order of the files, nothing held out. */
#define IN_ORDER "shuffle", "false", "validation_split", "0"

static inline void expect(const support_config *c, int64_t len, const char *want)
{
    const char *got = all_documents(c, len);
    CHECK(strcmp(got, want) == 0, "got\n%s\nexpected\n%s", got, want);
}

static inline void refuse(const support_config *c, const char *text)
{
    void *s = &s;
    mt_status status = open_stream(c, MT_SPLIT_TRAIN, 64, 0, 1, &s);
    CHECK(status < 0 && s == &s, "opened; expected '%s'", text);
    CHECK(support_says(text), "expected '%s'", text);
}

#endif
