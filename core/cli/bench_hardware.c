/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain bench hardware: what the machine and its device can do, as a table and as the profile
 * that plans are made with.
 */
#include "../../plugins/host/registry.h"
#include "../base/log.h"
#include "../base/status.h"
#include "../train/files.h"
#include "../train/human.h"
#include "../train/profile.h"
#include "../train/session.h"
#include "bench.h"

#include <stdio.h>

static void show_progress(const char *what)
{
    char line[192];
    snprintf(line, sizeof line, "measuring %s", what);
    log_live(line);
}

/* ---- the table ------------------------------------------------------------------------------- */

static double giga(double x)
{
    return x * 1e-9;
}

static void print_memory(const hardware *h)
{
    printf("\n%-34s %10s %10s  GB/s\n", "copies between host and device", "in", "out");
    for (int32_t i = 0; i < h->n_copies; i++) {
        const hardware_copy *c = &h->copy[i];
        printf("  %-32s %10.2f %10.2f\n", human_bytes(c->bytes).s, giga(c->in), giga(c->out));
        printf("  %-32s %10.2f %10.2f\n", "  both at once", giga(c->both_in), giga(c->both_out));
    }
    printf("  %-32s %10.2f\n", "memory made for them (pinned)", giga(h->pin));
    printf("\n%-34s %10s %10s  GB/s\n", "host memory", "copy", "update");
    for (int32_t i = 0; i < h->n_threads; i++)
        printf("  %3lld thread%-23s %10.2f %10.2f   %.2f Gparam/s\n",
               (long long)h->memory[i].threads, h->memory[i].threads == 1 ? "" : "s",
               giga(h->memory[i].copy), giga(h->memory[i].update), giga(h->memory[i].update / 28));
    printf("\n%-34s %10.2f             GB/s\n", "device memory, copy", giga(h->device_copy));
    if (h->disk_read > 0)
        printf("%-34s %10.2f             GB/s, write %.2f%s\n", "disk, read", giga(h->disk_read),
               giga(h->disk_write), h->disk_direct ? "" : " (through the page cache)");
}

static void print_compute(const hardware *h)
{
    char name[64];
    bool tera = h->gemm[h->n_gemms - 1].forward >= 1e13;
    double one = tera ? 1e12 : 1e9;
    printf("\n%-34s %10s %10s %10s  %cFLOP/s\n", "GEMM: rows x columns x inner", "forward", "input",
           "weight", tera ? 'T' : 'G');
    for (int32_t i = 0; i < h->n_gemms; i++) {
        const hardware_gemm *g = &h->gemm[i];
        snprintf(name, sizeof name, "%s %lld x %lld x %lld", mt_dtype_name(g->dtype),
                 (long long)g->rows, (long long)g->cols, (long long)g->inner);
        printf("  %-32s %10.1f %10.1f %10.1f\n", name, g->forward / one, g->input_gradient / one,
               g->weight_gradient / one);
    }
    bool any = h->n_attentions > 0 && h->attention[0].any_order > 0;
    printf("\n%-34s %10s %10s %10s  %cFLOP/s\n", "attention, causal", "forward", "backward",
           any ? "any order" : "", tera ? 'T' : 'G');
    for (int32_t i = 0; i < h->n_attentions; i++) {
        const hardware_attention *a = &h->attention[i];
        snprintf(name, sizeof name, "%s D%lld T%lld, %lld heads", mt_dtype_name(a->dtype),
                 (long long)a->head_dim, (long long)a->document, (long long)a->heads);
        printf("  %-32s %10.1f %10.1f", name, a->forward / one, a->backward / one);
        if (a->any_order > 0)
            printf(" %10.1f", a->any_order / one);
        printf("\n");
    }
    if (h->n_scans > 0)
        printf("\n%-34s %10s %10s             GFLOP/s\n", "gated delta rule", "forward",
               "backward");
    for (int32_t i = 0; i < h->n_scans; i++) {
        const hardware_scan *s = &h->scan[i];
        snprintf(name, sizeof name, "%s D%lld T%lld, %lld heads", mt_dtype_name(s->dtype),
                 (long long)s->head_dim, (long long)s->document, (long long)s->v_heads);
        printf("  %-32s %10.1f %10.1f\n", name, giga(s->forward), giga(s->backward));
    }
}

