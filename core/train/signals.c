/* SPDX-License-Identifier: Apache-2.0
 *
 * Signals that ask a run to stop.
 */
#include "signals.h"

#include <signal.h>
#include <unistd.h>

enum { EXIT_RESUMABLE = 75 };

static volatile sig_atomic_t stop_requested;

static void on_signal(int number)
{
    (void)number;
    if (stop_requested)
        _exit(EXIT_RESUMABLE);
    stop_requested = 1;
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

bool train_stop_requested(void)
{
    return stop_requested != 0;
}
