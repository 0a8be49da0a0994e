/* SPDX-License-Identifier: Apache-2.0
 *
 * A small architecture plugin written with MT_PLUGIN, as third parties do.
 */
#include <megatrain/arch.h>
#include <megatrain/plugin.h>

static const mt_host *mt_plugin_host; /* defined by MT_PLUGIN below */

static mt_status configure(const mt_config *config, mt_model *model, void **ret)
{
    (void)config;
    (void)model;
    (void)ret;
    mt_plugin_host->set_error("sample-arch has no units");
    return MT_ERR_UNSUPPORTED;
}

static void destroy(void *arch)
{
    (void)arch;
}

static const char *const model_types[] = { "sample", "sample_text" };
static const mt_arch table = { sizeof table, 2, model_types, configure, destroy };

MT_PLUGIN("sample-arch", "1.2.3", "Apache-2.0", MT_ARCH_INTERFACE, &table)
