/* SPDX-License-Identifier: Apache-2.0
 *
 * A plugin of the build tree, loaded as the program loads it; for tests that link the core.
 */
#ifndef MT_TEST_PLUGIN_H
#define MT_TEST_PLUGIN_H

#include "../core/base/status.h"
#include "../plugins/host/registry.h"

#include <stdio.h>
#include <stdlib.h>

/* Exits where `path`, NULL for none, is no plugin with such an interface. */
static inline const void *plugin_interface(const char *path, const char *id)
{
    const plugin_record *r = NULL;
    if (path && registry_load_file(path, &r) != MT_OK)
        fprintf(stderr, "%s\n", status_text());
    const void *table = r ? registry_interface(r, id) : NULL;
    if (!table) {
        fprintf(stderr, "no %s in '%s'\n", id, path ? path : "");
        exit(1);
    }
    return table;
}

#endif
