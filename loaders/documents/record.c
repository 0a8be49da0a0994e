/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading JSON records of every format.
 */
#include "record.h"

typedef struct context {
    const record_shape *shape;
    record *r;
    char *reason; /* [REASON_SIZE] */
} context;

static mt_status refuse(context *c, const char *fmt, ...) MT_PRINTF(2, 3);
static mt_status refuse(context *c, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->reason, REASON_SIZE, fmt, args);
    va_end(args);
    return MT_ERR_FORMAT;
}

static const char *describe(const json_t *v)
{
    if (!v)
        return "nothing";
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

/* ---- shapes --------------------------------------------------------------------------------- */

void record_shape_init(const doc_dataset *d, record_shape *ret)
{
    ret->format = d->format;
    for (int i = 0; i < COLUMNS; i++)
        ret->column[i] = d->columns[i] ? d->columns[i] : doc_column_names[i];
}

/* What a format cannot do without, in the order in which formats are tried: the surer sign first.
 */
static const struct {
    doc_format format;
    doc_column needs[2]; /* COLUMNS: nothing more */
} signs[] = {
    { FORMAT_TOKENIZED, { COLUMN_INPUT_IDS, COLUMNS } },
    { FORMAT_MESSAGES, { COLUMN_MESSAGES, COLUMNS } },
    { FORMAT_SHAREGPT, { COLUMN_CONVERSATIONS, COLUMNS } },
    { FORMAT_PROMPT, { COLUMN_PROMPT, COLUMN_COMPLETION } },
    { FORMAT_ALPACA, { COLUMN_INSTRUCTION, COLUMN_OUTPUT } },
    { FORMAT_TEXT, { COLUMN_TEXT, COLUMNS } },
};

static const json_t *column(const record_shape *s, const json_t *root, doc_column which)
{
    return json_object_get(root, s->column[which]);
}

doc_format record_detect(const record_shape *shape, const json_t *root, char *found, size_t size)
{
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
        bool all = true;
        for (int k = 0; k < 2; k++)
            all &= signs[i].needs[k] == COLUMNS || column(shape, root, signs[i].needs[k]);
        if (all)
            return signs[i].format;
    }
    size_t at = 0;
    const char *key;
    json_t *value;
    found[0] = '\0';
    json_object_foreach((json_t *)root, key, value)
    {
        (void)value;
        if (at < size)
            at += (size_t)snprintf(found + at, size - at, "%s%.40s", at ? ", " : "", key);
    }
    return FORMAT_AUTO;
}

json_t *record_parse(const char *text, int64_t n, char reason[REASON_SIZE])
{
    json_error_t e;
    json_t *root = mt_json_loadb(text, (size_t)n, JSON_ALLOW_NUL | JSON_DECODE_ANY, &e);
    if (!root) {
        snprintf(reason, REASON_SIZE, "no JSON: column %d: %s", e.column, e.text);
        return NULL;
    }
    if (json_is_object(root))
        return root;
    snprintf(reason, REASON_SIZE, "the record is %s; expected an object", describe(root));
    json_decref(root);
    return NULL;
}

/* ---- fields --------------------------------------------------------------------------------- */

static bool absent(const json_t *v)
{
    return !v || json_is_null(v);
}

static text_piece piece_of(const json_t *string)
{
    return (text_piece){ json_string_value(string), (int64_t)json_string_length(string) };
}

/* The string of a column; absent or null is an empty one where that is allowed. */
static mt_status read_string(context *c, doc_column which, bool needed, text_piece *ret)
{
    const json_t *v = column(c->shape, c->r->root, which);
    *ret = (text_piece){ "", 0 };
    if (json_is_string(v))
        *ret = piece_of(v);
    else if (needed || !absent(v))
        return refuse(c, "'%s' is %s; expected a string", c->shape->column[which], describe(v));
    return MT_OK;
}

/* Fails for a key whose use would change what the record means, and which is not offered. */
static mt_status check_offered(context *c, const json_t *object)
{
    static const struct {
        const char *key, *what;
    } refused[] = {
        { "images", "images" },         { "image", "images" },
        { "videos", "video" },          { "audios", "audio" },
        { "audio", "audio" },           { "tools", "tool calls" },
        { "tool_calls", "tool calls" }, { "function_call", "tool calls" },
        { "functions", "tool calls" },
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const json_t *v = json_object_get(object, refused[i].key);
        bool empty = absent(v) || (json_is_array(v) && json_array_size(v) == 0) ||
                     (json_is_string(v) &&
                      (json_string_length(v) == 0 || strcmp(json_string_value(v), "[]") == 0));
        if (!empty)
            return refuse(c, "'%s': %s are not offered", refused[i].key, refused[i].what);
    }
    return MT_OK;
}

