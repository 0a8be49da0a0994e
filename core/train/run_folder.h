/* SPDX-License-Identifier: Apache-2.0
 *
 * A run folder: the effective manifest, metrics and checkpoints of one run.
 */
#ifndef MT_CORE_RUN_FOLDER_H
#define MT_CORE_RUN_FOLDER_H

#include "../manifest/run.h"
#include "metrics.h"

/* What stands in a run folder. */
#define RUN_FOLDER_MANIFEST    "run.yaml"      /* the effective manifest */
#define RUN_FOLDER_METRICS     "metrics.jsonl" /* see metrics.h */
#define RUN_FOLDER_EXPORT      "model"         /* the finished run as a Hugging Face folder */
#define RUN_FOLDER_CHECKPOINTS "checkpoints"   /* step-NNNNNN, see checkpoint.h */

enum { RUN_FOLDER_PATH = 4096 };

typedef struct run_folder {
    char metrics[RUN_FOLDER_PATH], checkpoints[RUN_FOLDER_PATH];
    char resume[RUN_FOLDER_PATH]; /* the checkpoint to resume from; "" for a new run */
} run_folder;

/* Fails where output_dir can neither be made nor written into, where it holds a manifest of the
 * user's that the run's would replace, or where the checkpoint that is to
 * be resumed from is not there, before anything is done for the run. [main] */
mt_status run_folder_check(const run_manifest *run);

/* Makes the folder and decides, by resume_from_checkpoint, what the run starts from. A folder that
 * holds checkpoints is refused when the run is to start anew, and a checkpoint whose run began with
 * another model or init, for then model cards would name the wrong one. ret_metrics locks the
 * folder, from before that decision until it is closed; NULL on failure. [main] */
mt_status run_folder_open(run_manifest *run, run_folder *ret, metrics **ret_metrics);

/* Writes the effective manifest. */
mt_status run_folder_write_manifest(const run_manifest *run);

/* The newest checkpoint of the run folder at `path`, or `path` itself when it is a checkpoint or
 * any other folder or file. [main] */
mt_status run_folder_find_model(const char *path, char ret[RUN_FOLDER_PATH]);

enum { RUN_FOLDER_LIST = RUN_FOLDER_PATH + 128 };

/* What checkpoints the run folder at `folder` holds, as checkpoint_list says it; returns `ret`. */
const char *run_folder_list(const char *folder, char ret[RUN_FOLDER_LIST]);

/* Is there a run folder at `path`? */
bool run_folder_is(const char *path);

/* Folder of the run that the checkpoint RUN/checkpoints/step-NNNNNN belongs to; "" for what lies
 * elsewhere. Returns `ret`. [main] */
const char *run_folder_of(const char *checkpoint, char ret[RUN_FOLDER_PATH]);

/* What the manifest in a run folder says that the run began with. */
typedef struct run_base {
    char folder[RUN_FOLDER_PATH]; /* of the run */
    char model[RUN_FOLDER_PATH];
    bool from_scratch; /* with random weights */
} run_base;

/* The base of the run that the checkpoint belongs to. False where it is of none, or RUN/run.yaml
 * cannot be read; ret->folder is as run_folder_of says. [main] */
bool run_folder_find_base(const char *checkpoint, run_base *ret);

#endif
