/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "rope": Rotary position embedding; backward rotates by the opposite angle.
 */
#include "rows.h"

CPU_ROWS_OP(rope);
