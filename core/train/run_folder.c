/* SPDX-License-Identifier: Apache-2.0
 *
 * Run folders: made, recognised, and searched for what to resume from.
 */
#include "run_folder.h"

#include "../base/log.h"
#include "../base/status.h"
#include "checkpoint.h"
#include "files.h"

#include <errno.h>
#include <stdio.h>
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

mt_status run_folder_check(const run_manifest *run)
{
    if (access(run->output_dir, F_OK) != 0 || files_is_folder(run->output_dir))
        return MT_OK;
    status_set(MT_ERR_INVALID, "%s: not a folder", run->output_dir);
    return blame(run, "output_dir", "name a folder that you can write to");
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
    char folder[RUN_FOLDER_PATH];
    if (!run_folder_is(path)) {
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
