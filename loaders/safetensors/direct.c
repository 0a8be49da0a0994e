/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading past the page cache.
 */
#include "direct.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Larger than the blocks of any disk; a piece is as large as what is usually asked for. */
enum { ALIGN = 4096, PIECE = 2 << 20, ROOM = PIECE + ALIGN, LEAST = 256 << 10 };

struct st_pool {
    pthread_mutex_t lock;
    void *spare; /* a list through the buffers' first words */
};

st_pool *st_pool_create(void)
{
    st_pool *pool = calloc(1, sizeof *pool);
    if (pool)
        pthread_mutex_init(&pool->lock, NULL);
    return pool;
}

void st_pool_destroy(st_pool *pool)
{
    if (!pool)
        return;
    for (void *buffer = pool->spare, *next; buffer; buffer = next) {
        next = *(void **)buffer;
        free(buffer);
    }
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static void *take(st_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    void *buffer = pool->spare;
    if (buffer)
        pool->spare = *(void **)buffer;
    pthread_mutex_unlock(&pool->lock);
    return buffer ? buffer : aligned_alloc(ALIGN, ROOM);
}

static void give_back(st_pool *pool, void *buffer)
{
    pthread_mutex_lock(&pool->lock);
    *(void **)buffer = pool->spare;
    pool->spare = buffer;
    pthread_mutex_unlock(&pool->lock);
}

/* Is most of the range in the page cache? The mapping is asked about, and never touched. */
static bool is_cached(int fd, int64_t offset, int64_t n)
{
    unsigned char resident[PIECE / ALIGN + 2];
    int64_t begin = offset / ALIGN * ALIGN, end = offset + n;
    if (end - begin > ROOM) /* judged by its beginning */
        end = begin + ROOM;
    size_t bytes = (size_t)(end - begin), pages = (bytes + ALIGN - 1) / ALIGN, found = 0;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, begin);
    if (map == MAP_FAILED)
        return false;
    if (mincore(map, bytes, resident) == 0)
        for (size_t i = 0; i < pages; i++)
            found += resident[i] & 1;
    munmap(map, bytes);
    return found > pages / 2;
}

static bool read_pieces(int fd, void *buffer, int64_t offset, int64_t n, char *dst)
{
    for (int64_t at = offset, end = offset + n; at < end;) {
        int64_t begin = at / ALIGN * ALIGN, want = (end - begin + ALIGN - 1) / ALIGN * ALIGN;
        ssize_t got = pread(fd, buffer, want < ROOM ? (size_t)want : ROOM, begin);
        if (got < 0 && errno == EINTR)
            continue;
        int64_t fresh = got - (at - begin);
        if (got < 0 || fresh <= 0)
            return false;
        fresh = fresh < end - at ? fresh : end - at;
        memcpy(dst, (char *)buffer + (at - begin), (size_t)fresh);
        dst += fresh;
        at += fresh;
    }
    return true;
}

bool st_direct_read(st_pool *pool, int fd, int64_t offset, int64_t n, void *dst)
{
    char path[64];
    if (n < LEAST || sysconf(_SC_PAGESIZE) != ALIGN || is_cached(fd, offset, n))
        return false;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* this very file, whatever its name is */
    int direct = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    void *buffer = direct < 0 ? NULL : take(pool);
    bool done = buffer && read_pieces(direct, buffer, offset, n, dst);
    if (buffer)
        give_back(pool, buffer);
    if (direct >= 0)
        close(direct);
    return done;
}
