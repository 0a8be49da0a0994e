/* SPDX-License-Identifier: Apache-2.0
 *
 * Figures as people read them in progress lines and tables.
 */
#ifndef MT_CORE_HUMAN_H
#define MT_CORE_HUMAN_H

#include <megatrain/base.h>

/* Room for any of the texts below. */
typedef struct human_text {
    char s[32];
} human_text;

human_text human_count(double x);         /* 950, 12.3k, 8.03B */
human_text human_rate(double x);          /* 0.0123, 9.50, 950, 12.3k */
human_text human_bytes(int64_t bytes);    /* 512 B, 1.25 GiB */
human_text human_seconds(double seconds); /* 0.42s, 59s, 2m31s, 5h07m, 3d04h */
human_text human_grouped(int64_t x);      /* 8,030,261,248 */

#endif
