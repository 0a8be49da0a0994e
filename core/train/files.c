/* SPDX-License-Identifier: Apache-2.0
 *
 * Folders and small files that must survive a crash: every failure is reported, also that of fsync.
 */
#include "files.h"

#include "../base/log.h"
#include "../base/status.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static mt_status io_fail(const char *path, const char *doing)
{
    int e = errno;
    bool full = e == ENOSPC || e == EDQUOT || e == EFBIG;
    return status_set(MT_ERR_IO, "%s: cannot %s: %s%s", path, doing, strerror(e),
                      full ? "; free some space or choose another folder" : "");
}

mt_status files_cache_path(const char *below, char *ret, size_t size)
{
    const char *cache = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    int n = 0;
    if (cache && *cache == '/')
        n = snprintf(ret, size, "%s/megatrain/%s", cache, below);
    else if (home && *home == '/')
        n = snprintf(ret, size, "%s/.cache/megatrain/%s", home, below);
    if (n <= 0 || (size_t)n >= size)
        return status_set(MT_ERR_NOT_FOUND, "there is no folder for caches: set XDG_CACHE_HOME or "
                                            "HOME to an absolute path");
    return MT_OK;
}

/* The folder that `path` lies in. */
static void folder_of(const char *path, char ret[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        snprintf(ret, PATH_MAX, ".");
    else
        snprintf(ret, PATH_MAX, "%.*s", slash == path ? 1 : (int)(slash - path), path);
}

static mt_status no_output(const char *path, const char *why)
{
    return status_set(MT_ERR_IO,
                      "%s: cannot write: %s; name a file in a folder that you can write to", path,
                      why);
}

static mt_status check_new_file(const char *path);

/* Through a link to nothing the file is made where it leads to, unless it leads to itself. */
static mt_status check_link(const char *path, const char *folder)
{
    char to[PATH_MAX], target[PATH_MAX];
    struct stat st;
    ssize_t n = readlink(path, to, sizeof to);
    if (n < 0) /* no link, but somebody else's file of just now */
        return MT_OK;
    if (stat(path, &st) != 0 && errno != ENOENT)
        return no_output(path, strerror(errno));
    if (snprintf(target, sizeof target, "%s%s%.*s", *to == '/' ? "" : folder, *to == '/' ? "" : "/",
                 (int)n, to) >= (int)sizeof target)
        return no_output(path, strerror(ENAMETOOLONG));
    return check_new_file(target);
}

/* A new file is tried out: of a disk that is mounted to be read, for one, permissions say nothing.
 */
static mt_status check_new_file(const char *path)
{
    char folder[PATH_MAX], why[PATH_MAX + 64];
    folder_of(path, folder);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) {
        close(fd);
        unlink(path);
        return MT_OK;
    }
    int e = errno;
    if (e == EEXIST)
        return check_link(path, folder);
    if (files_is_folder(folder))
        return no_output(path, strerror(e));
    snprintf(why, sizeof why, "there is no folder %s", folder);
    return no_output(path, why);
}

/* A slip of the command line must not cost a manifest, a text or weights. (Who names a link means
 * it: /dev/stdout is one, and leads to whatever.) */