static void print_hardware(const hardware *h)
{
    printf("machine  %s, %lld processors, %s of memory free\n", h->host, (long long)h->cpus,
           human_bytes(h->host_memory).s);
    printf("device   %s: %s (%s), %s of memory free\n", h->kind, h->device.name, h->device.details,
           human_bytes(h->device.memory_free).s);
    print_memory(h);
    print_compute(h);
}

/* ---- the command ----------------------------------------------------------------------------- */

/* Not after half a minute of measuring. */
static mt_status check_places(const hardware_options *options, const char *file, bool make_folder)
{
    if (options->disk && !files_is_folder(options->disk))
        return status_set(MT_ERR_NOT_FOUND,
                          "%s: cannot measure this disk: there is no such folder; name one that "
                          "exists",
                          options->disk);
    mt_status st = options->disk ? files_check_folder(options->disk) : MT_OK;
    return st == MT_OK && file ? profile_prepare(file, make_folder) : st;
}

static mt_status measure(const char *device, const hardware_options *options, const char *file)
{
    char path[PROFILE_PATH];
    hardware h = { 0 };
    session s = { 0 };
    mt_status st = session_open_device(&s, device, "auto", 0);
    /* What is rough must not replace what plans are made with. */
    const char *to = file ? file : options->quick ? NULL : path;
    if (st == MT_OK && to == path)
        st = profile_cache_path(s.backend->kind, path);
    /* The cache's folder is ours to make; one that the user names must stand. */
    if (st == MT_OK)
        st = check_places(options, to, to == path);
    if (st == MT_OK)
        st = hardware_measure(s.backend, s.device, options, &h);
    log_live(NULL);
    if (st == MT_OK) {
        print_hardware(&h);
        st = to ? profile_write(&h, to) : MT_OK;
    }
    if (st == MT_OK && to)
        printf("\nprofile  %s\n", to);
    session_close(&s);
    return st;
}

static int run_bench_hardware(const cli_command *self, int argc, char **argv)
{
    cli_list dirs = { 0 };
    const char *device = "auto", *file = NULL;
    hardware_options how = { .progress = show_progress };
    const cli_option options[] = {
        { "device", CLI_TEXT, &device, "KIND", "auto, cpu or cuda (auto)" },
        { "disk", CLI_TEXT, &how.disk, "DIR", "measure the disk of this folder too" },
        { "o", CLI_TEXT, &file, "FILE", "write the profile here, not to the cache" },
        { "quick", CLI_FLAG, &how.quick, NULL, "rough figures in a second or two, not cached" },
        CLI_PLUGIN_DIR(&dirs),
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc == CLI_GO_ON && words)
        rc = cli_usage(self, "'%s' is no option", argv[0]);
    if (rc != CLI_GO_ON)
        return rc;
    mt_status st = cli_find_plugins(&dirs);
    if (st == MT_OK)
        st = measure(device, &how, file);
    rc = cli_exit(st);
    registry_finish();
    return rc;
}

const cli_command cli_bench_hardware = {
    .name = "bench hardware",
    .words = "[options]",
    .brief = "measure the machine",
    .help =
        "Measures what training depends on: copies between host and device, host memory by one,\n"
        "half and all processors (a plain copy, and a stream that touches 28 bytes a parameter\n"
        "as AdamW does), GEMMs, attention and the gated delta rule by the kernels that training "
        "runs, device memory,\n"
        "and with --disk the disk of a folder, in a file of 1 GiB that is gone afterwards. Takes\n"
        "up to half a minute on a machine that does nothing else; one that does gives wrong\n"
        "figures.\n\n"
        "The figures are kept as a profile in the user's cache. `plan`, `train` and `bench step`\n"
        "use it as long as device and version are the same; `plan --profile FILE` plans for\n"
        "another machine with a profile that was measured there.",
    .example = "example: measure a server, plan for it elsewhere\n"
               "  megatrain bench hardware -o server.yaml\n"
               "  megatrain plan run.yaml --profile server.yaml",
    .run = run_bench_hardware,
};
