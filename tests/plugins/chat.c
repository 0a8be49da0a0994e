/* SPDX-License-Identifier: Apache-2.0
 *
 * A plugin for conversations whose table has all members but one. What they point to is no
 * function: the host must refuse the plugin before it calls any.
 */
#include <megatrain/loader.h>
#include <megatrain/plugin.h>

static void *table[sizeof(mt_chat) / sizeof(void *)];

static mt_status prepare(void)
{
    const uint32_t size = sizeof(mt_chat);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        table[i] = table;
    table[offsetof(mt_chat, parse) / sizeof *table] = NULL;
    memcpy(table, &size, sizeof size);
    return MT_OK;
}

MT_PLUGIN_WITH("chat_without_parse", "1.2.3", "Apache-2.0", prepare, 0,
               { MT_CHAT_INTERFACE, table })
