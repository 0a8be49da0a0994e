/* SPDX-License-Identifier: Apache-2.0
 *
 * Options, help and exit codes.
 */
#include "cli.h"

#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../base/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* A name of one letter is written with one dash. */
static const char *dashes(const char *name)
{
    return name[0] && !name[1] ? "-" : "--";
}

/* ---- help ------------------------------------------------------------------------------------ */

static void print_help(const cli_command *self, const cli_option *options)
{
    printf("usage: megatrain %s %s\n\n%s\n\noptions:\n", self->name, self->words, self->help);
    for (const cli_option *o = options; o->name; o++) {
        char left[64];
        snprintf(left, sizeof left, "%s%s%s%s", dashes(o->name), o->name, o->arg ? " " : "",
                 o->arg ? o->arg : "");
        printf("  %-22s %s\n", left, o->help);
    }
    printf("  %-22s %s\n\n%s\n", "--help", "show this", self->example);
}

int cli_usage(const cli_command *self, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "megatrain %s: %s\nusage: megatrain %s %s\n`megatrain %s --help` tells more\n",
            self->name, text, self->name, self->words, self->name);
    return CLI_USAGE;
}

/* ---- nearest words --------------------------------------------------------------------------- */

const char *cli_nearest(const char *word, const char *const *names)
{
    int64_t n = 0;
    while (names[n])
        n++;
    int64_t nearest = text_nearest(word, names, n);
    return nearest < 0 ? NULL : names[nearest];
}

/* "list, info or check". */
static const char *list_names(const char *const *names, char *ret, size_t size)
{
    *ret = '\0';
    for (int i = 0; names[i]; i++)
        text_append(ret, size, "%s%s", i == 0 ? "" : names[i + 1] ? ", " : " or ", names[i]);
    return ret;
}

int cli_unknown(const cli_command *self, const char *word, const char *const *names)
{
    char list[256];
    const char *nearest = cli_nearest(word, names);
    if (nearest)
        return cli_usage(self, "unknown '%s'; did you mean '%s'?", word, nearest);
    return cli_usage(self, "unknown '%s'; expected %s", word, list_names(names, list, sizeof list));
}

/* ---- options --------------------------------------------------------------------------------- */

/* The key of a run manifest that an option of this name (`n` bytes) may be meant for, "" where it
 * is none or the command takes no keys. */
static const char *find_key(const cli_command *self, const char *name, size_t n, char ret[128])
{
    int32_t keys = 0;
    const run_key *k = run_schema(&keys);
    *ret = '\0';
    if (!strstr(self->words, "key=value"))
        return ret;
    for (int32_t i = 0; i < keys; i++) {
        size_t same = 0;
        while (same < n &&
               (k[i].name[same] == name[same] || (k[i].name[same] == '_' && name[same] == '-')))
            same++;
        if (same == n && !k[i].name[n])
            snprintf(ret, 128, "%s%s%s", k[i].section, *k[i].section ? "." : "", k[i].name);
    }
    return ret;
}

/* `given` is the argument, and `name` what stands behind its dashes, `n` bytes. */
static int unknown_option(const cli_command *self, const cli_option *options, const char *given,
                          const char *name, size_t n)
{
    const char *names[64];
    int count = 0;
    for (const cli_option *o = options; o->name && count < 62; o++)
        names[count++] = o->name;
    names[count++] = "help";
    names[count] = NULL;
    char word[128], key[128];
    snprintf(word, sizeof word, "%.*s", (int)n, name);
    const char *nearest = cli_nearest(word, names);
    int shown = (int)(name - given + (ptrdiff_t)n);
    if (nearest)
        return cli_usage(self, "unknown option '%.*s'; did you mean '%s%s'?", shown, given,
                         dashes(nearest), nearest);
    if (*find_key(self, name, n, key))
        return cli_usage(self, "unknown option '%.*s'; the key of the run is set by %s=VALUE",
                         shown, given, key);
    return cli_usage(self, "unknown option '%.*s'", shown, given);
}

static int set_choice(const cli_command *self, const cli_option *o, const char *text)
{
    char list[256];
    cli_choice *choice = o->value;
    for (const char *const *w = choice->words; *w; w++)
        if (strcmp(*w, text) == 0) {
            choice->word = *w;
            return CLI_GO_ON;
        }
    return cli_usage(self, "%s%s must be %s, not '%s'", dashes(o->name), o->name,
                     list_names(choice->words, list, sizeof list), text);
}

