/* SPDX-License-Identifier: Apache-2.0
 *
 * What a run does before its first step has ended, and how long each part of that took.
 */
#ifndef MT_CORE_STARTUP_H
#define MT_CORE_STARTUP_H

#include <megatrain/base.h>

typedef enum startup_phase {
    STARTUP_DEVICE,
    STARTUP_MODEL,     /* reading its configuration, deriving its programs */
    STARTUP_TOKENIZER, /* and the chat format */
    STARTUP_DATA,      /* opening it, or tokenising it into a cache */
    STARTUP_PLAN,      /* and measuring the machine where there is no profile */
    STARTUP_MEMORY,    /* finding, pinning and clearing the host store */
    STARTUP_ENGINE,
    STARTUP_WEIGHTS, /* reading or drawing weights; optimizer states of a checkpoint */
    STARTUP_STEP,    /* the first one */
    STARTUP_PHASES
} startup_phase;

typedef struct startup {
    double seconds[STARTUP_PHASES];
    int64_t bytes[STARTUP_PHASES]; /* 0: not counted */
    double mark;                   /* when the present phase began */
} startup;

/* Everything at zero; the first phase begins. */
void startup_begin(startup *s);

/* The phase is over, as far as it goes, and the next one begins. `bytes` went through it. */
void startup_end(startup *s, startup_phase phase, int64_t bytes);

/* What passes from here to the next end belongs to no earlier phase. */
void startup_mark(startup *s);

double startup_total(const startup *s); /* seconds */

const char *startup_name(startup_phase phase);

/* One line of the log: phases of a hundredth of a second or more, with sizes and rates. */
void startup_log(const startup *s);

#endif
