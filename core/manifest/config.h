/* SPDX-License-Identifier: Apache-2.0
 *
 * A tree read from YAML or JSON, with the place of every node, and its mt_config view for plugins.
 */
#ifndef MT_CORE_CONFIG_H
#define MT_CORE_CONFIG_H

#include <megatrain/base.h>

typedef struct config config; /* a whole document */

/* Reads a file. Syntax errors, duplicate keys, anchors that do not resolve and non-string keys are
 * errors of the form `FILE:LINE:COLUMN: ...`. [main] */
mt_status config_read_yaml(const char *path, config **ret);
mt_status config_read_json(const char *path, config **ret);
/* The same from memory; `label` stands for the file name in messages. */
mt_status config_parse_yaml(const char *text, size_t n, const char *label, config **ret);
void config_destroy(config *c); /* accepts NULL */

/* Reads a whole file into memory that the caller frees; a NUL byte follows the content. */
mt_status config_read_file(const char *path, char **ret, size_t *ret_n);

/* Applies a command-line override "a.b.c=value" (value is YAML, so lists and maps work). Messages
 * about it name the argument in place of the file. */
mt_status config_override(config *c, const char *assignment);

/* Sets a string at a dotted path, whatever it looks like. Messages about it name `label`, the
 * option that it was given by. */
mt_status config_set_text(config *c, const char *path, const char *text, const char *label);

/* The subtree at a dotted path as a plugin sees it ("" for the root; a missing path gives an empty
 * section). Lives as long as the config. */
const mt_config *config_section(config *c, const char *path);

/* The map at `key` of a section as a section of its own; NULL where there is none. */
const mt_config *config_map(const mt_config *c, const char *key);

/* A size in bytes at `key` of a section: a whole number, or a string with a unit (`24GiB`, `512MB`;
 * KiB to TiB are powers of 1024, KB to TB of 1000). Errors as the getters of mt_config. */
mt_status config_bytes(const mt_config *c, const char *key, int64_t *ret);

/* Puts the place of `key` in front of the present error text, so that the user finds what to
 * change.
 */
mt_status config_blame(const mt_config *c, const char *key);

/* Is a list without elements at `key` of a section? length() cannot tell. */
bool config_is_empty_list(const mt_config *c, const char *key);

/* Keys of the map at `path`, in file order; NULL past the end. */
const char *config_key(const config *c, const char *path, int64_t index);

/* Fails when a key below `path` was never asked for, with file, line, column and the nearest key
 * that was asked for: `run.yaml:14:5: unknown key 'learning_rat'; did you mean 'learning_rate'?` */
mt_status config_check_unused(config *c, const char *path);

/* The same of a section. */
mt_status config_check_section(const mt_config *c);

/* Writes the whole tree as YAML (run folders keep the effective manifest) or as JSON. */
mt_status config_write_yaml(const config *c, const char *path);
mt_status config_write_json(const config *c, const char *path);

#endif