/* ---- turns ---------------------------------------------------------------------------------- */

static mt_status add_turn(context *c, const char *role, text_piece content, bool trained)
{
    record *r = c->r;
    void *turns = r->turns;
    if (doc_grow(&turns, r->n_turns, &r->cap_turns, sizeof *r->turns))
        return MT_ERR_NOMEM;
    r->turns = turns;
    r->turns[r->n_turns++] = (mt_message){
        .role = role, .content = content.text, .n_content = content.n, .trained = trained
    };
    return MT_OK;
}

static bool same(const char *word, const char *const *list)
{
    for (; *list; list++)
        if (strcmp(word, *list) == 0)
            return true;
    return false;
}

/* The role that a word of the data stands for. */
static mt_status read_role(context *c, const char *word, const char **ret)
{
    static const char *const system[] = { "system", "developer", NULL };
    static const char *const user[] = { "user", "human", NULL };
    static const char *const assistant[] = { "assistant", "gpt", "model", "bot", "chatgpt", NULL };
    static const char *const tool[] = { "tool",        "function", "function_call",
                                        "observation", "ipython",  NULL };
    if (strcmp(word, c->shape->column[COLUMN_USER]) == 0 || same(word, user))
        *ret = "user";
    else if (strcmp(word, c->shape->column[COLUMN_ASSISTANT]) == 0 || same(word, assistant))
        *ret = "assistant";
    else if (same(word, system))
        *ret = "system";
    else if (same(word, tool))
        return refuse(c, "a turn of '%s': tool calls are not offered", word);
    else
        return refuse(c, "a turn of '%.40s'; expected system, user or assistant", word);
    return MT_OK;
}

/* Joins the text parts of a content list into a string that `turn` keeps in place of the list. */
static mt_status join_parts(context *c, json_t *turn, const char *key, const json_t *parts,
                            const json_t **ret)
{
    size_t total = 0, at = 0, i;
    const json_t *part;
    json_array_foreach(parts, i, part)
    {
        const json_t *type = json_object_get(part, "type"), *text = json_object_get(part, "text");
        if (json_is_string(type) && strcmp(json_string_value(type), "text") != 0)
            return refuse(c, "a part of type '%.40s' is not offered; only text is",
                          json_string_value(type));
        if (!json_is_string(text))
            return refuse(c, "'%s' has a part whose 'text' is %s; expected a string", key,
                          describe(text));
        total += json_string_length(text);
    }
    char *joined = malloc(total + 1);
    if (!joined)
        return mt_fail_nomem();
    json_array_foreach(parts, i, part)
    {
        const json_t *text = json_object_get(part, "text");
        memcpy(joined + at, json_string_value(text), json_string_length(text));
        at += json_string_length(text);
    }
    json_t *string = json_stringn(joined, total);
    free(joined);
    if (!string || json_object_set_new(turn, key, string))
        return mt_fail_nomem();
    *ret = string;
    return MT_OK;
}

/* What is at one of two names: the format's own, or the other that is just as usual. */
static const json_t *either(const json_t *turn, const char *name, const char *other,
                            const char **ret_name)
{
    const json_t *v = json_object_get(turn, name);
    *ret_name = v ? name : other;
    return v ? v : json_object_get(turn, other);
}

static mt_status read_content(context *c, json_t *turn, text_piece *ret)
{
    const char *key;
    const json_t *content = either(turn, c->shape->column[COLUMN_CONTENT], "value", &key);
    mt_status status = MT_OK;
    if (json_is_array(content))
        status = join_parts(c, turn, key, content, &content);
    if (status)
        return status;
    if (!json_is_string(content))
        return refuse(c, "'%s' of a turn is %s; expected a string or a list of text parts",
                      content ? key : c->shape->column[COLUMN_CONTENT], describe(content));
    *ret = piece_of(content);
    return MT_OK;
}

