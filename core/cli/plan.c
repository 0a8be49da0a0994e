/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain plan: what a run would take, before anything is allocated.
 */
#include "../../plugins/host/registry.h"
#include "../train/human.h"
#include "../train/loop.h"
#include "../train/session.h"
#include "cli.h"

#include <stdio.h>

static void print_line(void *arg, const char *text)
{
    (void)arg;
    puts(text);
}

static void print_plan(const session *s, const run_manifest *run)
{
    int64_t steps = train_count_steps(s, run);
    if (!s->data)
        printf("no data was read: every micro-batch is taken as full, of documents of up to %s "
               "tokens\n",
               human_grouped(run->max_seq_len).s);
    plan_print(s->plan, false, print_line, NULL);
    if (steps > 0)
        printf("  %s step%s: about %s, evaluations and checkpoints not counted\n",
               human_grouped(steps).s, steps == 1 ? "" : "s",
               human_seconds((double)steps * s->plan->seconds).s);
    printf("  by %s%s\n", session_profile_name(s).s,
           s->measured_at ? "" : "; `megatrain bench hardware` makes a better one");
}

/* Says by which settings the step's tokens would take clearly less time in larger micro-batches, of
 * up to as many tokens as `bench step` tries. Leaves another plan in s. */
static void advise(session *s, const run_manifest *run)
{
    const int64_t n = run->gradient_accumulation_steps;
    const int64_t micro = run->micro_batch_size * run->max_seq_len;
    const double now = s->plan->seconds;
    double best = 0.97 * now;
    int64_t factor = 1;
    for (int64_t k = 2; n % k == 0 && k * micro <= SESSION_MOST_MICRO; k *= 2) {
        if (session_make_larger_plan(s, run, k) < 0)
            break;
        if (s->plan->seconds < best * 0.99) {
            best = s->plan->seconds;
            factor = k;
        }
    }
    if (factor == 1)
        return;
    const mt_config *train = config_section(run->config, "train");
    char steps[64] = "";
    if (!train->has(train, "tokens_per_step"))
        snprintf(steps, sizeof steps, " and train.gradient_accumulation_steps=%lld",
                 (long long)(n / factor));
    printf(
        "  with train.micro_batch_size=%lld%s the same tokens would take %s a step, %.0f%% less\n",
        (long long)(factor * run->micro_batch_size), steps, human_seconds(best).s,
        100 * (1 - best / now));
}

static int run_plan(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    const char *profile = NULL;
    bool no_data = false;
    const cli_option options[] = {
        { "profile", CLI_TEXT, &profile, "FILE", "plan for the machine that this was measured on" },
        { "no-data", CLI_FLAG, &no_data, NULL, "read neither tokenizer nor data" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    run_manifest *run = NULL;
    if (rc == CLI_GO_ON)
        rc = cli_read_run(self, argv, words, &run);
    if (rc != CLI_GO_ON)
        return rc;

    session s = { .data_use = no_data ? SESSION_DATA_LEFT_OUT : SESSION_DATA_IF_NAMED };
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK && profile)
        st = session_use_profile(&s, profile);
    if (st == MT_OK)
        st = session_open_run(&s, run, true);
    if (st == MT_OK && profile)
        printf("for %s: %s %s, %s of host memory\n", s.elsewhere->host, s.elsewhere->kind,
               s.info.name,
               human_bytes(run->memory_host >= 0 ? run->memory_host : s.elsewhere->host_memory).s);
    if (st == MT_OK)
        print_plan(&s, run);
    if (st == MT_OK)
        advise(&s, run);
    rc = cli_exit(st);
    session_close(&s);
    run_destroy(run);
    registry_finish();
    return rc;
}

const cli_command cli_plan = {
    .name = "plan",
    .words = "RUN.yaml [key=value ...] [options]",
    .brief = "show the memory and time that a run would take",
    .help =
        "Plans the run of RUN.yaml and allocates nothing: bytes per tier and kind, what each\n"
        "unit keeps for backward, the step time to expect with what bounds it, and with which\n"
        "micro-batch the same tokens would take less, where that is worth a word. `train`\n"
        "makes the same plan, to the byte, and refuses what does not fit. With --profile the plan\n"
        "is for another machine, on which `megatrain bench hardware -o FILE` wrote FILE.\n"
        "Data need not be there: a run that names none, or with --no-data any run, is planned\n"
        "for full micro-batches.",

    .example = "example: would longer sequences fit?\n"
               "  megatrain plan runs/shakespeare.yaml data.max_seq_len=4096",
    .run = run_plan,
};
