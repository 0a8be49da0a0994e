/* SPDX-License-Identifier: Apache-2.0
 *
 * megatrain cache: what data loaders keep in the user's cache, how old it is, and removing it. What
 * the files hold is the loaders' affair, but for KEY.used, a line that tells people what the cache
 * was made of; those of one name, 16 hexadecimal digits, belong together, and nothing else in the
 * folder is looked at.
 */
#include "../base/log.h"
#include "../base/status.h"
#include "../train/files.h"
#include "../train/human.h"
#include "cli.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { KEY = 16, FOLDER = 4096, DAY = 24 * 60 * 60, DEFAULT_DAYS = 30, MAX_DAYS = 100000 };

/* What is smaller is a note about a file rather than a cache, and not worth a line. */
enum { WORTH_A_LINE = 1 << 12 };

typedef struct entry {
    char key[KEY + 1];
    int64_t bytes;
    int64_t used; /* newest change of any of its files, Unix time */
} entry;

typedef struct listing {
    char folder[FOLDER];
    entry *list; /* what was used last comes first */
    int64_t n, capacity;
} listing;

static bool is_ours(const char *name)
{
    return strspn(name, "0123456789abcdef") == KEY && name[KEY] == '.';
}

static entry *find_entry(listing *l, const char *name)
{
    for (int64_t i = 0; i < l->n; i++)
        if (strncmp(l->list[i].key, name, KEY) == 0)
            return &l->list[i];
    if (l->n == l->capacity) {
        int64_t more = l->capacity ? 2 * l->capacity : 64;
        entry *grown = realloc(l->list, (size_t)more * sizeof *grown);
        if (!grown)
            return NULL;
        l->list = grown;
        l->capacity = more;
    }
    entry *e = &l->list[l->n++];
    *e = (entry){ 0 };
    memcpy(e->key, name, KEY);
    return e;
}

static int by_use(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    return x->used != y->used ? (x->used < y->used) - (x->used > y->used) : strcmp(x->key, y->key);
}

/* A folder that is not there has nothing in it. */
static mt_status list(listing *l)
{
    mt_status st = MT_OK;
    DIR *d = opendir(l->folder);
    if (!d && errno == ENOENT)
        return MT_OK;
    if (!d)
        return status_set(MT_ERR_IO, "%s: cannot list: %s", l->folder, strerror(errno));
    for (struct dirent *f; st == MT_OK && (f = readdir(d));) {
        struct stat info;
        if (!is_ours(f->d_name) || fstatat(dirfd(d), f->d_name, &info, AT_SYMLINK_NOFOLLOW) < 0 ||
            !S_ISREG(info.st_mode))
            continue;
        entry *e = find_entry(l, f->d_name);
        if (!e) {
            st = status_nomem("the list of caches", (size_t)l->n * sizeof *e);
            break;
        }
        e->bytes += info.st_size;
        e->used = info.st_mtim.tv_sec > e->used ? info.st_mtim.tv_sec : e->used;
    }
    closedir(d);
    if (l->n)
        qsort(l->list, (size_t)l->n, sizeof *l->list, by_use);
    return st;
}

/* Whose tokens they are, fit for a terminal; "" where nobody wrote it down. */
static const char *name_data(const listing *l, const entry *e, char ret[FOLDER])
{
    char path[FOLDER + KEY + sizeof "/.used"];
    snprintf(path, sizeof path, "%s/%s.used", l->folder, e->key);
    FILE *f = fopen(path, "re");
    if (!f || !fgets(ret, FOLDER, f))
        ret[0] = '\0';
    ret[strcspn(ret, "\n")] = '\0';
    for (char *c = ret; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    if (f)
        fclose(f);
    return ret;
}

static void print(const listing *l)
{
    char name[FOLDER];
    int64_t bytes = 0, notes = 0;
    time_t now = time(NULL);
    for (int64_t i = 0; i < l->n; i++) {
        const entry *e = &l->list[i];
        long long days = e->used < now ? (now - e->used) / DAY : 0;
        bytes += e->bytes;
        notes += e->bytes < WORTH_A_LINE;
        if (e->bytes >= WORTH_A_LINE)
            printf("%s  %10s  used %lld day%s ago%s%s\n", e->key, human_bytes(e->bytes).s, days,
                   days == 1 ? "" : "s", name_data(l, e, name)[0] ? "  " : "", name);
    }
    printf("%s: %s in %lld cache%s and %lld note%s about files\n", l->folder, human_bytes(bytes).s,
           (long long)(l->n - notes), l->n - notes == 1 ? "" : "s", (long long)notes,
           notes == 1 ? "" : "s");
}

/* ---- removing -------------------------------------------------------------------------------- */

/* Is a process making it just now? */
static bool is_locked(int folder, const char *key)
{
    char name[KEY + sizeof ".lock"];
    snprintf(name, sizeof name, "%s.lock", key);
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC);
    bool locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0;
    if (fd >= 0)
        close(fd);
    return locked;
}

