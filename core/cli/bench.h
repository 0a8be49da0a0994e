/* SPDX-License-Identifier: Apache-2.0
 *
 * What there is of `megatrain bench`.
 */
#ifndef MT_CORE_BENCH_H
#define MT_CORE_BENCH_H

#include "cli.h"

extern const cli_command cli_bench_hardware, cli_bench_step, cli_bench_unit, cli_bench_start;

#endif
