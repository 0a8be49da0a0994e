/* SPDX-License-Identifier: Apache-2.0
 *
 * What discovery, handshake and registry share. Private to this folder.
 */
#ifndef MT_PLUGIN_HOST_H
#define MT_PLUGIN_HOST_H

#include "../../core/base/arena.h"
#include "registry.h"

enum { HOST_PATH_SIZE = 4096 };

typedef struct plugin_entry {
    plugin_record record; /* first */
    mt_status refused;    /* of an earlier attempt to load it; MT_OK: none */
    const char *refusal;
} plugin_entry;

/* A folder that may hold plugins. */
typedef struct plugin_folder {
    const char *path; /* absolute, without symbolic links */
    bool explicitly;  /* named on the command line */
} plugin_folder;

/* Folders to search, in order, each once. Warns of entries that are passed over; fails only for a
 * folder of `dirs` that is not there. */
mt_status discover_folders(arena *a, const char *const *dirs, int32_t n_dirs, plugin_folder **ret,
                           int32_t *ret_n);

/* Reads MANIFEST and names the shared object beside it. */
mt_status discover_manifest(arena *a, const char *manifest_path, plugin_record *ret);

/* Are the file, its folder, and what a symbolic link leads to out of others' reach? */
mt_status discover_check_owner(const char *path);
mt_status discover_check_folder(const char *path);

/* dlopen, every check of the descriptor and of the interface tables, init. Sets record->plugin. */
mt_status handshake(plugin_record *record, const mt_host *host);

#endif
