/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "mul": y = a * b, element by element.
 */
#include "rowwise.h"

CPU_ROWWISE_OP(mul);
