/* SPDX-License-Identifier: Apache-2.0
 *
 * The tests of `megatrain plugins check` and the processes that they run in: a plugin that crashes,
 * hangs or calls exit fails its test and nothing else.
 */
#include "plugin_check.h"

#include "../../plugins/host/registry.h"
#include "../base/status.h"
#include "../template/model.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct check {
    const char *path;
    /* For check_section: a section of the manifest, and what is done with it and the plugin's table
     * for that interface. */
    const char *section, *interface;
    mt_status (*test)(const void *table, const mt_config *keys);
} check;

typedef mt_status (*check_fn)(const check *c);

/* ---- one process a test ---------------------------------------------------------------------- */

/* What the child says first when the test is over: a plugin that calls exit says neither. */
enum { PASSED = '+', FAILED = '-' };

/* The child: runs the test, sends its verdict and its text through the pipe, and ends without
 * cleaning up, which is the parent's to do. */
static _Noreturn void run_child(check_fn test, const check *c, int out, unsigned timeout)
{
    alarm(timeout);
    mt_status st = test(c);
    char text[2048];
    int n = snprintf(text, sizeof text, "%c%s", st == MT_OK ? PASSED : FAILED,
                     st == MT_OK ? "" : status_text());
    ssize_t sent = write(out, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
    (void)sent;
    _exit(0);
}

static bool run_test(const char *name, check_fn test, const check *c, unsigned timeout)
{
    int fd[2];
    fflush(stdout);
    if (pipe(fd) != 0) {
        printf("FAILED  %s: no pipe: %s\n", name, strerror(errno));
        return false;
    }
    pid_t child = fork();
    if (child == 0) {
        close(fd[0]);
        run_child(test, c, fd[1], timeout);
    }
    close(fd[1]);
    char text[2048];
    size_t used = 0;
    ssize_t n;
    while (child > 0 && used < sizeof text - 1 &&
           (n = read(fd[0], text + used, sizeof text - 1 - used)) != 0) {
        if (n > 0)
            used += (size_t)n;
        else if (errno != EINTR)
            break;
    }
    text[used] = '\0';
    close(fd[0]);

    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    if (child < 0)
        printf("FAILED  %s: no process: %s\n", name, strerror(errno));
    else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        printf("FAILED  %s: not done after %u seconds\n", name, timeout);
    else if (WIFSIGNALED(status))
        printf("FAILED  %s: ended by signal %d (%s)\n", name, WTERMSIG(status),
               strsignal(WTERMSIG(status)));
    else if (used == 0)
        printf("FAILED  %s: the plugin ended the process, with exit code %d; it has to return a "
               "status instead\n",
               name, WEXITSTATUS(status));
    else if (*text == FAILED)
        printf("FAILED  %s: %s\n", name, text + 1);
    else
        printf("ok      %s\n", name);
    return child > 0 && WIFEXITED(status) && *text == PASSED;
}

/* ---- the tests ------------------------------------------------------------------------------- */

static mt_status check_load(const check *c)
{
    const plugin_record *r = NULL;
    return registry_load_file(c->path, &r);
}

/* Two configurations must describe the same model, since templates are rebuilt at will. */
static mt_status same_model(const model *a, const model *b)
{
    if (a->n_units != b->n_units || a->n_params != b->n_params ||
        a->total_params != b->total_params)
        return status_set(MT_ERR_INVALID,
                          "configured twice: %d units, %d parameters of %lld elements, then %d, %d "
                          "and %lld",
                          a->n_units, a->n_params, (long long)a->total_params, b->n_units,
                          b->n_params, (long long)b->total_params);
    for (int32_t i = 0; i < a->n_params; i++)
        if (strcmp(a->params[i].name, b->params[i].name) != 0 ||
            a->params[i].rows != b->params[i].rows || a->params[i].cols != b->params[i].cols ||
            a->params[i].offset != b->params[i].offset)
            return status_set(MT_ERR_INVALID, "configured twice: parameter %d is %s, then %s", i,
                              a->params[i].name, b->params[i].name);
    return MT_OK;
}

/* Runs the test that c names, on the plugin's table and a section of its manifest. */
static mt_status check_section(const check *c)
{
    const plugin_record *r = NULL;
    config *manifest = NULL;
    mt_status st = registry_load_file(c->path, &r);
    if (st == MT_OK)
        st = config_read_yaml(r->manifest_path, &manifest);
    if (st != MT_OK)
        return st;
    const mt_config *keys = config_section(manifest, c->section);
    st = keys ? c->test(registry_interface(r, c->interface), keys)
              : status_nomem("a section of the manifest", sizeof *keys);
    config_destroy(manifest);
    return st;
}

static mt_status configure_twice(const void *arch, const mt_config *hyper)
{
    model *a = NULL, *b = NULL;
    mt_status st = model_create(arch, hyper, &a);
    if (st == MT_OK)
        st = model_create(arch, hyper, &b);
    if (st == MT_OK)
        st = same_model(a, b);
    model_destroy(b);
    model_destroy(a);
    return st;
}

static mt_status derive_gradients(const void *arch, const mt_config *hyper)
{
    return plugin_check_gradients(arch, hyper);
}

static mt_status update_tensors(const void *optim, const mt_config *keys)
{
    return plugin_check_updates(optim, keys);
}

static bool check_arch(const plugin_record *r, unsigned timeout)
{
    config *manifest = NULL;
    if (config_read_yaml(r->manifest_path, &manifest) != MT_OK) {
        printf("FAILED  manifest: %s\n", status_text());
        return false;
    }
    const mt_config *root = config_section(manifest, "");
    int64_t n = root->length(root, "check");
    if (n == 0)
        printf("FAILED  gradients: %s has no list `check` of small hyper-parameters to test at; "
               "docs/plugins.md shows one\n",
               r->manifest_path);
    bool good = n > 0;
    for (int64_t i = 0; i < n; i++) {
        char section[32], name[64];
        snprintf(section, sizeof section, "check.%lld", (long long)i);
        check c = { r->path, section, MT_ARCH_INTERFACE, configure_twice };
        snprintf(name, sizeof name, "%s: configure twice", section);
        bool configured = run_test(name, check_section, &c, timeout);
        c.test = derive_gradients;
        snprintf(name, sizeof name, "%s: gradients of every template", section);
        good &= configured && run_test(name, check_section, &c, timeout);
    }
    config_destroy(manifest);
    return good;
}

/* Without a list `check` the first section is one that is missing, and so has no keys. */
static bool check_optim(const plugin_record *r, unsigned timeout)
{
    config *manifest = NULL;
    if (config_read_yaml(r->manifest_path, &manifest) != MT_OK) {
        printf("FAILED  manifest: %s\n", status_text());
        return false;
    }
    const mt_config *root = config_section(manifest, "");
    int64_t n = root->length(root, "check");
    bool good = true;
    for (int64_t i = 0; i < n || i == 0; i++) {
        char section[32], name[64];
        snprintf(section, sizeof section, "check.%lld", (long long)i);
        snprintf(name, sizeof name, "%s: the same updates in ranges", n ? section : "defaults");
        const check c = { r->path, section, MT_OPTIM_INTERFACE, update_tensors };
        good &= run_test(name, check_section, &c, timeout);
    }
    config_destroy(manifest);
    return good;
}

bool plugin_check(const char *path, unsigned timeout)
{
    const check c = { .path = path };
    const plugin_record *r = NULL;
    bool good = run_test("load, manifest, handshake", check_load, &c, timeout);
    /* It loaded in a process of its own, so it is safe to load it here. */
    if (good && registry_load_file(path, &r) != MT_OK) {
        printf("FAILED  %s\n", status_text());
        good = false;
    }
    if (good && r->kind == PLUGIN_ARCH)
        good = check_arch(r, timeout);
    if (good && r->kind == PLUGIN_OPTIM)
        good = check_optim(r, timeout);
    puts(good ? "all tests passed" : "some tests failed");
    return good;
}
