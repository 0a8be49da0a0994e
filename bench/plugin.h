/* SPDX-License-Identifier: Apache-2.0
 *
 * A plugin for a benchmark that links nothing of the program: a host that keeps each thread's error
 * text and prints the log.
 */
#ifndef BENCH_PLUGIN_H
#define BENCH_PLUGIN_H

#include <megatrain/plugin.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static _Thread_local char bench_error_text[2048];

static inline void bench_set_error(const char *fmt, ...)
{
    char text[sizeof bench_error_text]; /* an argument may be the present text */
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    memcpy(bench_error_text, text, sizeof text);
}

static inline const char *bench_error(void)
{
    return bench_error_text;
}

/* Warnings and errors; everything with MEGATRAIN_BENCH_LOG in the environment. */
static inline void bench_log(mt_log_level level, const char *fmt, ...)
{
    if (level > MT_LOG_WARNING && !getenv("MEGATRAIN_BENCH_LOG"))
        return;
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
}

/* The interface of the plugin at `path`; exits where there is none. */
static inline const void *bench_interface(const char *path, const char *id)
{
    static const mt_host host = { sizeof host,     MT_ABI_MAJOR, MT_ABI_MINOR,
                                  bench_set_error, bench_log,    bench_error };
    void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *symbol = so ? dlsym(so, MT_PLUGIN_ENTRY) : NULL;
    const mt_plugin *(*entry)(uint32_t, uint32_t) = NULL;
    memcpy(&entry, &symbol, sizeof entry);
    const mt_plugin *p = entry ? entry(MT_ABI_MAJOR, MT_ABI_MINOR) : NULL;
    const void *table = p && p->init(&host) == MT_OK ? p->get_interface(id) : NULL;
    if (!table) {
        fprintf(stderr, "%s: %s\n", path, !so ? dlerror() : !p ? "no plugin" : bench_error_text);
        exit(1);
    }
    return table;
}

#endif
