/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading the fixtures of this folder (tests/oracle/make_chat_fixtures.py says what is in them).
 */
#ifndef TEST_CHAT_FIXTURES_H
#define TEST_CHAT_FIXTURES_H

#include "../data/support.h"

#include <jansson.h>

enum { FIXTURE_MESSAGES = 32, FIXTURE_TOKENS = 4096 };

static inline json_t *fixture_read(const char *folder, const char *name)
{
    char path[1024];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s.json", folder, name);
    json_t *j = json_load_file(path, 0, &e);
    if (!j) {
        fprintf(stderr, "%s: %s\n", path, e.text);
        exit(1);
    }
    return j;
}

/* A dialogue's messages, of which every assistant's is trained. Texts belong to the dialogue. */
static inline int64_t fixture_messages(const json_t *dialogue, mt_message ret[FIXTURE_MESSAGES])
{
    size_t i;
    json_t *m;
    json_array_foreach(dialogue, i, m)
    {
        json_t *content = json_object_get(m, "content"), *thought = json_object_get(m, "reasoning");
        ret[i] = (mt_message){ .role = json_string_value(json_object_get(m, "role")),
                               .content = json_string_value(content),
                               .n_content = (int64_t)json_string_length(content),
                               .reasoning = json_string_value(thought),
                               .n_reasoning = (int64_t)json_string_length(thought) };
        ret[i].trained = strcmp(ret[i].role, "assistant") == 0;
    }
    return (int64_t)i;
}

#endif
