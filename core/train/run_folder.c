/* SPDX-License-Identifier: Apache-2.0
 *
 * Run folders: made, recognised, and searched for what to resume from.
 */
#include "run_folder.h"

#include "../base/log.h"
#include "../base/status.h"
#include "../manifest/mistaken.h"
#include "checkpoint_files.h"
#include "files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static mt_status join(const char *folder, const char *name, char ret[RUN_FOLDER_PATH])
{
    int n = snprintf(ret, RUN_FOLDER_PATH, "%s/%s", folder, name);
    if (n >= RUN_FOLDER_PATH)
        return status_set(MT_ERR_INVALID, "%s/%s: the path is longer than %d bytes", folder, name,
                          RUN_FOLDER_PATH - 1);
    return MT_OK;
}

/* Puts the manifest's place of `key` in front of the present text. */
static mt_status blame(const run_manifest *run, const char *key, const char *remedy)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", status_text());
    const mt_config *c = config_section(run->config, "");
    return c->reject(c, key, "cannot be used: %s; %s", text, remedy);
}

/* What the run starts from: f->resume. */
static mt_status choose_resume(const run_manifest *run, run_folder *f)
{
    const char *from = run->resume_from_checkpoint;
    if (strcmp(from, "auto") != 0 && strcmp(from, "none") != 0) {
        if (strlen(from) >= sizeof f->resume)
            return status_set(MT_ERR_INVALID, "resume_from_checkpoint: the path is too long");
        strcpy(f->resume, from);
        return MT_OK;
    }
    mt_status st = checkpoint_latest(f->checkpoints, f->resume, sizeof f->resume);
    if (st == MT_ERR_NOT_FOUND) {
        f->resume[0] = '\0';
        return MT_OK;
    }
    if (st != MT_OK || strcmp(from, "none") != 0)
        return st;
    status_set(MT_ERR_INVALID,
               "%s holds the checkpoint of an earlier run, %s, and "
               "resume_from_checkpoint is 'none'",
               run->output_dir, f->resume);
    return blame(run, "output_dir",
                 "name another folder, remove this one, or resume with "
                 "resume_from_checkpoint: auto");
}

/* Is it RUN/checkpoints? `ret` gets RUN, as the path says it. */
static bool is_folder_of_checkpoints(const char *path, char ret[RUN_FOLDER_PATH])
{
    static const char name[] = "/" RUN_FOLDER_CHECKPOINTS;
    size_t n = strlen(path), k = sizeof name - 1;
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n <= k || n - k >= RUN_FOLDER_PATH || strncmp(path + n - k, name, k) != 0 ||
        !files_is_folder(path))
        return false;
    snprintf(ret, RUN_FOLDER_PATH, "%.*s", (int)(n - k), path);
    return true;
}

const char *run_folder_of(const char *checkpoint, char ret[RUN_FOLDER_PATH])
{
    char state[RUN_FOLDER_PATH], *real = realpath(checkpoint, NULL);
    char *slash = real ? strrchr(real, '/') : NULL;
    bool good = slash && join(real, CHECKPOINT_STATE_FILE, state) == MT_OK && files_is_file(state);
    if (good)
        *slash = '\0';
    if (!good || !is_folder_of_checkpoints(real, ret))
        *ret = '\0';
    free(real);
    return ret;
}

bool run_folder_find_base(const char *checkpoint, run_base *ret)
{
    char path[RUN_FOLDER_PATH];
    config *whole = NULL;
    const mt_config *c = NULL;
    const char *name = NULL, *init = NULL;
    *ret = (run_base){ 0 };
    if (*run_folder_of(checkpoint, ret->folder) &&
        join(ret->folder, RUN_FOLDER_MANIFEST, path) == MT_OK && files_is_file(path) &&
        config_read_yaml(path, &whole) == MT_OK)
        c = config_section(whole, "");
    bool known = c && c->get_string(c, "model", &name) == MT_OK &&
                 strlen(name) < sizeof ret->model &&
                 mt_config_string(c, "init", "", &init) == MT_OK;
    if (known) {
        strcpy(ret->model, name);
        ret->from_scratch = init[0] ? strcmp(init, "random") == 0 : !files_is_folder(name);
    }
    config_destroy(whole);
    return known;
}

/* A run goes on with the model that it began with, which need not lie where it lay. */
static mt_status check_base(const run_manifest *run, const run_folder *f)
{
    run_base base;
    struct stat then, now;
    if (!f->resume[0] || !run_folder_find_base(f->resume, &base))
        return MT_OK;
    const mt_config *c = config_section(run->config, "");
    bool gone = stat(base.model, &then) != 0;
    if (!gone && stat(run->model, &now) == 0 &&
        (then.st_dev != now.st_dev || then.st_ino != now.st_ino))
        return c->reject(c, "model",
                         "is %s, but the run of %s began with %s; name that one again, or another "
                         "output_dir for a run that begins with this one",
                         run->model, f->resume, base.model);
    if (base.from_scratch != run->from_scratch) {
        static const char *const init[] = { "pretrained", "random" };
        return c->reject(c, "init",
                         "is %s, but the run of %s began with %s weights; set init: %s, or name "
                         "another output_dir",
                         init[run->from_scratch], f->resume, init[base.from_scratch],
                         init[base.from_scratch]);
    }
    if (gone)
        log_write(MT_LOG_WARNING,
                  "%s, with which the run of %s began, is not there any more; %s takes its place",
                  base.model, f->resume, run->model);
    return MT_OK;
}

