/* SPDX-License-Identifier: Apache-2.0
 *
 * Operation "rope": Rotary position embedding; backward rotates by the opposite angle.
 */
#include "rowwise.h"

CPU_ROWWISE_OP(rope);
