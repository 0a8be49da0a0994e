/* SPDX-License-Identifier: Apache-2.0
 *
 * Cleaning up in a signal handler, which can be told what to remove in no other way than by what is
 * global.
 */
#include "leftover.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static const char *volatile kept_file, *volatile kept_folder;

static void clean_up(int signal_number)
{
    if (kept_file && *kept_file)
        unlink(kept_file);
    if (kept_folder && *kept_folder)
        rmdir(kept_folder);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

void leftover_keep(const char *file, const char *folder)
{
    static const int ends[] = { SIGHUP, SIGINT, SIGTERM, SIGPIPE };
    kept_file = file;
    kept_folder = folder;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        struct sigaction now;
        if (sigaction(ends[i], NULL, &now) == 0 && now.sa_handler == SIG_DFL)
            signal(ends[i], clean_up);
    }
}

void leftover_forget(void)
{
    kept_file = kept_folder = NULL;
}