/* OpenAI's weight: 0 keeps an assistant's turn out of training. */
static mt_status read_weight(context *c, const json_t *turn, bool *ret_trained)
{
    const json_t *weight = json_object_get(turn, "weight");
    if (absent(weight))
        return MT_OK;
    double w = json_number_value(weight);
    if (!json_is_number(weight) || (w != 0 && w != 1))
        return refuse(c, "'weight' of a turn must be 0 or 1");
    *ret_trained = w != 0;
    return MT_OK;
}

static mt_status read_turn(context *c, json_t *turn, bool may_train)
{
    const char *key, *role = NULL;
    if (!json_is_object(turn))
        return refuse(c, "a turn is %s; expected an object", describe(turn));
    const json_t *word = either(turn, c->shape->column[COLUMN_ROLE], "from", &key);
    if (!json_is_string(word))
        return refuse(c, "'%s' of a turn is %s; expected a string",
                      word ? key : c->shape->column[COLUMN_ROLE], describe(word));
    mt_status status = read_role(c, json_string_value(word), &role);
    if (!status)
        status = check_offered(c, turn);
    text_piece content = { 0 };
    if (!status)
        status = read_content(c, turn, &content);
    bool assistant = !status && strcmp(role, "assistant") == 0, trained = assistant && may_train;
    if (trained)
        status = read_weight(c, turn, &trained);
    if (!status)
        status = add_turn(c, role, content, trained);
    const json_t *reasoning = json_object_get(turn, c->shape->column[COLUMN_REASONING]);
    if (status || !assistant || absent(reasoning))
        return status;
    if (!json_is_string(reasoning))
        return refuse(c, "'%s' is %s; expected a string", c->shape->column[COLUMN_REASONING],
                      describe(reasoning));
    mt_message *m = &c->r->turns[c->r->n_turns - 1];
    m->reasoning = json_string_value(reasoning);
    m->n_reasoning = (int64_t)json_string_length(reasoning);
    return MT_OK;
}

static mt_status read_turns(context *c, doc_column which, bool may_train)
{
    const json_t *list = column(c->shape, c->r->root, which);
    size_t i;
    json_t *turn;
    if (!json_is_array(list))
        return refuse(c, "'%s' is %s; expected a list of turns", c->shape->column[which],
                      describe(list));
    if (json_array_size(list) == 0)
        return refuse(c, "'%s' holds no turns", c->shape->column[which]);
    json_array_foreach(list, i, turn)
    {
        mt_status status = read_turn(c, turn, may_train);
        if (status)
            return status;
    }
    return MT_OK;
}

/* A system prompt that stands beside the turns. */
static mt_status read_system(context *c)
{
    text_piece text;
    mt_status status = read_string(c, COLUMN_SYSTEM, false, &text);
    return status || text.n == 0 ? status : add_turn(c, "system", text, false);
}

/* ---- formats -------------------------------------------------------------------------------- */

/* instruction, or instruction and input with a line end between them; a joined one is kept in the
 * record. */
static mt_status read_instruction(context *c, text_piece *ret)
{
    text_piece input = { 0 };
    mt_status status = read_string(c, COLUMN_INSTRUCTION, true, ret);
    if (!status)
        status = read_string(c, COLUMN_INPUT, false, &input);
    if (status || input.n == 0)
        return status;
    int64_t n = ret->n + 1 + input.n;
    char *joined = malloc((size_t)n);
    if (!joined)
        return mt_fail_nomem();
    memcpy(joined, ret->text, (size_t)ret->n);
    joined[ret->n] = '\n';
    memcpy(joined + ret->n + 1, input.text, (size_t)input.n);
    json_t *string = json_stringn(joined, (size_t)n);
    free(joined);
    if (!string || json_object_set_new(c->r->root, c->shape->column[COLUMN_INSTRUCTION], string))
        return mt_fail_nomem();
    *ret = piece_of(string);
    return MT_OK;
}

static mt_status read_history(context *c)
{
    const json_t *list = column(c->shape, c->r->root, COLUMN_HISTORY), *pair;
    const char *name = c->shape->column[COLUMN_HISTORY];
    size_t i;
    if (absent(list))
        return MT_OK;
    if (!json_is_array(list))
        return refuse(c, "'%s' is %s; expected a list of pairs", name, describe(list));
    json_array_foreach(list, i, pair)
    {
        const json_t *question = json_array_get(pair, 0), *answer = json_array_get(pair, 1);
        if (json_array_size(pair) != 2 || !json_is_string(question) || !json_is_string(answer))
            return refuse(c, "'%s' must hold pairs of a question and an answer", name);
        mt_status status = add_turn(c, "user", piece_of(question), false);
        if (!status)
            status = add_turn(c, "assistant", piece_of(answer), true);
        if (status)
            return status;
    }
    return MT_OK;
}

