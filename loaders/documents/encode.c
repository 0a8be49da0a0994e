/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens and labels: every text begins with what its tokenizer puts there, once, and ends with the
 * end token, which is trained; a completion is trained and its prompt is not; of a conversation the
 * assistant's turns are. Padding does not exist, so nothing is masked by its id.
 */
#include "encode.h"

#include <xxhash.h>

static mt_status give(char *reason, mt_status code, const char *fmt, ...) MT_PRINTF(3, 4);
static mt_status give(char *reason, mt_status code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(reason, REASON_SIZE, fmt, args);
    va_end(args);
    return code;
}

static mt_status nomem(char *reason)
{
    return give(reason, MT_ERR_NOMEM, "out of memory");
}

/* ---- lists ---------------------------------------------------------------------------------- */

void token_list_finish(token_list *l)
{
    free(l->ids);
    free(l->trained);
    *l = (token_list){ 0 };
}

/* Room for `more` tokens behind those that are there. */
static bool reserve(token_list *l, int64_t more)
{
    int64_t wanted = l->n + more;
    if (wanted <= l->capacity)
        return true;
    wanted += wanted / 2;
    int32_t *ids = realloc(l->ids, (size_t)wanted * sizeof *ids);
    if (ids)
        l->ids = ids;
    uint8_t *trained = realloc(l->trained, (size_t)wanted);
    if (trained)
        l->trained = trained;
    if (!ids || !trained)
        return false;
    l->capacity = wanted;
    return true;
}

/* Takes token `i` out. */
static void drop(token_list *l, int64_t i)
{
    int64_t behind = --l->n - i;
    memmove(l->ids + i, l->ids + i + 1, (size_t)behind * sizeof *l->ids);
    memmove(l->trained + i, l->trained + i + 1, (size_t)behind);
}

static mt_status push(token_list *l, int32_t id, bool trained, char *reason)
{
    if (!reserve(l, 1))
        return nomem(reason);
    l->ids[l->n] = id;
    l->trained[l->n++] = trained;
    return MT_OK;
}

/* ---- the encoder ---------------------------------------------------------------------------- */

/* What the tokenizer puts around a text: what stands around the tokens of "a" when it is asked to
 * add. What some put behind it tells the end token where no file names one. */
static mt_status find_added(encoder *e)
{
    int32_t plain[8], added[8 + MOST_BEGIN];
    int64_t n = e->tokenizer->encode(e->tokens, "a", 1, 0, plain, 8);
    int64_t m =
        e->tokenizer->encode(e->tokens, "a", 1, MT_ENCODE_ADD_SPECIAL, added, 8 + MOST_BEGIN);
    if (n < 0 || m < 0)
        return (mt_status)(n < 0 ? n : m);
    if (n == 0 || n > 8 || m > 8 + MOST_BEGIN)
        return MT_OK;
    int32_t k = 0;
    while (k + n <= m && memcmp(added + k, plain, (size_t)n * sizeof *plain) != 0)
        k++;
    if (k + n > m || k > MOST_BEGIN)
        return MT_OK;
    memcpy(e->begin, added, (size_t)k * sizeof *added);
    e->n_begin = k;
    if (e->end < 0 && k + n < m)
        e->end = added[k + n];
    return MT_OK;
}

mt_status encoder_init(const mt_data_request *request, const doc_options *o, encoder *ret)
{
    encoder e = { .tokenizer = request->tokenizer,
                  .tokens = request->tokens,
                  .end = -1,
                  .chat = request->chat,
                  .conversation = request->conversation,
                  .train_on = o->train_on };
    mt_status status = MT_OK;
    if (e.tokenizer) {
        e.vocab = e.tokenizer->vocab_size(e.tokens);
        e.end = e.tokenizer->special(e.tokens, MT_SPECIAL_END);
        status = find_added(&e);
    }
    if (!status)
        *ret = e;
    return status;
}

mt_status encoder_use_alpaca(encoder *e)
{
    if (e->conversation || !e->chat || !e->tokenizer)
        return MT_OK;
    mt_status status = e->chat->open("alpaca", e->tokenizer, e->tokens, &e->own);
    if (!status)
        e->conversation = e->own;
    return status;
}

/* Of the chat format that conversations, or at least alpaca records, would get. */
static uint64_t fingerprint_chat(const encoder *e)
{
    encoder alpaca = *e;
    if (encoder_use_alpaca(&alpaca) || !alpaca.conversation)
        return 0;
    uint64_t hash = e->chat->fingerprint(alpaca.conversation);
    if (alpaca.own && alpaca.own != e->own)
        e->chat->close(alpaca.own);
    return hash;
}