static mt_status check_kind(const char *path, const char *mark)
{
    char begin[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t n = fd < 0 ? 0 : read(fd, begin, sizeof begin);
    if (fd >= 0)
        close(fd);
    return n <= 0 || memmem(begin, (size_t)n, mark, strlen(mark))
               ? MT_OK
               : no_output(path, "what is there is a file of another kind, and would be replaced");
}

mt_status files_check_output(const char *path, const char *mark, bool by_rename)
{
    char folder[PATH_MAX];
    struct stat st;
    if (by_rename && lstat(path, &st) == 0 && S_ISLNK(st.st_mode))
        return no_output(path, "it is a symbolic link, which would be replaced");
    if (stat(path, &st) != 0)
        return check_new_file(path);
    if (S_ISDIR(st.st_mode))
        return no_output(path, "it is a folder");
    if (by_rename && !S_ISREG(st.st_mode))
        return no_output(path, "it is no regular file, which could be replaced");
    folder_of(path, folder);
    if (access(by_rename ? folder : path, W_OK) != 0)
        return no_output(path, strerror(errno));
    return mark && S_ISREG(st.st_mode) ? check_kind(path, mark) : MT_OK;
}

mt_status files_check_folder(const char *path)
{
    char folder[PATH_MAX];
    struct stat st;
    snprintf(folder, sizeof folder, "%s", path);
    while (stat(folder, &st) != 0 && (errno == ENOENT || errno == ENOTDIR) &&
           strcmp(folder, ".") != 0) {
        char below[PATH_MAX];
        memcpy(below, folder, sizeof below);
        folder_of(below, folder);
    }
    if (stat(folder, &st) == 0 && !S_ISDIR(st.st_mode))
        return status_set(MT_ERR_INVALID, "%s: not a folder", folder);
    if (access(folder, W_OK | X_OK) == 0)
        return MT_OK;
    return io_fail(folder, strcmp(folder, path) == 0 ? "write" : "make a folder in it");
}

int64_t files_free_bytes(const char *folder)
{
    struct statvfs fs;
    if (statvfs(folder, &fs) != 0)
        return -1;
    double bytes = (double)fs.f_bavail * (double)fs.f_frsize;
    return bytes < 0x1p62 ? (int64_t)bytes : INT64_C(1) << 62;
}

mt_status files_make_folders(const char *path)
{
    char part[PATH_MAX];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part)
        return status_set(MT_ERR_INVALID, "'%s': expected the path of a folder, at most %d long",
                          path, PATH_MAX - 1);
    memcpy(part, path, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (part[i] != '/' && part[i] != '\0')
            continue;
        char c = part[i];
        part[i] = '\0';
        int e = mkdir(part, 0777) < 0 ? errno : 0;
        if (e && !files_is_folder(part)) {
            errno = e == EEXIST ? ENOTDIR : e;
            return io_fail(part, "make the folder");
        }
        part[i] = c;
    }
    return MT_OK;
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

mt_status files_remove_tree(const char *path)
{
    if (nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT)
        return io_fail(path, "remove");
    return MT_OK;
}

void files_discard(const char *path)
{
    char text[2048];
    snprintf(text, sizeof text, "%s", status_text());
    if (files_remove_tree(path) == MT_OK)
        return;
    log_write(MT_LOG_WARNING, "%s", status_text());
    status_set(MT_OK, "%s", text);
}

static int remove_below(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    return ftw->level > 0 ? remove(path) : 0;
}

mt_status files_empty_folder(const char *path)
{
    return nftw(path, remove_below, 8, FTW_DEPTH | FTW_PHYS) != 0 ? io_fail(path, "empty") : MT_OK;
}

mt_status files_each(const char *folder,
                     mt_status (*fn)(void *arg, const char *folder, const char *name), void *arg)
{
    DIR *d = opendir(folder);
    if (!d && errno == ENOTDIR)
        return status_set(MT_ERR_INVALID, "%s: is, or lies below, a file; name a folder", folder);
    if (!d)
        return status_set(errno == ENOENT ? MT_ERR_NOT_FOUND : MT_ERR_IO, "%s: cannot list: %s",
                          folder, strerror(errno));
    mt_status status = MT_OK;
    struct dirent *e = NULL;
    do {
        errno = 0; /* which alone tells the end from a failure */
        e = readdir(d);
        if (!e && errno)
            status = io_fail(folder, "list");
        else if (e && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            status = fn(arg, folder, e->d_name);
    } while (e && !status);
    closedir(d);
    return status;
}

static mt_status sync_path(const char *path, int flags)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0)
        return io_fail(path, "open");
    mt_status status = fsync(fd) < 0 ? io_fail(path, "flush") : MT_OK;
    close(fd);
    return status;
}

mt_status files_sync_folder(const char *path)
{
    return sync_path(path, O_DIRECTORY);
}

static mt_status sync_file(void *arg, const char *folder, const char *name)
{
    char file[PATH_MAX];
    (void)arg;
    if ((size_t)snprintf(file, sizeof file, "%s/%s", folder, name) >= sizeof file)
        return status_set(MT_ERR_INVALID, "%s/%s: the path is too long", folder, name);
    return files_is_file(file) ? sync_path(file, 0) : MT_OK;
}

mt_status files_sync_contents(const char *path)
{
    mt_status status = files_each(path, sync_file, NULL);
    return status ? status : files_sync_folder(path);
}

static mt_status write_all(int fd, const char *path, const char *text, size_t n)
{
    while (n > 0) {
        ssize_t put = write(fd, text, n);
        if (put > 0) {
            text += put;
            n -= (size_t)put;
        } else if (put == 0 || errno != EINTR) {
            return io_fail(path, "write");
        }
    }
    return MT_OK;
}

static mt_status flush_and_close(int fd, const char *path, mt_status status)
{
    if (!status && fsync(fd) < 0)
        status = io_fail(path, "flush");
    if (close(fd) < 0 && !status)
        status = io_fail(path, "close");
    return status;
}

mt_status files_write(const char *path, const char *text, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return io_fail(path, "create");
    return flush_and_close(fd, path, write_all(fd, path, text, n));
}

mt_status files_copy(const char *from, const char *to)
{
    char piece[64 << 10];
    mt_status status = MT_OK;
    int in = open(from, O_RDONLY | O_CLOEXEC);
    if (in < 0)
        return io_fail(from, "open");
    int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (out < 0) {
        status = io_fail(to, "create");
        close(in);
        return status;
    }
    for (ssize_t n = 1; n != 0 && !status;) {
        n = read(in, piece, sizeof piece);
        if (n > 0)
            status = write_all(out, to, piece, (size_t)n);
        else if (n < 0 && errno != EINTR)
            status = io_fail(from, "read");
    }
    close(in);
    return flush_and_close(out, to, status);
}

bool files_is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

bool files_may_be_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? S_ISREG(st.st_mode) : errno != ENOENT && errno != ENOTDIR;
}

bool files_is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
