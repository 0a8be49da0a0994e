/* SPDX-License-Identifier: Apache-2.0
 *
 * A shared object like any other: it lacks the entry function.
 */
int not_a_plugin(void);
int not_a_plugin(void)
{
    return 42;
}
