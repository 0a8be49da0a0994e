/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals that ask a run to stop.
 */
#include "signals.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_RESUMABLE = 75 };

/* timeout(1) and job managers signal the process and then its group: one wish, told twice. */
static const int64_t one_wish = 1000000000; /* ns */

/* When the first signal came, ns of the monotonic clock; 0: none yet. Threads may handle two
 * signals at once. */
static _Atomic int64_t asked_at;

/* There is something to finish, so that a signal is a wish. */
static atomic_bool busy;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void on_signal(int number)
{
    static const char text[] = "stopped before the first step: nothing is lost, and the same "
                               "command begins again\n";
    (void)number;
    if (!atomic_load(&busy)) {
        ssize_t n = write(STDERR_FILENO, text, sizeof text - 1);
        (void)n;
        _exit(EXIT_RESUMABLE);
    }
    int64_t first = 0, present = now();
    if (!atomic_compare_exchange_strong(&asked_at, &first, present) && present - first >= one_wish)
        _exit(EXIT_RESUMABLE);
}

void train_catch_signals(void)
{
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    /* A closed terminal stops a run as gently, unless nohup asked otherwise. */
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
    /* Whoever read the messages may go away; the run goes on. */
    signal(SIGPIPE, SIG_IGN);
}

void train_finish_on_signal(void)
{
    atomic_store(&busy, true);
}

bool train_stop_requested(void)
{
    return atomic_load(&asked_at) != 0;
}
