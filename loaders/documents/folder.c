/* SPDX-License-Identifier: Apache-2.0
 *
 * Making and using the folder of caches.
 */
#include "folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 20 };

mt_status folder_error(const char *folder, const char *what)
{
    int e = errno;
    return mt_fail(MT_ERR_IO,
                   "%s: cannot %s the token cache: %s; choose another folder with data.cache",
                   folder ? folder : "temporary files", what, strerror(e));
}

mt_status folder_make(const char *path)
{
    char part[FOLDER_PATH];
    size_t n = strlen(path);
    if (n >= sizeof part)
        return mt_fail(MT_ERR_INVALID, "data.cache: the path is too long: %.60s...", path);
    if (strncmp(path, "~/", 2) == 0)
        return mt_fail(MT_ERR_INVALID,
                       "data.cache: %s: only a shell knows what ~ is: write the path out", path);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0777) < 0 && errno != EEXIST)
            return folder_error(path, "make the folder of");
    }
    return MT_OK;
}

static void lock_path(const char *folder, uint64_t key, char path[FOLDER_PATH])
{
    snprintf(path, FOLDER_PATH, "%s/%016llx.lock", folder, (unsigned long long)key);
}

static bool take_lock(int fd, const char *path)
{
    int rc = flock(fd, LOCK_EX | LOCK_NB);
    if (rc < 0 && errno == EWOULDBLOCK) {
        mt_log(MT_LOG_INFO, "data: waiting for another process that tokenises the same (%s)", path);
        do
            rc = flock(fd, LOCK_EX);
        while (rc < 0 && errno == EINTR);
    }
    return rc == 0;
}

mt_status folder_lock(const char *folder, uint64_t key, int *ret_lock)
{
    char path[FOLDER_PATH];
    mt_status status = folder_make(folder);
    lock_path(folder, key, path);
    while (!status) {
        struct stat held, named;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || !take_lock(fd, path)) {
            status = folder_error(folder, "lock");
        } else if (fstat(fd, &held) == 0 && stat(path, &named) == 0 &&
                   held.st_ino == named.st_ino) {
            *ret_lock = fd;
            return MT_OK;
        }
        if (fd >= 0) /* of a file that was removed in the meantime: there may be a new one */
            close(fd);
    }
    return status;
}

void folder_unlock(const char *folder, uint64_t key, int lock)
{
    char path[FOLDER_PATH];
    lock_path(folder, key, path);
    unlink(path);
    close(lock);
}

