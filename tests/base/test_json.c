/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON with integers of more than 64 bits: they become reals, nothing else changes.
 */
#include "../check.h"
#include <megatrain/json.h>

#include <math.h>
#include <stdint.h>
#include <unistd.h>

/* As transformers writes it. */
#define NO_LENGTH "1000000000000000019884624838656"

static json_t *parse(const char *text)
{
    json_error_t error;
    json_t *root = mt_json_loadb(text, strlen(text), JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    CHECK(root, "%s: %s", text, error.text);
    return root;
}

static void wide_integers_become_reals(void)
{
    static const struct {
        const char *text;
        double value;
    } wide[] = {
        { NO_LENGTH, 1e30 },
        { "-" NO_LENGTH, -1e30 },
        { "9223372036854775808", 0x1p63 },
        { "-9223372036854775809", -0x1p63 },
        { "18446744073709551615", 0x1p64 },
    };
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        json_t *v = parse(wide[i].text);
        CHECK(json_is_real(v), "%s", wide[i].text);
        CHECK(fabs(json_real_value(v) / wide[i].value - 1) <= 0x1p-51, "%s: %.17g", wide[i].text,
              json_real_value(v));
        json_decref(v);
    }
}

static void all_else_stays(void)
{
    json_t *root = parse("{\"wide\": [" NO_LENGTH "," NO_LENGTH "],\n"
                         "\"most\": 9223372036854775807, \"least\":-9223372036854775808, \"n\":0,\n"
                         "\"real\": 10000000000000000000000.5, \"power\": 20000000000000000000e1,\n"
                         "\"text\": \"a \\\" " NO_LENGTH " \\\\\","
                         "\"" NO_LENGTH "\": true}");
    json_int_t most = 0, least = 0, n = 1;
    double real = 0, power = 0;
    const char *text = "";
    int yes = 0;
    CHECK(json_unpack(root, "{s:I, s:I, s:I, s:f, s:f, s:s, s:b, s:[f,f]}", "most", &most, "least",
                      &least, "n", &n, "real", &real, "power", &power, "text", &text, NO_LENGTH,
                      &yes, "wide", &(double){ 0 }, &(double){ 0 }) == 0);
    CHECK(most == INT64_MAX && least == INT64_MIN && n == 0);
    CHECK(real == 1e22 && power == 2e20 && yes == 1);
    CHECK(strcmp(text, "a \" " NO_LENGTH " \\") == 0, "%s", text);
    json_decref(root);
}

static void places_in_messages_stay(void)
{
    static const char text[] = "{\"a\": " NO_LENGTH ",\n \"b\": [1, oops]}";
    json_error_t error;
    CHECK(!mt_json_loadb(text, strlen(text), 0, &error));
    CHECK(error.line == 2 && error.column == 14, "%d:%d: %s", error.line, error.column, error.text);
    static const char unclosed[] = "[" NO_LENGTH ", \"\\";
    CHECK(!mt_json_loadb(unclosed, strlen(unclosed), 0, &error));
}

static void files_as_texts(void)
{
    char path[] = "/tmp/mt-json-XXXXXX";
    int fd = mkstemp(path);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f)
        abort();
    fprintf(f, "{\"long\": \"%0200000d\", \"model_max_length\": " NO_LENGTH "}", 0);
    fclose(f);
    json_error_t error;
    json_t *root = mt_json_load_file(path, 0, &error);
    CHECK(root, "%s", error.text);
    CHECK(json_string_length(json_object_get(root, "long")) == 200000);
    CHECK(json_real_value(json_object_get(root, "model_max_length")) == 1e30);
    json_decref(root);
    unlink(path);
    CHECK(!mt_json_load_file(path, 0, &error) && error.text[0]);
}

int main(void)
{
    RUN(wide_integers_become_reals);
    RUN(all_else_stays);
    RUN(places_in_messages_stay);
    RUN(files_as_texts);
    return check_done();
}