uint64_t encoder_fingerprint(const encoder *e)
{
    const uint64_t parts[] = { e->tokenizer ? e->tokenizer->fingerprint(e->tokens) : 0,
                               (uint64_t)e->vocab,
                               (uint64_t)e->end,
                               e->conversation != NULL,
                               fingerprint_chat(e),
                               (uint64_t)e->train_on };
    return XXH3_64bits(parts, sizeof parts);
}

void encoder_finish(encoder *e)
{
    if (e->own)
        e->chat->close(e->own);
    *e = (encoder){ 0 };
}

/* ---- text ----------------------------------------------------------------------------------- */

/* Appends the tokens of a text, all of them trained. */
static mt_status append(const encoder *e, text_piece text, token_list *out, char *reason)
{
    if (!e->tokenizer)
        return give(reason, MT_ERR_INVALID,
                    "the data is text, but the model has no tokenizer; name one with "
                    "data.tokenizer");
    int64_t room = text.n + 16, n = 0;
    for (;;) {
        if (!reserve(out, room))
            return nomem(reason);
        n = e->tokenizer->encode(e->tokens, text.text, text.n, 0, out->ids + out->n, room);
        if (n < 0)
            return give(reason, n == MT_ERR_NOMEM ? MT_ERR_NOMEM : MT_ERR_FORMAT, "%s",
                        mt_error_text());
        if (n <= room)
            break;
        room = n;
    }
    memset(out->trained + out->n, 1, (size_t)n);
    out->n += n;
    return MT_OK;
}

/* The same as a document that may go on: what begins a text stands before it, once. */
static mt_status append_start(const encoder *e, text_piece text, token_list *out, char *reason)
{
    mt_status status = MT_OK;
    for (int32_t i = 0; i < e->n_begin && !status; i++)
        status = push(out, e->begin[i], true, reason);
    int64_t from = out->n;
    if (!status)
        status = append(e, text, out, reason);
    if (!status && e->n_begin > 0 && out->n > from && out->ids[from] == e->begin[0])
        drop(out, from);
    return status;
}

static mt_status append_end(const encoder *e, token_list *out, char *reason)
{
    if (e->end < 0 || (out->n > 0 && out->ids[out->n - 1] == e->end))
        return MT_OK;
    return push(out, e->end, true, reason);
}

mt_status encode_text(const encoder *e, text_piece text, token_list *out, char reason[REASON_SIZE])
{
    int64_t from = out->n;
    mt_status status = append_start(e, text, out, reason);
    if (!status)
        status = append_end(e, out, reason);
    if (!status && out->n > from)
        out->trained[from] = 1;
    return status;
}

/* ---- prompt and completion ------------------------------------------------------------------ */

/* Bytes of the tokens' text. */
static int64_t count_bytes(const encoder *e, const int32_t *ids, int64_t n)
{
    return n > 0 ? e->tokenizer->decode(e->tokens, ids, n, 0, NULL, 0) : 0;
}

/* How many of the n tokens of prompt and completion begin inside the prompt, whose m tokens alone
 * are `prompt`. The two are tokenised together, as the model will meet them, so that their tokens
 * may differ from some place on; there the border is found by counting bytes. */
static int64_t find_border(const encoder *e, const int32_t *ids, int64_t n, const int32_t *prompt,
                           int64_t m)
{
    int64_t k = 0;
    while (k < n && k < m && ids[k] == prompt[k])
        k++;
    /* Some tokenizers drop a space at the start: a token more on both sides keeps it. */
    int64_t from = k > 0 ? k - 1 : 0, wanted = count_bytes(e, prompt + from, m - from);
    while (k < n && count_bytes(e, ids + from, k - from) < wanted)
        k++;
    return k;
}

static mt_status encode_prompt(const encoder *e, const record *r, token_list *out, char *reason)
{
    token_list prompt = { 0 };
    int64_t from = out->n;
    int64_t n = r->prompt.n + r->completion.n;
    char *text = malloc((size_t)n + 1);
    mt_status status = MT_OK;
    if (!text) {
        status = nomem(reason);
        goto out;
    }
    memcpy(text, r->prompt.text, (size_t)r->prompt.n);
    memcpy(text + r->prompt.n, r->completion.text, (size_t)r->completion.n);
    if ((status = append_start(e, r->prompt, &prompt, reason)) ||
        (status = append_start(e, (text_piece){ text, n }, out, reason)))
        goto out;
    if (e->train_on != TRAIN_ALL)
        memset(out->trained + from, 0,
               (size_t)find_border(e, out->ids + from, out->n - from, prompt.ids, prompt.n));
    status = append_end(e, out, reason);
out:
    free(text);
    token_list_finish(&prompt);
    return status;
}

