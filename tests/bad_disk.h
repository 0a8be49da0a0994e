/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands before pread, also for plugins (of a program that is linked with export_dynamic): a read
 * fails as on a bad disk, or finds that the file was cut short a moment before.
 */
#ifndef MT_TEST_BAD_DISK_H
#define MT_TEST_BAD_DISK_H

#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef enum bad_disk_kind { DISK_GOOD, DISK_FAILS, FILE_SHRINKS } bad_disk_kind;

/* What happens to reads of at least `least` bytes, `after` of which are still good. */
static struct {
    bad_disk_kind kind;
    int after;
    size_t least;
} bad_disk;

ssize_t pread(int fd, void *data, size_t n, off_t at)
{
    char path[64];
    if (bad_disk.kind != DISK_GOOD && n >= bad_disk.least && bad_disk.after-- <= 0) {
        if (bad_disk.kind == DISK_FAILS) {
            errno = EIO;
            return -1;
        }
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (truncate(path, at + (off_t)n / 2) < 0)
            perror(path);
    }
    return syscall(SYS_pread64, fd, data, n, at);
}

#endif
