/* SPDX-License-Identifier: Apache-2.0
 *
 * The program: finds the sub-command and hands over.
 */
#include "../base/log.h"
#include "cli.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>

static const cli_command *const commands[] = { &cli_train,   &cli_plan,     &cli_generate,
                                               &cli_eval,    &cli_inspect,  &cli_export,
                                               &cli_bench,   &cli_tokenize, &cli_cache,
                                               &cli_plugins, &cli_version };
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static void print_commands(FILE *f)
{
    fprintf(f, "usage: megatrain COMMAND [arguments]\n\n"
               "MegaTrain trains large language models whose weights and optimizer states live in\n"
               "host memory; layers stream through the device one at a time.\n\ncommands:\n");
    for (int i = 0; i < COMMANDS; i++)
        fprintf(f, "  %-10s %s\n", commands[i]->name, commands[i]->brief);
    fprintf(f, "\n`megatrain COMMAND --help` explains a command with an example. Start with\n"
               "  megatrain train first.yaml\n"
               "README.md shows a first.yaml, and how to tune a model of Hugging Face.\n");
}

/* A stream that was closed must not become the number of the next file that is opened, into which
 * messages would then go. Reading and writing it fails, as before. */
static void hold_streams(void)
{
    static const int flags[] = { O_WRONLY, O_RDONLY, O_RDONLY }; /* of no use for either */
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)open("/dev/null", flags[fd]); /* takes the lowest number that is free */
}

static int run(int argc, char **argv)
{
    static char option[] = "--help";
    const char *name = argc > 1 ? argv[1] : NULL;
    if (argc > 2 && strcmp(name, "help") == 0) { /* `help bench step`: `bench step --help` */
        memmove(argv + 1, argv + 2, (size_t)(argc - 2) * sizeof *argv);
        argv[argc - 1] = option;
        name = argv[1];
    }
    if (!name) {
        print_commands(stderr);
        return CLI_USAGE;
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_commands(stdout);
        return CLI_OK;
    }
    if (strcmp(name, "--version") == 0)
        name = "version";

    const char *names[COMMANDS + 1] = { NULL };
    for (int i = 0; i < COMMANDS; i++) {
        names[i] = commands[i]->name;
        if (strcmp(name, names[i]) == 0)
            return commands[i]->run(commands[i], argc - 2, argv + 2);
    }
    const char *nearest = cli_nearest(name, names);
    if (nearest)
        fprintf(stderr, "megatrain: unknown command '%s'; did you mean '%s'?\n", name, nearest);
    else
        fprintf(stderr, "megatrain: unknown command '%s'; `megatrain --help` lists them\n", name);
    return CLI_USAGE;
}

int main(int argc, char **argv)
{
    /* A file-size limit is an error to report, like a full disk, not a reason to die. */
    signal(SIGXFSZ, SIG_IGN);
    hold_streams();
    int rc = run(argc, argv);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    log_write(MT_LOG_ERROR, "the standard output cannot be written");
    return rc == CLI_OK ? CLI_FAILED : rc;
}