static mt_status remove_entry(const listing *l, const entry *e, bool *ret_gone)
{
    mt_status st = MT_OK;
    DIR *d = opendir(l->folder);
    if (!d)
        return status_set(MT_ERR_IO, "%s: cannot list: %s", l->folder, strerror(errno));
    if (is_locked(dirfd(d), e->key)) {
        log_write(MT_LOG_INFO, "%s: another process is making it; left alone", e->key);
        closedir(d);
        return MT_OK;
    }
    for (struct dirent *f; st == MT_OK && (f = readdir(d));)
        if (is_ours(f->d_name) && strncmp(f->d_name, e->key, KEY) == 0 &&
            unlinkat(dirfd(d), f->d_name, 0) < 0 && errno != ENOENT)
            st = status_set(MT_ERR_IO, "%s/%s: cannot remove: %s", l->folder, f->d_name,
                            strerror(errno));
    closedir(d);
    *ret_gone = st == MT_OK;
    return st;
}

static mt_status clean(const listing *l, int64_t days)
{
    int64_t bytes = 0, n = 0;
    time_t oldest = time(NULL) - days * DAY;
    mt_status st = MT_OK;
    for (int64_t i = 0; i < l->n && st == MT_OK; i++) {
        const entry *e = &l->list[i];
        if (days > 0 && e->used >= oldest)
            continue;
        bool gone = false;
        st = remove_entry(l, e, &gone);
        bytes += gone ? e->bytes : 0;
        n += gone && e->bytes >= WORTH_A_LINE;
    }
    if (st == MT_OK)
        printf("%s: removed %s in %lld cache%s\n", l->folder, human_bytes(bytes).s, (long long)n,
               n == 1 ? "" : "s");
    return st;
}

/* ---- the command ----------------------------------------------------------------------------- */

static mt_status run_request(const char *dir, bool cleaning, int64_t days)
{
    listing l = { 0 };
    mt_status st = MT_OK;
    if (!dir)
        st = files_cache_path("data", l.folder, sizeof l.folder);
    else if ((size_t)snprintf(l.folder, sizeof l.folder, "%s", dir) >= sizeof l.folder)
        st = status_set(MT_ERR_INVALID, "%.60s...: the path is too long", dir);
    if (st == MT_OK)
        st = list(&l);
    if (st == MT_OK && cleaning)
        st = clean(&l, days);
    else if (st == MT_OK)
        print(&l);
    free(l.list);
    return st;
}

static int run_cache(const cli_command *self, int argc, char **argv)
{
    static const char *const verbs[] = { "list", "clean", NULL };
    const char *dir = NULL;
    int64_t days = INT64_MIN; /* not given */
    bool all = false;
    const cli_option options[] = {
        { "older-than", CLI_INT, &days, "DAYS", "with clean: what was not used for so long (30)" },
        { "all", CLI_FLAG, &all, NULL, "with clean: everything" },
        { "dir", CLI_TEXT, &dir, "DIR", "the folder that data.cache names (default: the user's)" },
        { 0 }
    };
    int words = 0, rc = cli_parse(self, options, argc, argv, &words);
    if (rc != CLI_GO_ON)
        return rc;
    bool cleaning = words > 0 && strcmp(argv[0], "clean") == 0, given = days != INT64_MIN;
    if (words > 0 && !cleaning && strcmp(argv[0], "list") != 0)
        return cli_unknown(self, argv[0], verbs);
    if (words > 1)
        return cli_usage(self, "%s takes no argument, but '%s' was given", argv[0], argv[1]);
    if (!cleaning && (all || given))
        return cli_usage(self, "%s is for clean", all ? "--all" : "--older-than");
    if (all && given)
        return cli_usage(self, "--all and --older-than: one of the two");
    if (given && (days < 1 || days > MAX_DAYS))
        return cli_usage(self, "--older-than must be from 1 to %d days, not %lld", MAX_DAYS,
                         (long long)days);
    return cli_exit(run_request(dir, cleaning, all ? 0 : given ? days : DEFAULT_DAYS));
}

const cli_command cli_cache = {
    .name = "cache",
    .words = "[list | clean [--older-than DAYS | --all]] [--dir DIR]",
    .brief = "list or remove what text has been made into",
    .help =
        "Text and conversations become tokens once, and are kept in a cache. list shows what is\n"
        "there, the newest first: when it was last used, and for which files. clean removes what\n"
        "has not been used for 30 days. Whatever is removed is made again when it is needed; a "
        "run\n"
        "that has it open goes on. What has not been used for 90 days goes by itself when a new\n"
        "cache is made.",
    .example = "example: free what has not been used for a week\n"
               "  megatrain cache clean --older-than 7",
    .run = run_cache,
};
