/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding runs of units that are alike, and periods of such runs.
 */
#include "unit_runs.h"

/* No architecture has a longer period; a bound keeps the search linear. */
enum { MOST_LINES = 16 };

typedef struct units {
    unit_alike alike;
    const void *arg;
} units;

static int32_t join_neighbours(const units *u, int32_t n_units, unit_run *ret)
{
    int32_t n = 0;
    for (int32_t i = 0; i < n_units; i++) {
        if (n > 0 && u->alike(u->arg, ret[n - 1].first, i))
            ret[n - 1].last = i;
        else
            ret[n++] = (unit_run){ .first = i, .last = i, .times = 1 };
    }
    return n;
}

/* How often the first `lines` of n runs stand one after the other. */
static int32_t count_times(const units *u, const unit_run *run, int32_t n, int32_t lines)
{
    int32_t i = lines;
    while (i < n && run[i].last - run[i].first == run[i - lines].last - run[i - lines].first &&
           u->alike(u->arg, run[i].first, run[i - lines].first))
        i++;
    return i / lines;
}

/* The shortest period of the runs that saves two lines or more, one being taken to tell of it. */
static int32_t find_period(const units *u, const unit_run *run, int32_t n, int32_t *ret_times)
{
    for (int32_t lines = 2; lines <= MOST_LINES && 2 * lines <= n; lines++) {
        int32_t times = count_times(u, run, n, lines);
        if ((times - 1) * lines > 2) {
            *ret_times = times;
            return lines;
        }
    }
    return 0;
}

int32_t unit_runs(int32_t n_units, unit_alike alike, const void *arg, unit_run *ret)
{
    const units u = { alike, arg };
    int32_t n = join_neighbours(&u, n_units, ret), put = 0;
    for (int32_t i = 0; i < n;) {
        int32_t times = 1, lines = find_period(&u, ret + i, n - i, &times);
        int32_t end = i + (lines ? times * lines : 1), until = ret[end - 1].last;
        for (int32_t k = 0; k < (lines ? lines : 1); k++)
            ret[put++] = ret[i + k];
        if (lines) {
            ret[put - 1].times = times;
            ret[put - 1].lines = lines;
            ret[put - 1].until = until;
        }
        i = end;
    }
    return put;
}
