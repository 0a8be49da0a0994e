/* SPDX-License-Identifier: Apache-2.0
 *
 * How a shared object becomes a plugin: one exported function, one descriptor.
 *
 * A plugin is NAME.so with a manifest NAME.yaml beside it. The host reads only manifests while it
 * searches; it loads the shared object when something that the manifest provides is needed.
 * The host calls mt_plugin_entry_v1, checks the descriptor, calls init once, and never unloads.
 */
#ifndef MEGATRAIN_PLUGIN_H
#define MEGATRAIN_PLUGIN_H

#include "report.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_PLUGIN_MAGIC 0x4c50544du /* "MTPL" in memory order */
#define MT_PLUGIN_ENTRY "mt_plugin_entry_v1"

/* Bits of mt_plugin::build_flags. The host refuses a plugin whose sanitizers differ from its own
 * where mixing them cannot work (ThreadSanitizer). */
enum { MT_BUILD_ASAN = 1u << 0, MT_BUILD_TSAN = 1u << 1 };

#if defined(__SANITIZE_ADDRESS__)
#define MT_BUILD_FLAG_ASAN_ MT_BUILD_ASAN
#else
#define MT_BUILD_FLAG_ASAN_ 0u
#endif
#if defined(__SANITIZE_THREAD__)
#define MT_BUILD_FLAG_TSAN_ MT_BUILD_TSAN
#else
#define MT_BUILD_FLAG_TSAN_ 0u
#endif
#define MT_BUILD_FLAGS (MT_BUILD_FLAG_ASAN_ | MT_BUILD_FLAG_TSAN_)

/* The descriptor. The first four members are frozen for ever; the rest is append-only and counted
 * by struct_size. Strings and tables live as long as the process. */
typedef struct mt_plugin {
    uint32_t magic;       /* MT_PLUGIN_MAGIC */
    uint32_t struct_size; /* sizeof(mt_plugin) where the plugin was built */
    uint16_t abi_major;   /* MT_ABI_MAJOR: must equal the host's */
    uint16_t abi_minor;   /* MT_ABI_MINOR: at most the host's */

    uint32_t pointer_size; /* sizeof(void *) */
    uint32_t build_flags;  /* MT_BUILD_FLAGS */
    uint32_t cudart_major; /* CUDA runtime it links to, 0 for none */
    const char *name;      /* as in the manifest */
    const char *version;   /* as in the manifest */
    const char *licence;   /* SPDX identifier */

    /* Called once, before anything else. `host` lives for the whole process. [main] */
    mt_status (*init)(const mt_host *host);
    /* Called at most once, when the process ends normally. May be NULL. [main] */
    void (*deinit)(void);
    /* The table behind an interface id such as "megatrain.arch/1"; NULL when not provided. [main]
     */
    const void *(*get_interface)(const char *id);
} mt_plugin;

/* The one exported symbol. Arguments are the host's ABI version, so that a plugin may adapt;
 * returns NULL when it cannot work with such a host. [main] */
MT_EXPORT const mt_plugin *mt_plugin_entry_v1(uint32_t host_major, uint32_t host_minor);

/* An interface that a plugin provides. */
typedef struct mt_interface {
    const char *id;    /* "megatrain.arch/1" */
    const void *table; /* what the interface's header describes */
} mt_interface;

/* Writes the entry function for a plugin that provides one interface, in one of its files:
 *     MT_PLUGIN("llama", "1.0.0", "Apache-2.0", MT_ARCH_INTERFACE, &llama_arch)
 * It also defines what report.h declares. */
#define MT_PLUGIN(plugin_name, plugin_version, plugin_licence, interface_id, interface_table)      \
    MT_PLUGIN_WITH(plugin_name, plugin_version, plugin_licence, NULL, 0,                           \
                   { interface_id, interface_table })

/* The same for a plugin that provides several interfaces, has to prepare something, or links to
 * CUDA:
 *     MT_PLUGIN_WITH("text", "1.0.0", "Apache-2.0", prepare, 0,
 *                    { MT_DATA_INTERFACE, &data }, { MT_TOKENIZER_INTERFACE, &tokenizer })
 * `prepare` (mt_status (*)(void), or NULL) is called once, when the host is known and before
 * anything else; where it fails the host refuses the plugin. `cuda_runtime` is the major version of
 * the CUDA runtime, or 0. */
#define MT_PLUGIN_WITH(plugin_name, plugin_version, plugin_licence, prepare, cuda_runtime, ...)    \
    const mt_host *mt_plugin_host;                                                                 \
    const char mt_plugin_name[] = plugin_name;                                                     \
    static mt_status mt_plugin_init_(const mt_host *host)                                          \
    {                                                                                              \
        mt_status (*const prepare_)(void) = prepare;                                               \
        mt_plugin_host = host;                                                                     \
        return prepare_ ? prepare_() : (mt_status)MT_OK;                                           \
    }                                                                                              \
    static const void *mt_plugin_get_interface_(const char *id)                                    \
    {                                                                                              \
        static const mt_interface provided[] = { __VA_ARGS__ };                                    \
        for (size_t i = 0; i < sizeof provided / sizeof *provided; i++)                            \
            if (strcmp(id, provided[i].id) == 0)                                                   \
                return provided[i].table;                                                          \
        return NULL;                                                                               \
    }                                                                                              \
    MT_EXPORT const mt_plugin *mt_plugin_entry_v1(uint32_t host_major, uint32_t host_minor)        \
    {                                                                                              \
        static const mt_plugin plugin = {                                                          \
            MT_PLUGIN_MAGIC,         sizeof(mt_plugin), MT_ABI_MAJOR,    MT_ABI_MINOR,             \
            sizeof(void *),          MT_BUILD_FLAGS,    cuda_runtime,    mt_plugin_name,           \
            plugin_version,          plugin_licence,    mt_plugin_init_, NULL,                     \
            mt_plugin_get_interface_                                                               \
        };                                                                                         \
        (void)host_major;                                                                          \
        (void)host_minor;                                                                          \
        return &plugin;                                                                            \
    }

#ifdef __cplusplus
}
#endif
#endif
