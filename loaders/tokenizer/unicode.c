/* SPDX-License-Identifier: Apache-2.0
 *
 * \p{L} and its like as Unicode 16 has them, whatever version the regular expression library
 * knows: the same text must become the same tokens on every machine, and Hugging Face's tokenizers
 * bring this version with them.
 */
#include "tokenizer.h"

#include <oniguruma.h>
#include <stdlib.h>

typedef enum class { LU, LL, LM, LO, M, N, P, S } class;

/* What Unicode 15, 15.1 and 16 have added to 14, by general category. */
static const struct addition {
    uint32_t first, last;
    class class;
} additions[] = { { 0x00897, 0x00897, M },  { 0x00cf3, 0x00cf3, M },  { 0x00ece, 0x00ece, M },
                  { 0x01b4e, 0x01b4f, P },  { 0x01b7f, 0x01b7f, P },  { 0x01c89, 0x01c89, LU },
                  { 0x01c8a, 0x01c8a, LL }, { 0x02427, 0x02429, S },  { 0x02ffc, 0x02fff, S },
                  { 0x031e4, 0x031e5, S },  { 0x031ef, 0x031ef, S },  { 0x0a7cb, 0x0a7cc, LU },
                  { 0x0a7cd, 0x0a7cd, LL }, { 0x0a7da, 0x0a7da, LU }, { 0x0a7db, 0x0a7db, LL },
                  { 0x0a7dc, 0x0a7dc, LU }, { 0x105c0, 0x105f3, LO }, { 0x10d40, 0x10d49, N },
                  { 0x10d4a, 0x10d4d, LO }, { 0x10d4e, 0x10d4e, LM }, { 0x10d4f, 0x10d4f, LO },
                  { 0x10d50, 0x10d65, LU }, { 0x10d69, 0x10d6d, M },  { 0x10d6e, 0x10d6e, P },
                  { 0x10d6f, 0x10d6f, LM }, { 0x10d70, 0x10d85, LL }, { 0x10d8e, 0x10d8f, S },
                  { 0x10ec2, 0x10ec4, LO }, { 0x10efc, 0x10eff, M },  { 0x1123f, 0x11240, LO },
                  { 0x11241, 0x11241, M },  { 0x11380, 0x11389, LO }, { 0x1138b, 0x1138b, LO },
                  { 0x1138e, 0x1138e, LO }, { 0x11390, 0x113b5, LO }, { 0x113b7, 0x113b7, LO },
                  { 0x113b8, 0x113c0, M },  { 0x113c2, 0x113c2, M },  { 0x113c5, 0x113c5, M },
                  { 0x113c7, 0x113ca, M },  { 0x113cc, 0x113d0, M },  { 0x113d1, 0x113d1, LO },
                  { 0x113d2, 0x113d2, M },  { 0x113d3, 0x113d3, LO }, { 0x113d4, 0x113d5, P },
                  { 0x113d7, 0x113d8, P },  { 0x113e1, 0x113e2, M },  { 0x116d0, 0x116e3, N },
                  { 0x11b00, 0x11b09, P },  { 0x11bc0, 0x11be0, LO }, { 0x11be1, 0x11be1, P },
                  { 0x11bf0, 0x11bf9, N },  { 0x11f00, 0x11f01, M },  { 0x11f02, 0x11f02, LO },
                  { 0x11f03, 0x11f03, M },  { 0x11f04, 0x11f10, LO }, { 0x11f12, 0x11f33, LO },
                  { 0x11f34, 0x11f3a, M },  { 0x11f3e, 0x11f42, M },  { 0x11f43, 0x11f4f, P },
                  { 0x11f50, 0x11f59, N },  { 0x11f5a, 0x11f5a, M },  { 0x1342f, 0x1342f, LO },
                  { 0x13440, 0x13440, M },  { 0x13441, 0x13446, LO }, { 0x13447, 0x13455, M },
                  { 0x13460, 0x143fa, LO }, { 0x16100, 0x1611d, LO }, { 0x1611e, 0x1612f, M },
                  { 0x16130, 0x16139, N },  { 0x16d40, 0x16d42, LM }, { 0x16d43, 0x16d6a, LO },
                  { 0x16d6b, 0x16d6c, LM }, { 0x16d6d, 0x16d6f, P },  { 0x16d70, 0x16d79, N },
                  { 0x18cff, 0x18cff, LO }, { 0x1b132, 0x1b132, LO }, { 0x1b155, 0x1b155, LO },
                  { 0x1cc00, 0x1ccef, S },  { 0x1ccf0, 0x1ccf9, N },  { 0x1cd00, 0x1ceb3, S },
                  { 0x1d2c0, 0x1d2d3, N },  { 0x1df25, 0x1df2a, LL }, { 0x1e030, 0x1e06d, LM },
                  { 0x1e08f, 0x1e08f, M },  { 0x1e4d0, 0x1e4ea, LO }, { 0x1e4eb, 0x1e4eb, LM },
                  { 0x1e4ec, 0x1e4ef, M },  { 0x1e4f0, 0x1e4f9, N },  { 0x1e5d0, 0x1e5ed, LO },
                  { 0x1e5ee, 0x1e5ef, M },  { 0x1e5f0, 0x1e5f0, LO }, { 0x1e5f1, 0x1e5fa, N },
                  { 0x1e5ff, 0x1e5ff, P },  { 0x1f6dc, 0x1f6dc, S },  { 0x1f774, 0x1f776, S },
                  { 0x1f77b, 0x1f77f, S },  { 0x1f7d9, 0x1f7d9, S },  { 0x1f8b2, 0x1f8bb, S },
                  { 0x1f8c0, 0x1f8c1, S },  { 0x1fa75, 0x1fa77, S },  { 0x1fa87, 0x1fa89, S },
                  { 0x1fa8f, 0x1fa8f, S },  { 0x1faad, 0x1faaf, S },  { 0x1fabb, 0x1fabf, S },
                  { 0x1fac6, 0x1fac6, S },  { 0x1face, 0x1facf, S },  { 0x1fada, 0x1fadc, S },
                  { 0x1fadf, 0x1fadf, S },  { 0x1fae8, 0x1fae9, S },  { 0x1faf7, 0x1faf8, S },
                  { 0x1fbcb, 0x1fbef, S },  { 0x2b739, 0x2b739, LO }, { 0x2ebf0, 0x2ee5d, LO },
                  { 0x31350, 0x323af, LO } };

