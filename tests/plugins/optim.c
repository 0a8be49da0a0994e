/* SPDX-License-Identifier: Apache-2.0
 *
 * A small optimizer plugin, right as it stands; each macro of tests/plugins/meson.build makes it
 * wrong in one way.
 */
#include <megatrain/optim.h>
#include <megatrain/plugin.h>

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef NAME
#define NAME "sample"
#endif

static mt_status create(const mt_config *config, void **ret)
{
    (void)config;
    *ret = NULL;
    return MT_OK;
}

static void destroy(void *optim)
{
    (void)optim;
}

static uint32_t state_specs(const void *optim, mt_state_spec *ret)
{
    (void)optim;
    (void)ret;
    return 0;
}

static mt_status update(const void *optim, const mt_update *u)
{
    (void)optim;
    (void)u;
#if defined(CUT_MATTERS)
    u->lo[0] ^= 1;
#elif defined(WRITES_BEHIND)
    u->hi[u->n] = 0;
#elif defined(NOT_FINITE)
    for (int64_t i = 0; i < u->n; i++)
        mt_split_f32(u->grad[i] / 0.0f, &u->hi[i], &u->lo[i]);
#endif
    return MT_OK;
}

static const mt_optim table = {
#ifdef SHORT_TABLE
    .struct_size = 16,
#else
    .struct_size = sizeof table,
#endif
#ifdef BAD_GRANULARITY
    .granularity = 7,
#endif
    .create = create,
    .destroy = destroy,
#ifndef NULL_MEMBER
    .state_specs = state_specs,
#endif
    .update = update,
};

#ifdef UNRESOLVED
void a_function_that_nobody_has(void);
#endif

static mt_status init(const mt_host *host)
{
#ifdef UNRESOLVED
    a_function_that_nobody_has();
#endif
#if defined(EXITS)
    exit(0);
#elif defined(HANGS)
    pause();
#elif defined(CRASHES)
    raise(SIGKILL);
#elif defined(INIT_FAILS)
    host->set_error("the %s is out of ink", "printer");
    return MT_ERR_DEVICE;
#elif defined(INIT_SILENT)
    return MT_ERR_INTERNAL;
#endif
    host->log(MT_LOG_DEBUG, "%s starts", NAME);
    return MT_OK;
}

static const void *get_interface(const char *id)
{
#ifdef NO_INTERFACE
    (void)id;
    return NULL;
#else
    return strcmp(id, MT_OPTIM_INTERFACE) == 0 ? &table : NULL;
#endif
}

MT_EXPORT const mt_plugin *mt_plugin_entry_v1(uint32_t host_major, uint32_t host_minor)
{
    static const mt_plugin plugin = {
#ifdef BAD_MAGIC
        .magic = 0x12345678,
#else
        .magic = MT_PLUGIN_MAGIC,
#endif
#ifdef SHORT_DESCRIPTOR
        .struct_size = 24,
#else
        .struct_size = sizeof plugin,
#endif
#ifdef OTHER_MAJOR
        .abi_major = MT_ABI_MAJOR + 1,
#else
        .abi_major = MT_ABI_MAJOR,
#endif
#ifdef NEWER_MINOR
        .abi_minor = MT_ABI_MINOR + 1,
#else
        .abi_minor = MT_ABI_MINOR,
#endif
#ifdef OTHER_POINTERS
        .pointer_size = 4,
#else
        .pointer_size = sizeof(void *),
#endif
#ifdef OTHER_SANITIZER
        .build_flags = MT_BUILD_FLAGS ^ MT_BUILD_TSAN,
#else
        .build_flags = MT_BUILD_FLAGS,
#endif
        .name = NAME,
        .version = "1.2.3",
        .licence = "Apache-2.0",
#ifndef NO_INIT
        .init = init,
#endif
        .get_interface = get_interface,
    };
    (void)host_major;
    (void)host_minor;
    (void)init;
    (void)state_specs;
#ifdef NULL_DESCRIPTOR
    return NULL;
#else
    return &plugin;
#endif
}
