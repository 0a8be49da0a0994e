/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "mul": y = a * b, element by element.
 */
#include "rows.h"

CPU_ROWS_OP(mul);
