/* SPDX-License-Identifier: Apache-2.0
 *
 * A small architecture plugin written with the SDK's macro, as third parties do; with
 * PREPARE_FAILS one that cannot start.
 */
#include <megatrain/arch.h>
#include <megatrain/plugin.h>

#ifndef NAME
#define NAME "sample-arch"
#endif

static mt_status configure(const mt_config *config, mt_model *model, void **ret)
{
    (void)config;
    (void)model;
    (void)ret;
    return mt_fail(MT_ERR_UNSUPPORTED, "%s has no units", mt_plugin_name);
}

static void destroy(void *arch)
{
    (void)arch;
}

static const char *const model_types[] = { "sample", "sample_text" };
static const mt_arch table = { sizeof table, 2, model_types, configure, destroy };

static bool prepared;

static mt_status prepare(void)
{
#ifdef PREPARE_FAILS
    return mt_fail(MT_ERR_DEVICE, "%s: the printer is out of %s", mt_plugin_name, "paper");
#endif
    prepared = true;
    return MT_OK;
}

MT_PLUGIN_WITH(NAME, "1.2.3", "Apache-2.0", prepare, 0, { MT_ARCH_INTERFACE, &table },
               { "sample.prepared/1", &prepared })
