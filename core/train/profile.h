/* SPDX-License-Identifier: Apache-2.0
 *
 * Hardware profiles as files: what `megatrain bench hardware` has measured, kept in the user's
 * cache or carried to another machine. docs/cli.md describes the format.
 */
#ifndef MT_CORE_PROFILE_H
#define MT_CORE_PROFILE_H

#include "../engine/hardware.h"

enum { PROFILE_PATH = 4096 };

/* Where the profile of a kind of device of this machine is kept:
 * $XDG_CACHE_HOME/megatrain/profile-HOST-KIND.yaml (default ~/.cache). MT_ERR_NOT_FOUND when the
 * environment names no such folder. [main] */
mt_status profile_cache_path(const char *kind, char ret[PROFILE_PATH]);

/* Fails where no profile can be written at `path`, before it is measured; makes the folder when
 * `make_folder`. [main] */
mt_status profile_prepare(const char *path, bool make_folder);

/* Writes by way of a temporary file, flush and rename, where profile_prepare succeeds. [main] */
mt_status profile_write(const hardware *h, const char *path);

/* Reads and checks a profile; what is wrong is told with file, line and column. MT_ERR_NOT_FOUND
 * when there is no such file. [main] */
mt_status profile_read(const char *path, hardware *ret);

/* Was it measured on this machine, by this version, with a device like this one? Fails with a text
 * that says what differs. */
mt_status profile_check(const hardware *h, const char *kind, const mt_device_info *device);

/* The cached profile of this device; MT_ERR_NOT_FOUND when there is none, another error when it
 * cannot be used. */
mt_status profile_find(const char *kind, const mt_device_info *device, hardware *ret);

#endif
