/* SPDX-License-Identifier: Apache-2.0
 *
 * The debug mode that makes races show: random delays on every queue and thread, and 0xFF (a NaN in
 * every float format) over memory whose contents nobody may read any more.
 */
#include "internal.h"

#include <string.h>
#include <unistd.h>

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void chaos_delay(engine *e, void *queue, uint64_t *rng)
{
    if (!e->chaos || e->serial)
        return;
    uint64_t r = next_random(rng);
    if ((r & 15) == 0)
        e->b->delay(e->dev, queue, (r >> 8) % 60000);
}

void chaos_sleep(engine *e, uint64_t *rng)
{
    if (!e->chaos || e->serial)
        return;
    uint64_t r = next_random(rng);
    if ((r & 15) == 0)
        usleep((useconds_t)((r >> 8) % 100));
}

void chaos_poison(engine *e, void *queue, void *p, int64_t bytes)
{
    if (!e->chaos || bytes == 0)
        return;
    e->b->fill(e->dev, queue, p, 0xff, bytes);
    enqueued(e, queue);
}

void chaos_forget(const engine *e, void *p, int64_t bytes)
{
    if (e->chaos)
        memset(p, 0xff, (size_t)bytes);
}
