/* SPDX-License-Identifier: Apache-2.0
 *
 * What the sub-commands share: options, help, plugin folders, exit codes.
 */
#ifndef MT_CORE_CLI_H
#define MT_CORE_CLI_H

#include "../manifest/run.h"

#include <stdio.h>

/* Exit codes. */
enum {
    CLI_OK = 0,
    CLI_FAILED = 1,
    CLI_USAGE = 2,
    CLI_STOPPED = 75 /* by a signal, saved: the same command goes on */
};

enum { CLI_MAX_PLUGIN_DIRS = 16 };

/* Folders of --plugin-dir. */
typedef struct cli_list {
    const char *item[CLI_MAX_PLUGIN_DIRS];
    int32_t n;
} cli_list;

typedef enum cli_kind { CLI_FLAG, CLI_TEXT, CLI_CHOICE, CLI_INT, CLI_REAL, CLI_LIST } cli_kind;

/* A word of a few. */
typedef struct cli_choice {
    const char *word;
    const char *const *words; /* NULL-terminated */
} cli_choice;

/* One `--name`, or `-n` when the name is one letter. `value` points to bool, const char *,
 * cli_choice, int64_t, double or cli_list and holds the default. */
typedef struct cli_option {
    const char *name; /* without dashes; NULL ends a table */
    cli_kind kind;
    void *value;
    const char *arg; /* how help calls the value; NULL for flags */
    const char *help;
} cli_option;

typedef struct cli_command {
    const char *name;
    const char *words; /* of the usage line: "RUN.yaml [key=value ...]" */
    const char *brief; /* one line of the list of commands */
    const char *help;  /* paragraphs under the usage line */
    const char *example;
    int (*run)(const struct cli_command *self, int argc, char **argv);
} cli_command;

extern const cli_command cli_train, cli_plan, cli_generate, cli_eval, cli_export, cli_inspect,
    cli_bench, cli_tokenize, cli_cache, cli_plugins, cli_version;

/* An option that every command with plugins has. */
#define CLI_PLUGIN_DIR(list)                                                                       \
    {                                                                                              \
        "plugin-dir", CLI_LIST, (list), "DIR", "look for plugins here first (repeatable)"          \
    }

enum { CLI_GO_ON = -1 };

/* Reads the arguments after the command's name: options go to their values, everything else is
 * moved to the front of argv and counted. Returns CLI_GO_ON, or the exit code of a command that is
 * over (help was asked for, or the usage is wrong and has been explained). `-` and what follows
 * `--` are no options. */
int cli_parse(const cli_command *self, const cli_option *options, int argc, char **argv,
              int *ret_words);

/* Explains wrong usage and points to --help; returns CLI_USAGE. */
int cli_usage(const cli_command *self, const char *fmt, ...) MT_PRINTF(2, 3);

/* The same for a word that is none of `names` (NULL-terminated), which it lists or suggests. */
int cli_unknown(const cli_command *self, const char *word, const char *const *names);

/* The exit code of a finished command; prints the error text of a failed one. */
int cli_exit(mt_status st);

/* The one of `names` (NULL-terminated) that is most like `word`, NULL when none is alike. */
const char *cli_nearest(const char *word, const char *const *names);

/* Finds plugins: in `dirs`, in `plugins` beside the executable (a build tree), and where the
 * registry looks by itself. */
mt_status cli_find_plugins(const cli_list *dirs);

/* Reads a text, a stream to its end or a file of any size, into memory that the caller frees; a NUL
 * byte follows, and a mark of byte order at its start is left out. `name` is what messages call the
 * stream. */
mt_status cli_read_stream(FILE *f, const char *name, char **ret, size_t *ret_n);
mt_status cli_read_file(const char *path, char **ret, size_t *ret_n);

/* Reads words[0] as a run manifest and the other words as overrides. Returns CLI_GO_ON or the exit
 * code. */
int cli_read_run(const cli_command *self, char **words, int n_words, run_manifest **ret);

#endif
