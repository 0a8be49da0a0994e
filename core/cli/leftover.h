/* SPDX-License-Identifier: Apache-2.0
 *
 * What a command makes for a while and a signal must not leave behind.
 */
#ifndef MT_CORE_LEFTOVER_H
#define MT_CORE_LEFTOVER_H

/* From now on SIGHUP, SIGINT, SIGTERM and SIGPIPE remove the file at `file`, then the empty folder
 * `folder` (NULL: none), and end the process as they always do; those that are ignored stay so.
 * What is not there, or is still called "", is passed over. Both strings are kept until
 * leftover_forget. [main] */
void leftover_keep(const char *file, const char *folder);
void leftover_forget(void);

#endif
