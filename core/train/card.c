/* SPDX-License-Identifier: Apache-2.0
 *
 * Model cards: Markdown with the metadata header that the hub reads.
 */
#include "card.h"

#include "../base/status.h"
#include "../base/text.h"
#include "../manifest/config.h"
#include "checkpoint.h"
#include "files.h"
#include "human.h"
#include "run_folder.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CARD_FILE "README.md"
#define CARD_TAG  "\n- megatrain\n"

/* What of a run's manifest a card tells by itself. */
typedef struct run_facts {
    char *manifest; /* the whole text; NULL: there is none */
    char name[256]; /* of the run folder */
    char base[256]; /* what it began with: the name of a model or of a run */
    bool pretrained;
} run_facts;

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

/* The name of the folder that a run began with. RUN/model and RUN/checkpoints/step-NNNNNN, whose
 * own names say nothing, go by RUN's. */
static void name_base(const char *folder, char ret[256])
{
    char path[RUN_FOLDER_PATH];
    snprintf(ret, 256, "%.255s", last_part(folder));
    if (strlen(folder) >= sizeof path || !strchr(folder, '/'))
        return;
    strcpy(path, folder);
    char *slash = strrchr(path, '/');
    *slash = '\0';
    bool exported = strcmp(ret, "model") == 0 && run_folder_is(path);
    bool checkpoint = strcmp(last_part(path), RUN_FOLDER_CHECKPOINTS) == 0;
    if (checkpoint && (slash = strrchr(path, '/')))
        *slash = '\0';
    if (exported || checkpoint)
        snprintf(ret, 256, "%.255s", last_part(path));
}

/* Of the run that the checkpoint belongs to, as far as its folder tells. */
static void find_run(const char *checkpoint, run_facts *ret)
{
    char path[RUN_FOLDER_PATH + sizeof RUN_FOLDER_MANIFEST + 1];
    run_base base;
    size_t n = 0;
    *ret = (run_facts){ .name = "model" };
    bool known = run_folder_find_base(checkpoint, &base);
    if (base.folder[0])
        snprintf(ret->name, sizeof ret->name, "%.255s", last_part(base.folder));
    if (!known)
        return;
    name_base(base.model, ret->base);
    ret->pretrained = !base.from_scratch;
    snprintf(path, sizeof path, "%s/" RUN_FOLDER_MANIFEST, base.folder);
    if (config_read_file(path, &ret->manifest, &n) != MT_OK)
        ret->manifest = NULL;
}

static void row(FILE *f, const char *what, const char *text)
{
    fprintf(f, "| %s | %s |\n", what, text);
}

static void row_loss(FILE *f, const char *what, double loss, int64_t step)
{
    char text[128];
    if (!isfinite(loss))
        return;
    snprintf(text, sizeof text, "%.4f nats/token (perplexity %.5g)", loss, exp(loss));
    if (step > 0)
        text_append(text, sizeof text, ", after step %lld", (long long)step);
    row(f, what, text);
}

static void write_card(FILE *f, const run_facts *run, const checkpoint_state *s, const model *m,
                       mt_dtype dtype)
{
    fprintf(f, "---\nlibrary_name: transformers\npipeline_tag: text-generation\n");
    if (run->pretrained)
        fprintf(f, "base_model: \"%s\"\n", run->base);
    fprintf(f, "tags:" CARD_TAG "---\n\n# %s\n\n", run->name);
    fprintf(f, "%s with MegaTrain " MT_VERSION "%s%s.\n\n",
            run->pretrained ? "Fine-tuned" : "Trained from random weights",
            run->pretrained ? " from " : "", run->pretrained ? run->base : "");
    fprintf(f, "| | |\n|---|---|\n");
    row(f, "parameters", human_grouped(m->total_params).s);
    row(f, "weights here", mt_dtype_name(dtype));
    row(f, "steps", human_grouped(s->step).s);
    row(f, "tokens seen", human_grouped(s->tokens).s);
    row(f, "of these trained on", human_grouped(s->targets).s);
    row_loss(f, "training loss", s->loss, s->step);
    row_loss(f, "validation loss", s->validation_loss, 0);
    row_loss(f, "best validation loss", s->best_validation_loss, s->best_step);
    if (run->manifest)
        fprintf(f, "\n## The run's manifest\n\n```yaml\n%s```\n", run->manifest);
}

mt_status card_write(const char *folder, const char *checkpoint, const model *m, mt_dtype dtype)
{
    char path[PATH_MAX];
    checkpoint_state state;
    mt_status status = checkpoint_read(checkpoint, &state);
    if (status)
        return status == MT_ERR_NOT_FOUND ? MT_OK : status;
    if (snprintf(path, sizeof path, "%s/" CARD_FILE, folder) >= (int)sizeof path)
        return status_set(MT_ERR_INVALID, "%s: the path is too long", folder);
    run_facts run;
    char *text = NULL;
    size_t n = 0;
    find_run(checkpoint, &run);
    FILE *f = open_memstream(&text, &n);
    if (f)
        write_card(f, &run, &state, m, dtype);
    if (!f || fclose(f) != 0)
        status = status_nomem("the model card", 4096);
    if (!status)
        status = files_write(path, text, n);
    free(text);
    free(run.manifest);
    return status;
}

bool card_is_ours(const char *folder)
{
    char path[PATH_MAX], *text = NULL;
    size_t n = 0;
    if (snprintf(path, sizeof path, "%s/" CARD_FILE, folder) >= (int)sizeof path ||
        !files_is_file(path) || config_read_file(path, &text, &n) != MT_OK)
        return false;
    bool ours = strstr(text, CARD_TAG) != NULL;
    free(text);
    return ours;
}
