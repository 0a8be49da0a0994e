/* SPDX-License-Identifier: Apache-2.0
 *
 * Log lines and the live line, serialised by one lock.
 */
#include "log.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

static struct {
    pthread_mutex_t lock;
    mt_log_level level;
    char live[512];
} state = { .lock = PTHREAD_MUTEX_INITIALIZER, .level = MT_LOG_INFO };

void log_set_level(mt_log_level level)
{
    pthread_mutex_lock(&state.lock);
    state.level = level;
    pthread_mutex_unlock(&state.lock);
}

bool log_has_terminal(void)
{
    return isatty(STDERR_FILENO) == 1;
}

/* A line that wraps could not be taken back, so it is cut at the terminal's width. */
static void draw_live(void)
{
    struct winsize size = { 0 };
    int width = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1
                    ? size.ws_col - 1
                    : (int)sizeof state.live;
    if (state.live[0])
        fprintf(stderr, "\r\033[K%.*s", width, state.live);
    fflush(stderr);
}

void log_vwrite(mt_log_level level, const char *fmt, va_list args)
{
    static const char *const mark[] = { "error: ", "warning: ", "", "debug: " };
    pthread_mutex_lock(&state.lock);
    if (level <= state.level) {
        if (state.live[0])
            fputs("\r\033[K", stderr);
        fputs(mark[level < 0 || level > MT_LOG_DEBUG ? 0 : level], stderr);
        vfprintf(stderr, fmt, args);
        fputc('\n', stderr);
        draw_live();
    }
    pthread_mutex_unlock(&state.lock);
}

void log_write(mt_log_level level, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    log_vwrite(level, fmt, args);
    va_end(args);
}

void log_live(const char *line)
{
    if (!log_has_terminal())
        return;
    pthread_mutex_lock(&state.lock);
    if (!line) {
        if (state.live[0])
            fputs("\r\033[K", stderr);
        state.live[0] = '\0';
    } else {
        snprintf(state.live, sizeof state.live, "%s", line);
    }
    draw_live();
    pthread_mutex_unlock(&state.lock);
}