static mt_status read_alpaca(context *c)
{
    text_piece question = { 0 }, answer = { 0 };
    c->r->kind = RECORD_TURNS;
    mt_status status = read_system(c);
    if (!status)
        status = read_history(c);
    if (!status)
        status = read_instruction(c, &question);
    if (!status)
        status = read_string(c, COLUMN_OUTPUT, true, &answer);
    if (!status)
        status = add_turn(c, "user", question, false);
    return status ? status : add_turn(c, "assistant", answer, true);
}

/* Two strings, or two lists of turns of which the second is trained. */
static mt_status read_prompt(context *c)
{
    const json_t *prompt = column(c->shape, c->r->root, COLUMN_PROMPT);
    const json_t *completion = column(c->shape, c->r->root, COLUMN_COMPLETION);
    if (json_is_array(prompt) && json_is_array(completion)) {
        c->r->kind = RECORD_TURNS;
        mt_status status = read_turns(c, COLUMN_PROMPT, false);
        return status ? status : read_turns(c, COLUMN_COMPLETION, true);
    }
    if (json_is_array(prompt) || json_is_array(completion))
        return refuse(c, "'%s' is %s and '%s' is %s; expected two strings or two lists of turns",
                      c->shape->column[COLUMN_PROMPT], describe(prompt),
                      c->shape->column[COLUMN_COMPLETION], describe(completion));
    c->r->kind = RECORD_PROMPT;
    mt_status status = read_string(c, COLUMN_PROMPT, true, &c->r->prompt);
    return status ? status : read_string(c, COLUMN_COMPLETION, true, &c->r->completion);
}

static mt_status read_ids(context *c)
{
    static const doc_column which[] = { COLUMN_INPUT_IDS, COLUMN_LABELS, COLUMN_ATTENTION_MASK };
    const json_t *list[3];
    for (int i = 0; i < 3; i++) {
        list[i] = column(c->shape, c->r->root, which[i]);
        if (i > 0 && absent(list[i])) {
            list[i] = NULL;
            continue;
        }
        if (!json_is_array(list[i]))
            return refuse(c, "'%s' is %s; expected a list of integers", c->shape->column[which[i]],
                          describe(list[i]));
        if (json_array_size(list[i]) != json_array_size(list[0]))
            return refuse(c, "'%s' has %zu numbers for %zu tokens", c->shape->column[which[i]],
                          json_array_size(list[i]), json_array_size(list[0]));
    }
    c->r->kind = RECORD_IDS;
    c->r->ids = list[0];
    c->r->labels = list[1];
    c->r->mask = list[2];
    return MT_OK;
}

mt_status record_read(const record_shape *shape, record *r, char reason[REASON_SIZE])
{
    context c = { shape, r, reason };
    r->n_turns = 0;
    mt_status status = check_offered(&c, r->root);
    if (status)
        return status;
    switch (shape->format) {
    case FORMAT_MESSAGES:
        r->kind = RECORD_TURNS;
        return read_turns(&c, COLUMN_MESSAGES, true);
    case FORMAT_SHAREGPT:
        r->kind = RECORD_TURNS;
        status = read_system(&c);
        return status ? status : read_turns(&c, COLUMN_CONVERSATIONS, true);
    case FORMAT_ALPACA:
        return read_alpaca(&c);
    case FORMAT_PROMPT:
        return read_prompt(&c);
    case FORMAT_TEXT:
        r->kind = RECORD_TEXT;
        return read_string(&c, COLUMN_TEXT, true, &r->completion);
    case FORMAT_TOKENIZED:
        return read_ids(&c);
    case FORMAT_AUTO:
    case FORMATS:
        break;
    }
    return mt_fail(MT_ERR_INTERNAL, "data: a record of no format");
}

void record_clear(record *r)
{
    json_decref(r->root);
    r->root = NULL;
    r->n_turns = 0;
}

void record_finish(record *r)
{
    record_clear(r);
    free(r->turns);
    *r = (record){ 0 };
}
