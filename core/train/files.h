/* SPDX-License-Identifier: Apache-2.0
 *
 * Folders and small files that must survive a crash.
 */
#ifndef MT_CORE_FILES_H
#define MT_CORE_FILES_H

#include <megatrain/base.h>

/* Makes a folder and its parents; MT_OK when it stands already. */
mt_status files_make_folders(const char *path);

/* Removes a file or a folder with all that is in it; MT_OK when there is none. */
mt_status files_remove_tree(const char *path);

/* The same for what nobody needs any more: a failure is a warning in the log, and the error text
 * stays what it was. */
void files_discard(const char *path);

/* Removes all that is in a folder. */
mt_status files_empty_folder(const char *path);

/* Calls fn for every name in a folder, in any order, until it fails, and returns what it returned.
 * MT_ERR_NOT_FOUND when there is no such folder. */
mt_status files_each(const char *folder,
                     mt_status (*fn)(void *arg, const char *folder, const char *name), void *arg);

/* Flushes a folder's entries, or everything in it (one level) as well, to the disk. */
mt_status files_sync_folder(const char *path);
mt_status files_sync_contents(const char *path);

/* Writes a new file and flushes it. */
mt_status files_write(const char *path, const char *text, size_t n);

/* Copies a file to a new one and flushes that. */
mt_status files_copy(const char *from, const char *to);

/* Path of `below` in the user's folder for what is costly to make again, $XDG_CACHE_HOME/megatrain
 * or ~/.cache/megatrain; nothing is made. MT_ERR_NOT_FOUND when the environment names no such
 * folder. */
mt_status files_cache_path(const char *below, char *ret, size_t size);

/* Fails where no file can be written at `path`, so that it is known before long work rather than
 * after it; what is there stays as it is. `mark`: text that is near the beginning of every file of
 * this kind; one that is there and has it not, as a manifest, is the user's and refused (NULL: any
 * may be replaced). `by_rename`: the file will take the place of one that is there, which must be a
 * regular one and no link to one (nobody wants /dev/null or /dev/stdout replaced). */
mt_status files_check_output(const char *path, const char *mark, bool by_rename);

/* The same for a folder that is to be made with its parents, or written into. */
mt_status files_check_folder(const char *path);

/* Bytes that the file system of a folder still takes from this user; -1: nobody knows. */
int64_t files_free_bytes(const char *folder);

/* Is there a regular file / a folder of this name? */
bool files_is_file(const char *path);
/* False only where it is known that there is none: one that cannot be looked at may be there. */
bool files_may_be_file(const char *path);
bool files_is_folder(const char *path);

#endif