static int set_value(const cli_command *self, const cli_option *o, const char *text)
{
    char *end = NULL;
    errno = 0;
    if (!*text)
        return cli_usage(self, "%s%s is empty; it needs a value: %s%s %s", dashes(o->name), o->name,
                         dashes(o->name), o->name, o->arg ? o->arg : "");
    switch (o->kind) {
    case CLI_FLAG:
        return cli_usage(self, "%s%s takes no value, but '%s' was given", dashes(o->name), o->name,
                         text);
    case CLI_TEXT:
        *(const char **)o->value = text;
        return CLI_GO_ON;
    case CLI_CHOICE:
        return set_choice(self, o, text);
    case CLI_INT:
        *(int64_t *)o->value = strtoll(text, &end, 10);
        if (end == text || *end || errno)
            return cli_usage(self, "%s%s must be a whole number, not '%s'", dashes(o->name),
                             o->name, text);
        return CLI_GO_ON;
    case CLI_REAL:
        *(double *)o->value = strtod(text, &end);
        if (end == text || *end || errno)
            return cli_usage(self, "%s%s must be a number, not '%s'", dashes(o->name), o->name,
                             text);
        return CLI_GO_ON;
    case CLI_LIST: {
        cli_list *l = o->value;
        if (l->n == CLI_MAX_PLUGIN_DIRS)
            return cli_usage(self, "%s%s is given more than %d times", dashes(o->name), o->name,
                             CLI_MAX_PLUGIN_DIRS);
        l->item[l->n++] = text;
        return CLI_GO_ON;
    }
    }
    return CLI_GO_ON;
}

int cli_parse(const cli_command *self, const cli_option *options, int argc, char **argv,
              int *ret_words)
{
    int words = 0;
    for (int i = 0; i < argc; i++) {
        char *a = argv[i];
        if (strcmp(a, "--") == 0) {
            while (++i < argc)
                argv[words++] = argv[i];
            break;
        }
        if (a[0] != '-' || a[1] == '\0') {
            argv[words++] = a;
            continue;
        }
        if (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0) {
            print_help(self, options);
            return CLI_OK;
        }
        const char *name = a + (a[1] == '-' ? 2 : 1);
        size_t n = strcspn(name, "=");
        const cli_option *o = options;
        while (o->name && (strlen(o->name) != n || strncmp(o->name, name, n) != 0 ||
                           (a[1] == '-') != (dashes(o->name)[1] == '-')))
            o++;
        if (!o->name)
            return unknown_option(self, options, a, name, n);
        int rc = CLI_GO_ON;
        if (name[n] == '=')
            rc = set_value(self, o, name + n + 1);
        else if (o->kind == CLI_FLAG)
            *(bool *)o->value = true;
        else if (++i < argc)
            rc = set_value(self, o, argv[i]);
        else
            rc = cli_usage(self, "%s%s needs a value: %s%s %s", dashes(o->name), o->name,
                           dashes(o->name), o->name, o->arg);
        if (rc != CLI_GO_ON)
            return rc;
    }
    *ret_words = words;
    return CLI_GO_ON;
}

/* ---- shared by commands ---------------------------------------------------------------------- */

int cli_exit(mt_status st)
{
    if (st == MT_OK)
        return CLI_OK;
    if (st == MT_ERR_STOPPED)
        return CLI_STOPPED;
    log_live(NULL);
    log_write(MT_LOG_ERROR, "%s", status_text()[0] ? status_text() : "failed without a text");
    return CLI_FAILED;
}

mt_status cli_find_plugins(const cli_list *dirs)
{
    return registry_init(dirs->item, dirs->n);
}

mt_status cli_read_stream(FILE *f, const char *name, char **ret, size_t *ret_n)
{
    char *text = NULL;
    size_t n = 0, cap = 0;
    for (;;) {
        if (n + 1 >= cap) {
            size_t more = cap ? 2 * cap : 1 << 16;
            char *grown = realloc(text, more);
            if (!grown) {
                free(text);
                return status_nomem(name, more);
            }
            text = grown;
            cap = more;
        }
        size_t got = fread(text + n, 1, cap - n - 1, f);
        n += got;
        if (got == 0)
            break;
    }
    if (ferror(f)) {
        free(text);
        return status_set(MT_ERR_IO, "%s: cannot read: %s", name, strerror(errno));
    }
    text[n] = '\0';
    *ret = text;
    *ret_n = text_drop_mark(text, n);
    return MT_OK;
}

mt_status cli_read_file(const char *path, char **ret, size_t *ret_n)
{
    FILE *f = fopen(path, "rbe");
    if (!f)
        return status_set(MT_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    mt_status st = cli_read_stream(f, path, ret, ret_n);
    fclose(f);
    return st;
}

int cli_read_run(const cli_command *self, char **words, int n_words, run_manifest **ret)
{
    if (n_words < 1)
        return cli_usage(self, "which run? name a manifest");
    for (int i = 1; i < n_words; i++)
        if (!strchr(words[i], '='))
            return cli_usage(
                self, "'%s' is no override; write key=value, such as train.max_steps=10", words[i]);
    mt_status st = run_read(words[0], words + 1, n_words - 1, ret);
    return st == MT_OK ? CLI_GO_ON : cli_exit(st);
}
