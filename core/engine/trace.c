/* SPDX-License-Identifier: Apache-2.0
 *
 * The timeline: a ring of events whose times the queues themselves write down; what the compute
 * queue waited for; and the file that Perfetto and chrome://tracing read.
 */
#include "internal.h"

#include "../base/status.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

uint64_t time_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int64_t claim(engine *e, int track_, event_kind kind, int32_t unit, int32_t micro)
{
    int64_t i = atomic_fetch_add(&e->time.next, 1) % e->time.n_events;
    e->time.event[i] = (timeline_event){ (int16_t)kind, (int16_t)track_, unit, micro };
    return i;
}

int64_t time_begin(engine *e, void *queue, int track_, event_kind kind, int32_t unit, int32_t micro)
{
    int64_t i = claim(e, track_, kind, unit, micro);
    /* The end stays 0 until it is known. Nothing in flight is ever overwritten: the ring holds more
     * than two steps. */
    e->time.ns[2 * i] = e->time.ns[2 * i + 1] = 0;
    e->b->timestamp(e->dev, queue, &e->time.ns[2 * i]);
    enqueued(e, queue);
    return i;
}

void time_end(engine *e, void *queue, int64_t index)
{
    e->b->timestamp(e->dev, queue, &e->time.ns[2 * index + 1]);
    enqueued(e, queue);
}

void time_span(engine *e, int track_, event_kind kind, int32_t unit, uint64_t from, uint64_t to)
{
    pthread_mutex_lock(&e->time.lock);
    int64_t i = claim(e, track_, kind, unit, -1);
    e->time.ns[2 * i] = from;
    e->time.ns[2 * i + 1] = to;
    pthread_mutex_unlock(&e->time.lock);
}

static uint64_t overlap(uint64_t a0, uint64_t a1, uint64_t b0, uint64_t b1)
{
    uint64_t from = a0 > b0 ? a0 : b0, to = a1 < b1 ? a1 : b1;
    return to > from ? to - from : 0;
}

/* The first event of the step that is still in the ring. */
static int64_t first_event(const engine *e)
{
    int64_t first = e->traffic.first_event, end = e->traffic.end_event;
    return end - first > e->time.n_events ? end - e->time.n_events : first;
}

void engine_time_unit(engine *e, int32_t unit, engine_unit_times *ret)
{
    engine_unit_times t = { 0 };
    pthread_mutex_lock(&e->time.lock);
    for (int64_t k = first_event(e); k < e->traffic.end_event; k++) {
        int64_t i = k % e->time.n_events;
        const timeline_event *v = &e->time.event[i];
        uint64_t from = e->time.ns[2 * i], to = e->time.ns[2 * i + 1];
        if (v->unit != unit || v->micro >= 0 || !from || to < from)
            continue;
        double seconds = (double)(to - from) * 1e-9;
        t.forward += v->kind == EVENT_FORWARD ? seconds : 0;
        t.n_forward += v->kind == EVENT_FORWARD;
        t.backward += v->kind == EVENT_BACKWARD ? seconds : 0;
        t.n_backward += v->kind == EVENT_BACKWARD;
        t.copy_in += v->kind == EVENT_COPY_IN ? seconds : 0;
        t.n_copy_in += v->kind == EVENT_COPY_IN;
        t.copy_out += v->kind == EVENT_COPY_OUT ? seconds : 0;
        t.n_copy_out += v->kind == EVENT_COPY_OUT;
    }
    pthread_mutex_unlock(&e->time.lock);
    *ret = t;
}

static void account_traffic(engine *e, engine_result *ret)
{
    uint64_t in = 0, out = 0;
    traffic *t = &e->traffic;
    pthread_mutex_lock(&e->time.lock);
    for (int64_t k = first_event(e); k < t->end_event; k++) {
        int64_t i = k % e->time.n_events;
        const timeline_event *v = &e->time.event[i];
        uint64_t from = e->time.ns[2 * i], to = e->time.ns[2 * i + 1];
        if (!from || to < from)
            continue;
        in += v->kind == EVENT_COPY_IN ? to - from : 0;
        out += v->kind == EVENT_COPY_OUT ? to - from : 0;
    }
    pthread_mutex_unlock(&e->time.lock);
    ret->copy_in_bytes = atomic_exchange(&t->in_bytes, 0);
    ret->copy_out_bytes = atomic_exchange(&t->out_bytes, 0);
    ret->copy_in_seconds = (double)in * 1e-9;
    ret->copy_out_seconds = (double)out * 1e-9;
    ret->updated_elems = atomic_exchange(&t->updated_elems, 0);
    ret->update_seconds = (double)pool_take_update_ns(e) * 1e-9;
}

/* Splits the time from `from` to `to` into busy and waiting. A gap before a pass is charged to the
 * dependency of the pass that was met last; of a gap charged to weights, the part during which
 * their copy-in could not start because of the optimizer is the optimizer's. After the last pass
 * gradients are waited for until all are out, then their norm, which is the optimizer's too. */
