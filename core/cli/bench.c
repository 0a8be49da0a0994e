/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain bench: finds which of its measurements is meant.
 */
#include "bench.h"

static const cli_command *const benches[] = { &cli_bench_hardware, &cli_bench_step, &cli_bench_unit,
                                              &cli_bench_start };
enum { BENCHES = sizeof benches / sizeof benches[0] };

static int run_bench(const cli_command *self, int argc, char **argv)
{
    const char *names[BENCHES + 1] = { NULL };
    for (int i = 0; i < BENCHES; i++) {
        names[i] = benches[i]->name + strlen("bench ");
        if (argc > 0 && strcmp(argv[0], names[i]) == 0)
            return benches[i]->run(benches[i], argc - 1, argv + 1);
    }
    int words = 0, rc = cli_parse(self, &(cli_option){ 0 }, argc, argv, &words);
    if (rc != CLI_GO_ON)
        return rc;
    if (!words)
        return cli_usage(self, "what? `hardware`, `step`, `unit` or `start`");
    return cli_unknown(self, argv[0], names);
}

const cli_command cli_bench = {
    .name = "bench",
    .words = "hardware | step MODEL ... | unit MODEL ... | start RUN.yaml ... [options]",
    .brief = "measure this machine, or a model on it",
    .help =
        "hardware measures what this machine can do, and keeps it as the profile that plans are\n"
        "made with; step measures whole training steps of a model beside that, unit one layer of\n"
        "each kind by itself; start measures what `train` does before its first step, beside the\n"
        "disk. `megatrain bench step --help` and so on tell more.",
    .example = "example: how fast would TinyLlama train here?\n"
               "  megatrain bench step arch/llama/models/tinyllama-1.1b.yaml --tokens 4k",
    .run = run_bench,
};