enum { ADDITIONS = sizeof additions / sizeof *additions };

/* A property and the classes of additions that belong to it, as bits. */
static const struct property {
    const char *name;
    uint32_t classes;
} properties[] = {
    { "L", 1u << LU | 1u << LL | 1u << LM | 1u << LO },
    { "Lu", 1u << LU },
    { "Ll", 1u << LL },
    { "Lm", 1u << LM },
    { "Lo", 1u << LO },
    { "M", 1u << M },
    { "N", 1u << N },
    { "P", 1u << P },
    { "S", 1u << S },
};

static int by_start(const void *a, const void *b)
{
    const OnigCodePoint *x = a, *y = b;
    return x[0] < y[0] ? -1 : x[0] > y[0];
}

/* The library's own ranges: how many, then their ends. */
static const OnigCodePoint *known_ranges(const char *name)
{
    OnigEncoding utf8 = ONIG_ENCODING_UTF8;
    OnigUChar *p = (OnigUChar *)name;
    OnigCodePoint single_byte_limit;
    const OnigCodePoint *ranges = NULL;
    int type = utf8->property_name_to_ctype(utf8, p, p + strlen(name));
    if (type < 0 || utf8->get_ctype_code_range((OnigCtype)type, &single_byte_limit, &ranges) != 0)
        return NULL;
    return ranges;
}

/* Redefines a property as what the library knows and what has been added since. The ranges belong
 * to the library from then on. */
static mt_status define(const struct property *p)
{
    const OnigCodePoint *known = known_ranges(p->name);
    if (!known)
        return mt_fail(MT_ERR_INTERNAL, "tokenizer: the regular expression library has no \\p{%s}",
                       p->name);
    OnigCodePoint n = known[0];
    OnigCodePoint *ranges = malloc((1 + 2 * ((size_t)n + ADDITIONS)) * sizeof *ranges);
    if (!ranges)
        return mt_fail_nomem();
    memcpy(ranges + 1, known + 1, 2 * (size_t)n * sizeof *ranges);
    for (int i = 0; i < ADDITIONS; i++)
        if (p->classes >> additions[i].class & 1) {
            ranges[1 + 2 * n] = additions[i].first;
            ranges[2 + 2 * n] = additions[i].last;
            n++;
        }
    qsort(ranges + 1, n, 2 * sizeof *ranges, by_start);
    OnigCodePoint merged = 0; /* ranges that are final */
    for (OnigCodePoint i = 0; i < n; i++) {
        OnigCodePoint first = ranges[1 + 2 * i], last = ranges[2 + 2 * i];
        if (merged && first <= ranges[2 * merged] + 1) {
            ranges[2 * merged] = last > ranges[2 * merged] ? last : ranges[2 * merged];
            continue;
        }
        ranges[1 + 2 * merged] = first;
        ranges[2 + 2 * merged] = last;
        merged++;
    }
    ranges[0] = merged;
    if (onig_unicode_define_user_property(p->name, ranges) != ONIG_NORMAL)
        return mt_fail(MT_ERR_INTERNAL,
                       "tokenizer: the regular expression library does not redefine \\p{%s}",
                       p->name);
    return MT_OK;
}

/* The library keeps definitions for the whole process, and has room for few. */
mt_status tok_unicode_init(void)
{
    static bool defined;
    mt_status status = MT_OK;
    for (size_t i = 0; i < sizeof properties / sizeof *properties && !status && !defined; i++)
        status = define(&properties[i]);
    defined = !status;
    return status;
}