/* ---- conversations -------------------------------------------------------------------------- */

/* Leaves the last of the assistant's turns as the only one that may be trained. */
static void keep_last(record *r)
{
    bool found = false;
    for (int64_t i = r->n_turns - 1; i >= 0; i--) {
        mt_message *m = &r->turns[i];
        m->trained = m->trained && !found;
        found |= strcmp(m->role, "assistant") == 0;
    }
}

static mt_status refuse_turns(const encoder *e, char *reason)
{
    if (!e->tokenizer)
        return give(reason, MT_ERR_INVALID,
                    "the record is a conversation, but the model has no tokenizer; name one with "
                    "data.tokenizer");
    char names[REASON_SIZE / 2] = "";
    size_t n = 0;
    for (int32_t i = 0; e->chat && e->chat->formats[i] && n < sizeof names; i++)
        n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", i ? ", " : ": ",
                              e->chat->formats[i]);
    return give(reason, MT_ERR_INVALID,
                "the record is a conversation, but the model has no chat format; name one with "
                "data.chat_format%s",
                names);
}

static mt_status encode_turns(const encoder *e, record *r, token_list *out, char *reason)
{
    if (!e->conversation)
        return refuse_turns(e, reason);
    if (e->train_on == TRAIN_LAST)
        keep_last(r);
    int64_t room = 256, n = 0;
    for (int64_t i = 0; i < r->n_turns; i++)
        room += r->turns[i].n_content + r->turns[i].n_reasoning + 32;
    for (;;) {
        if (!reserve(out, room))
            return nomem(reason);
        n = e->chat->encode(e->conversation, r->turns, r->n_turns, false, out->ids + out->n,
                            out->trained + out->n, room);
        if (n < 0)
            return give(reason, n == MT_ERR_NOMEM ? MT_ERR_NOMEM : MT_ERR_FORMAT, "%s",
                        mt_error_text());
        if (n <= room)
            break;
        room = n;
    }
    if (e->train_on == TRAIN_ALL)
        memset(out->trained + out->n, 1, (size_t)n);
    out->n += n;
    return MT_OK;
}

/* ---- token ids ------------------------------------------------------------------------------ */

static mt_status encode_ids(const encoder *e, const record *r, token_list *out, char *reason)
{
    const int64_t most = e->vocab > 0 ? e->vocab : (int64_t)INT32_MAX + 1;
    for (size_t i = 0; i < json_array_size(r->ids); i++) {
        const json_t *v = json_array_get(r->ids, i), *label = json_array_get(r->labels, i);
        const json_t *mask = json_array_get(r->mask, i);
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= most)
            return give(reason, MT_ERR_FORMAT,
                        "token %zu of input_ids is no integer from 0 to %lld, the vocabulary's "
                        "last",
                        i, (long long)most - 1);
        if (label && (!json_is_integer(label) ||
                      (json_integer_value(label) != id && json_integer_value(label) != -100)))
            return give(reason, MT_ERR_FORMAT,
                        "label %zu is neither its token, %lld, nor -100 (labels are not shifted)",
                        i, (long long)id);
        if (mask && json_is_integer(mask) && json_integer_value(mask) == 0)
            continue; /* padding */
        bool trained = e->train_on == TRAIN_ALL || !label || json_integer_value(label) == id;
        mt_status status = push(out, (int32_t)id, trained, reason);
        if (status)
            return status;
    }
    return MT_OK;
}

mt_status encode_record(const encoder *e, record *r, token_list *out, char reason[REASON_SIZE])
{
    int64_t from = out->n;
    mt_status status = MT_ERR_INTERNAL;
    switch (r->kind) {
    case RECORD_TURNS:
        status = encode_turns(e, r, out, reason);
        break;
    case RECORD_PROMPT:
        status = encode_prompt(e, r, out, reason);
        break;
    case RECORD_TEXT:
        return encode_text(e, r->completion, out, reason);
    case RECORD_IDS:
        status = encode_ids(e, r, out, reason);
        break;
    }
    if (!status && out->n > from)
        out->trained[from] = r->kind == RECORD_IDS;
    return status;
}