int folder_scratch(const char *folder)
{
    char path[FOLDER_PATH];
    const char *tmp = folder ? folder : secure_getenv("TMPDIR");
    if ((size_t)snprintf(path, sizeof path, "%s/megatrain-XXXXXX", tmp ? tmp : "/tmp") >=
        sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        unlink(path);
    return fd;
}

/* ---- what is no longer used ------------------------------------------------------------------ */

/* "/data/a.jsonl and 3 more". */
static void write_names(int fd, const mt_files *files)
{
    char more[32] = "";
    char *full = files->n > 0 ? realpath(files->items[0].path, NULL) : NULL;
    if (files->n > 1)
        snprintf(more, sizeof more, " and %lld more", (long long)files->n - 1);
    if (full)
        (void)dprintf(fd, "%s%s\n", full, more);
    free(full);
}

void folder_use(const char *folder, uint64_t key, const mt_files *files)
{
    char path[FOLDER_PATH];
    if ((size_t)snprintf(path, sizeof path, "%s/%016llx.used", folder, (unsigned long long)key) >=
        sizeof path)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return;
    write_names(fd, files);
    (void)futimens(fd, NULL);
    close(fd);
}

enum { KEY_DIGITS = 16 };

/* A file of the folder, "0123456789abcdef.SUFFIX"; locks are their holders' to remove. */
static bool is_ours(const char *name)
{
    return strspn(name, "0123456789abcdef") == KEY_DIGITS && name[KEY_DIGITS] == '.' &&
           strcmp(name + KEY_DIGITS, ".lock") != 0;
}

static bool is_older(int folder, const char *name, time_t than)
{
    struct stat st;
    return fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || st.st_mtim.tv_sec < than;
}

/* By its own time, and that of its last use. */
static bool is_unused(int folder, const char *name, time_t since)
{
    char mark[KEY_DIGITS + sizeof ".used"];
    snprintf(mark, sizeof mark, "%.*s.used", KEY_DIGITS, name);
    return is_older(folder, name, since) && is_older(folder, mark, since);
}

void folder_prune(const char *folder)
{
    const time_t since = time(NULL) - (time_t)FOLDER_KEEP_DAYS * 24 * 60 * 60;
    DIR *d = opendir(folder);
    int64_t bytes = 0;
    if (!d)
        return;
    for (struct dirent *e; (e = readdir(d));) {
        struct stat st;
        if (is_ours(e->d_name) && is_unused(dirfd(d), e->d_name, since) &&
            fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            unlinkat(dirfd(d), e->d_name, 0) == 0)
            bytes += st.st_size;
    }
    closedir(d);
    if (bytes > 0)
        mt_log(MT_LOG_INFO, "data: removed %s of caches that were not used for %d days",
               doc_bytes(bytes).s, FOLDER_KEEP_DAYS);
}

/* ---- what files hold ------------------------------------------------------------------------- */

void folder_stamp(XXH3_state_t *state, const struct stat *st)
{
    const int64_t facts[] = { (int64_t)st->st_dev,          (int64_t)st->st_ino,
                              (int64_t)st->st_size,         (int64_t)st->st_mtim.tv_sec,
                              (int64_t)st->st_mtim.tv_nsec, (int64_t)st->st_ctim.tv_sec,
                              (int64_t)st->st_ctim.tv_nsec };
    XXH3_64bits_update(state, facts, sizeof facts);
}

bool folder_settled(const struct stat *st)
{
    enum { GRAIN = 2 /* seconds: the coarsest of common file systems */ };
    time_t now = time(NULL);
    return st->st_mtim.tv_sec + GRAIN < now && st->st_ctim.tv_sec + GRAIN < now;
}

/* `settled`: none of the files changed a moment ago, so that the stamp can be trusted. */
static mt_status stamp_files(const mt_files *files, uint64_t *ret, bool *ret_settled)
{
    XXH3_state_t *state = XXH3_createState();
    mt_status status = state ? MT_OK : mt_fail_nomem();
    bool settled = true;
    if (state)
        XXH3_64bits_reset(state);
    for (int64_t i = 0; i < files->n && !status; i++) {
        struct stat st;
        if (stat(files->items[i].path, &st) < 0) {
            status = mt_fail(MT_ERR_IO, "%s: cannot look at it: %s", files->items[i].path,
                             strerror(errno));
            break;
        }
        folder_stamp(state, &st);
        settled &= folder_settled(&st);
    }
    if (!status) {
        *ret = XXH3_64bits_digest(state);
        *ret_settled = settled;
    }
    XXH3_freeState(state);
    return status;
}

static void memo_path(const char *folder, uint64_t stamp, char path[FOLDER_PATH])
{
    snprintf(path, FOLDER_PATH, "%s/%016llx.hash", folder, (unsigned long long)stamp);
}

bool folder_recall(const char *folder, uint64_t stamp, uint64_t *ret)
{
    char path[FOLDER_PATH];
    memo_path(folder, stamp, path);
    FILE *f = fopen(path, "re");
    unsigned long long value = 0;
    char end = 0;
    bool found = f && fscanf(f, "%16llx%c", &value, &end) == 2 && end == '\n';
    if (f)
        fclose(f);
    if (found)
        *ret = value;
    return found;
}

void folder_remember(const char *folder, uint64_t stamp, uint64_t value)
{
    char path[FOLDER_PATH], part[FOLDER_PATH];
    memo_path(folder, stamp, path);
    if ((size_t)snprintf(part, sizeof part, "%s.%ld", path, (long)getpid()) >= sizeof part)
        return;
    FILE *f = fopen(part, "we");
    if (!f)
        return;
    bool good = fprintf(f, "%016llx\n", (unsigned long long)value) > 0;
    good = fclose(f) == 0 && good;
    if (!good || rename(part, path) < 0)
        unlink(part);
}

static mt_status hash_file(const char *path, XXH3_state_t *state)
{
    char *buffer = malloc(BUFFER);
    int fd = buffer ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    mt_status status = MT_OK;
    int64_t size = 0;
    if (!buffer)
        return mt_fail_nomem();
    for (;;) {
        ssize_t n = fd < 0 ? -1 : read(fd, buffer, BUFFER);
        if (n < 0 && fd >= 0 && errno == EINTR)
            continue;
        if (n < 0)
            status = mt_fail(MT_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
        if (n <= 0)
            break;
        XXH3_64bits_update(state, buffer, (size_t)n);
        size += n;
    }
    XXH3_64bits_update(state, &size, sizeof size); /* where one file ends and the next begins */
    if (fd >= 0)
        close(fd);
    free(buffer);
    return status;
}

mt_status folder_hash_files(const char *folder, const mt_files *files, uint64_t *ret)
{
    uint64_t before = 0, after = 0;
    bool settled = false;
    mt_status status = stamp_files(files, &before, &settled);
    if (status)
        return status;
    if (folder && settled && folder_recall(folder, before, ret))
        return MT_OK;
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return mt_fail_nomem();
    XXH3_64bits_reset(state);
    for (int64_t i = 0; i < files->n && !status; i++)
        status = hash_file(files->items[i].path, state);
    uint64_t value = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    if (!status)
        status = stamp_files(files, &after, &settled);
    if (!status && before != after)
        status = mt_fail(MT_ERR_IO, "%s: changed while it was read; try again once it is complete",
                         files->items[0].path);
    if (status)
        return status;
    if (folder && settled && folder_make(folder) == MT_OK)
        folder_remember(folder, after, value);
    *ret = value;
    return MT_OK;
}
