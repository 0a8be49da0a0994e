/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder of caches, and the memory in it of what files held, so that those that did not change
 * need not be read to know it.
 */
#ifndef DOCUMENTS_FOLDER_H
#define DOCUMENTS_FOLDER_H

#include "documents.h"

#include <xxhash.h>

enum { FOLDER_PATH = 4096 };

/* Fails with what errno says about the folder; NULL stands for that of temporary files. */
mt_status folder_error(const char *folder, const char *what);

/* Makes the folder and its parents. [main] */
mt_status folder_make(const char *path);

/* Takes the right to make what is known by `key`, waiting for a process that has it: what it made
 * is then there. The folder is made where it is missing. [main] */
mt_status folder_lock(const char *folder, uint64_t key, int *ret_lock);
void folder_unlock(const char *folder, uint64_t key, int lock);

/* A file without a name for what is too large to be sure of memory for it; -1 with errno set. */
int folder_scratch(const char *folder);

/* Notes that the cache of `key` is used today, and for which files: a line for people in
 * FOLDER/KEY.used, "/data/a.jsonl and 3 more". What cannot be noted, in a folder that may only be
 * read, is not. [main] */
void folder_use(const char *folder, uint64_t key, const mt_files *files);

/* Removes what has not been used for FOLDER_KEEP_DAYS: caches, notes about files, and what
 * processes that were killed have left. Whoever has one open keeps it. [main] */
enum { FOLDER_KEEP_DAYS = 90 };
void folder_prune(const char *folder);

/* Adds to `state` what tells whether a file is still the one that it was. */
void folder_stamp(XXH3_state_t *state, const struct stat *st);
/* Has the file been left alone for longer than the grain of its times? What was changed just now
 * may change again without showing it in a stamp. */
bool folder_settled(const struct stat *st);

/* The value that was remembered for a stamp. Remembering can fail; that costs time only. */
bool folder_recall(const char *folder, uint64_t stamp, uint64_t *ret);
void folder_remember(const char *folder, uint64_t stamp, uint64_t value);

/* A hash of the content of all files, in order. Files that were hashed before, and whose size,
 * times, device and inode are what they were, are not read again. `folder` may be NULL. [main] */
mt_status folder_hash_files(const char *folder, const mt_files *files, uint64_t *ret);

#endif