void time_account(engine *e, uint64_t from, uint64_t to, engine_result *ret)
{
    const uint64_t *ns = e->time.ns;
    uint64_t before = from, busy = 0, wait[ENGINE_WAITS] = { 0 };
    for (int64_t i = 0; i < e->n_records; i++) {
        const pass_record *r = &e->record[i];
        uint64_t begin = ns[2 * r->compute], end = ns[2 * r->compute + 1];
        if (begin > before) {
            uint64_t gap = begin - before;
            uint64_t met[ENGINE_WAITS] = { 0 };
            met[ENGINE_WAIT_WEIGHTS] = r->copy_in >= 0 ? ns[2 * r->copy_in + 1] : 0;
            met[ENGINE_WAIT_GRADIENTS] = r->copy_out >= 0 ? ns[2 * r->copy_out + 1] : 0;
            met[ENGINE_WAIT_DATA] = r->batch >= 0 ? ns[2 * r->batch + 1] : 0;
            int last = ENGINE_WAIT_WEIGHTS;
            for (int k = 1; k < ENGINE_WAITS; k++)
                if (met[k] > met[last])
                    last = k;
            uint64_t optimizer = 0;
            if (last == ENGINE_WAIT_WEIGHTS)
                optimizer = overlap(before, begin, r->blocked_from, r->blocked_to);
            wait[ENGINE_WAIT_OPTIMIZER] += optimizer;
            wait[last] += gap - optimizer;
        }
        busy += end > begin ? end - begin : 0;
        before = end > before ? end : before;
    }
    uint64_t landed = e->step.landed;
    wait[ENGINE_WAIT_GRADIENTS] += overlap(before, to, before, landed);
    wait[ENGINE_WAIT_OPTIMIZER] += overlap(before, to, landed, to);
    ret->compute_seconds = (double)busy * 1e-9;
    for (int k = 0; k < ENGINE_WAITS; k++)
        ret->wait_seconds[k] = (double)wait[k] * 1e-9;
    account_traffic(e, ret);
}

/* ---- the file -------------------------------------------------------------------------------- */

static void write_string(FILE *f, const char *s)
{
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            fputc('\\', f);
        if ((unsigned char)*s >= 0x20)
            fputc(*s, f);
    }
}

static void write_track(FILE *f, int id, const char *name, int index)
{
    fprintf(f, "{\"ph\":\"M\",\"pid\":1,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"",
            id);
    fprintf(f, index < 0 ? "%s" : "%s %d", name, index);
    fprintf(f, "\"}},\n");
}

mt_status trace_write(engine *e)
{
    static const char *const verb[] = {
        [EVENT_FORWARD] = "forward",   [EVENT_BACKWARD] = "backward", [EVENT_COPY_IN] = "copy in",
        [EVENT_COPY_OUT] = "copy out", [EVENT_BATCH_IN] = "batch in", [EVENT_UPDATE] = "update",
        [EVENT_ADD] = "add",           [EVENT_SCATTER] = "scatter",   [EVENT_NORM] = "norm",
        [EVENT_GATHER] = "gather",     [EVENT_GENERATE] = "generate"
    };
    FILE *f = fopen(e->trace_path, "we");
    if (!f)
        return status_set(MT_ERR_IO, "%s: cannot write the trace: %s", e->trace_path,
                          strerror(errno));
    fprintf(f, TRACE_MARK ":\"ms\",\"traceEvents\":[\n");
    write_track(f, TRACK_IN, "copy-in queue", -1);
    write_track(f, TRACK_COMPUTE, "compute queue", -1);
    write_track(f, TRACK_OUT, "copy-out queue", -1);
    for (int32_t i = 0; i < (e->pool.n_threads ? e->pool.n_threads : 1); i++)
        write_track(f, TRACK_WORKER + i, "worker", i);
    int64_t end = atomic_load(&e->time.next);
    int64_t first = end > e->time.n_events ? end - e->time.n_events : 0;
    uint64_t origin = UINT64_MAX;
    for (int64_t k = first; k < end; k++) {
        uint64_t begin = e->time.ns[2 * (k % e->time.n_events)];
        origin = begin && begin < origin ? begin : origin;
    }
    const char *sep = "";
    for (int64_t k = first; k < end; k++) {
        int64_t i = k % e->time.n_events;
        const timeline_event *v = &e->time.event[i];
        uint64_t from = e->time.ns[2 * i], to = e->time.ns[2 * i + 1];
        if (!from || to < from)
            continue;
        fprintf(f, "%s{\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%s",
                sep, v->track, (double)(from - origin) * 1e-3, (double)(to - from) * 1e-3,
                verb[v->kind]);
        if (v->unit >= 0) {
            fputc(' ', f);
            write_string(f, e->m->units[v->unit].name);
        }
        if (v->micro >= 0)
            fprintf(f, " mb %d", v->micro);
        fprintf(f, "\"}");
        sep = ",\n";
    }
    fprintf(f, "\n]}\n");
    bool failed = ferror(f) != 0;
    if (fclose(f) != 0 || failed)
        return status_set(MT_ERR_IO, "%s: cannot write the trace: %s", e->trace_path,
                          strerror(errno));
    return MT_OK;
}