const char *run_folder_list(const char *folder, char ret[RUN_FOLDER_LIST])
{
    char checkpoints[RUN_FOLDER_PATH];
    if (join(folder, RUN_FOLDER_CHECKPOINTS, checkpoints) != MT_OK)
        snprintf(ret, RUN_FOLDER_LIST, "%.60s...: the path is too long", folder);
    else
        checkpoint_list(checkpoints, ret, RUN_FOLDER_LIST);
    return ret;
}

/* A checkpoint that is named must be there. */
static mt_status check_resume(const run_manifest *run)
{
    const char *from = run->resume_from_checkpoint;
    char list[RUN_FOLDER_LIST], path[RUN_FOLDER_PATH];
    if (strcmp(from, "auto") == 0 || strcmp(from, "none") == 0)
        return MT_OK;
    mt_status st = join(from, CHECKPOINT_STATE_FILE, path);
    if (st != MT_OK || files_is_file(path))
        return st;
    bool there = access(from, F_OK) == 0;
    const mt_config *c = config_section(run->config, "checkpoint");
    return c->reject(c, "resume_from_checkpoint",
                     "names '%s', %s; %s: name the path of a checkpoint, auto for the newest, or "
                     "none for a new run",
                     from,
                     there ? "which is no complete checkpoint (no " CHECKPOINT_STATE_FILE " in it)"
                     : *from == '/' ? "which does not exist"
                                    : "which does not exist below the working directory",
                     run_folder_list(run_folder_is(from) ? from : run->output_dir, list));
}

/* A manifest that stands where no run has been is the user's, and not to be replaced. */
static mt_status check_manifest(const run_manifest *run)
{
    char manifest[RUN_FOLDER_PATH], lines[RUN_FOLDER_PATH];
    mt_status st = join(run->output_dir, RUN_FOLDER_MANIFEST, manifest);
    if (st == MT_OK)
        st = join(run->output_dir, RUN_FOLDER_METRICS, lines);
    if (st != MT_OK || !files_is_file(manifest) || files_is_file(lines) ||
        run_folder_is(run->output_dir))
        return st;
    const mt_config *c = config_section(run->config, "");
    return c->reject(c, "output_dir",
                     "is a folder where %s stands, which is of no earlier run; it would be "
                     "replaced by the manifest as it takes effect: name another folder",
                     manifest);
}

mt_status run_folder_check(const run_manifest *run)
{
    const mt_config *c = config_section(run->config, "");
    if (mistaken_home(run->output_dir))
        return c->reject(c, "output_dir",
                         "begins with ~, which only a shell knows: write the "
                         "path out");
    if (files_check_folder(run->output_dir) != MT_OK)
        return blame(run, "output_dir", "name a folder that you can write to");
    mt_status st = check_manifest(run);
    return st == MT_OK ? check_resume(run) : st;
}

mt_status run_folder_open(run_manifest *run, run_folder *ret, metrics **ret_metrics)
{
    run_folder f = { 0 };
    mt_status st = join(run->output_dir, RUN_FOLDER_METRICS, f.metrics);
    if (st == MT_OK)
        st = join(run->output_dir, RUN_FOLDER_CHECKPOINTS, f.checkpoints);
    if (st != MT_OK)
        return st;
    st = files_make_folders(f.checkpoints);
    if (st == MT_OK && access(f.checkpoints, W_OK) != 0)
        st = status_set(MT_ERR_IO, "%s: cannot write: %s", f.checkpoints, strerror(errno));
    if (st != MT_OK)
        return blame(run, "output_dir", "name a folder that you can write to");

    metrics *m = NULL;
    st = metrics_open(f.metrics, &m);
    if (st == MT_OK)
        st = choose_resume(run, &f);
    if (st == MT_OK)
        st = check_base(run, &f);
    if (st != MT_OK) {
        metrics_close(m);
        return st;
    }
    *ret = f;
    *ret_metrics = m;
    return MT_OK;
}

mt_status run_folder_write_manifest(const run_manifest *run)
{
    char path[RUN_FOLDER_PATH], aside[RUN_FOLDER_PATH] = "";
    mt_status st = join(run->output_dir, RUN_FOLDER_MANIFEST, path);
    if (st == MT_OK)
        st = join(run->output_dir, RUN_FOLDER_MANIFEST ".new", aside);
    if (st == MT_OK)
        st = config_write_yaml(run->config, aside);
    if (st == MT_OK && rename(aside, path) != 0)
        st = status_set(MT_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    return st;
}

bool run_folder_is(const char *path)
{
    char folder[RUN_FOLDER_PATH];
    return join(path, RUN_FOLDER_CHECKPOINTS, folder) == MT_OK && files_is_folder(folder);
}

mt_status run_folder_find_model(const char *path, char ret[RUN_FOLDER_PATH])
{
    char folder[RUN_FOLDER_PATH], list[RUN_FOLDER_LIST];
    if (!run_folder_is(path)) {
        if (is_folder_of_checkpoints(path, folder))
            return status_set(MT_ERR_INVALID,
                              "%s: is the folder of a run's checkpoints; name the run folder for "
                              "the newest, or one of them: %s",
                              path, run_folder_list(folder, list));
        if (strlen(path) >= RUN_FOLDER_PATH)
            return status_set(MT_ERR_INVALID, "the path '%.60s...' is too long", path);
        strcpy(ret, path);
        return MT_OK;
    }
    mt_status st = join(path, RUN_FOLDER_CHECKPOINTS, folder);
    if (st == MT_OK)
        st = checkpoint_latest(folder, ret, RUN_FOLDER_PATH);
    if (st == MT_ERR_NOT_FOUND)
        st = status_set(st, "%s: the run has no complete checkpoint yet", path);
    return st;
}
