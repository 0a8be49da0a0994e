/* SPDX-License-Identifier: Apache-2.0
 *
 * Times of the phases of a start.
 */
#include "startup.h"

#include "../base/log.h"
#include "../base/progress.h"
#include "../base/text.h"
#include "human.h"

void startup_begin(startup *s)
{
    *s = (startup){ .mark = progress_now() };
}

void startup_mark(startup *s)
{
    s->mark = progress_now();
}

void startup_end(startup *s, startup_phase phase, int64_t bytes)
{
    double now = progress_now();
    s->seconds[phase] += now - s->mark;
    s->bytes[phase] += bytes;
    s->mark = now;
}

double startup_total(const startup *s)
{
    double sum = 0;
    for (int p = 0; p < STARTUP_PHASES; p++)
        sum += s->seconds[p];
    return sum;
}

const char *startup_name(startup_phase phase)
{
    static const char *const names[STARTUP_PHASES] = { "device", "model",   "tokenizer",
                                                       "data",   "plan",    "memory",
                                                       "engine", "weights", "first step" };
    return names[phase];
}

void startup_log(const startup *s)
{
    char line[640] = "";
    for (int p = 0; p < STARTUP_PHASES; p++) {
        double t = s->seconds[p];
        if (t < 0.01)
            continue;
        text_append(line, sizeof line, "%s%s %s", line[0] ? ", " : "",
                    startup_name((startup_phase)p), human_seconds(t).s);
        if (s->bytes[p])
            text_append(line, sizeof line, " (%s, %s/s)", human_bytes(s->bytes[p]).s,
                        human_bytes((int64_t)((double)s->bytes[p] / t)).s);
    }
    log_write(MT_LOG_INFO, "start:  %s in all%s%s", human_seconds(startup_total(s)).s,
              line[0] ? ": " : "", line);
}
