/* SPDX-License-Identifier: Apache-2.0
 *
 * Paths that lead to something else than was asked for, and what to name in its place. Messages
 * only: nothing is read but what tells the kinds of files and folders apart.
 */
#ifndef MT_CORE_MISTAKEN_H
#define MT_CORE_MISTAKEN_H

#include <megatrain/base.h>

/* Fails where `path`, to be a run manifest, leads to a folder or a binary file, or to nothing and
 * looks like the name of a model on a hub. [main] */
mt_status mistaken_for_run(const char *path);

/* Fails where `path`, to be a model, leads to a binary file. [main] */
mt_status mistaken_for_model(const char *path);

/* The error for a folder, to be a model, that has no config.json. [main] */
mt_status mistaken_folder(const char *path);

enum { MISTAKEN_TEXT = 1024 };

/* Does the path begin with ~, which only shells replace? [pure] */
bool mistaken_home(const char *path);

/* What to add to the message that there is no model at `path`: a sentence after "; " where it looks
 * like a name on a hub (ORGANISATION/MODEL), begins with ~, or is like the name of a folder or
 * manifest beside it, else "". Returns `ret`. [main] */
const char *mistaken_name(const char *path, char ret[MISTAKEN_TEXT]);

#endif
