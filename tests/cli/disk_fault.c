/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into a program, makes its disk fail:
 *
 *     DISK_KILL_AT=N      the process is killed at the N-th call that changes files; a write has
 *                         written half by then
 *     DISK_FULL_AFTER=N   what is written after N bytes finds the disk full; half of the last write
 *                         still fits
 *     DISK_REFUSES=NAME   what is written to files of that name finds the disk full
 *     DISK_FREE=N         so many bytes are said to be free on every disk
 *     DISK_SLOW=MS        every flush takes MS milliseconds longer
 *     DISK_COUNT=FILE     how many calls and bytes there were, when the program ends by itself
 *
 * Calls of the C library among themselves, such as stdio's, are not seen.
 */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static _Atomic long calls, bytes;

static long setting(const char *name)
{
    const char *text = getenv(name);
    return text ? atol(text) : -1;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static int is_last(void)
{
    return atomic_fetch_add(&calls, 1) + 1 == setting("DISK_KILL_AT");
}

__attribute__((destructor)) static void report(void)
{
    const char *path = getenv("DISK_COUNT");
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f)
        return;
    fprintf(f, "%ld %ld\n", calls, bytes);
    fclose(f);
}

/* The function that this one stands before. */
#define NEXT(name)                                                                                 \
    static __typeof__(name) *next;                                                                 \
    if (!next)                                                                                     \
    *(void **)&next = dlsym(RTLD_NEXT, #name)

/* Is there room for n bytes? Else how many still fit is in *n. */
static int fits(size_t *n)
{
    long most = setting("DISK_FULL_AFTER"), before = atomic_fetch_add(&bytes, (long)*n);
    if (most < 0 || before + (long)*n <= most)
        return 1;
    *n = before < most ? (size_t)(most - before) / 2 : 0;
    return 0;
}

static int is_regular(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

static int is_refused(int fd)
{
    const char *name = getenv("DISK_REFUSES");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = name ? readlink(link, path, sizeof path - 1) : -1;
    if (n < 0)
        return 0;
    path[n] = '\0';
    const char *slash = strrchr(path, '/');
    return slash && strcmp(slash + 1, name) == 0;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    NEXT(pwrite);
    if (!is_regular(fd))
        return next(fd, data, n, at);
    if (is_last()) {
        (void)!next(fd, data, n / 2, at);
        die();
    }
    if (!is_refused(fd) && (fits(&n) || n > 0))
        return next(fd, data, n, at);
    errno = ENOSPC;
    return -1;
}

ssize_t write(int fd, const void *data, size_t n)
{
    NEXT(write);
    if (!is_regular(fd))
        return next(fd, data, n);
    if (is_last()) {
        (void)!next(fd, data, n / 2);
        die();
    }
    if (!is_refused(fd) && (fits(&n) || n > 0))
        return next(fd, data, n);
    errno = ENOSPC;
    return -1;
}

int statvfs(const char *path, struct statvfs *ret)
{
    NEXT(statvfs);
    long free_bytes = setting("DISK_FREE");
    int rc = next(path, ret);
    if (rc == 0 && free_bytes >= 0) {
        ret->f_frsize = 1;
        ret->f_bavail = (fsblkcnt_t)free_bytes;
    }
    return rc;
}

#define CALL(name, parameters, arguments)                                                          \
    int name parameters                                                                            \
    {                                                                                              \
        NEXT(name);                                                                                \
        if (is_last())                                                                             \
            die();                                                                                 \
        return next arguments;                                                                     \
    }

int fsync(int fd)
{
    NEXT(fsync);
    if (is_last())
        die();
    if (setting("DISK_SLOW") > 0)
        usleep((useconds_t)setting("DISK_SLOW") * 1000);
    return next(fd);
}

CALL(mkdir, (const char *path, mode_t mode), (path, mode))
CALL(remove, (const char *path), (path))
CALL(rename, (const char *from, const char *to), (from, to))
CALL(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
CALL(renameat2, (int a, const char *from, int b, const char *to, unsigned flags),
     (a, from, b, to, flags))
CALL(symlink, (const char *to, const char *path), (to, path))
CALL(unlink, (const char *path), (path))
CALL(unlinkat, (int fd, const char *path, int flags), (fd, path, flags))
