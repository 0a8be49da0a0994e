# SPDX-License-Identifier: Apache-2.0
"""Mixed text for tokenizers: what their tests are made of. The same seed gives the same text."""
import random
import unicodedata

ENGLISH = """All human beings are born free and equal in dignity and rights. They're endowed with reason
and conscience, and shouldn't act towards one another but in a spirit of brotherhood. Whoever'd say
"I'll do it" or 'WE'VE DONE IT' must've known: it costs $1,234.56 (or 0.5% of 10^6), doesn't it?
The quick brown fox jumps over the lazy dog; HTTPServer2 parses camelCase and snake_case_names.""".split()
CODE = """static int32_t child_of(const trie *t, int32_t node)\n{\n    return t->nodes[node].child;\n}\n
def f(x):\n\treturn {k: v for k, v in x.items() if v != 0x1F}\r\n\r\n#include <stdio.h>\n\n\n
<div class="a b">\n  <!-- c -->&nbsp;</div>\n SELECT * FROM t WHERE a<=3 AND b LIKE '%x%';\n""".split(" ")
CHINESE = "人人生而自由在尊严和权利上一律平等他们赋有理性和良心并应以兄弟关系的精神相对待中文分词测试，。！？、；：“”（）《》"
JAPANESE = "すべての人間は生まれながらにして自由でありカタカナもひらがなも漢字もあるー。、「」"
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다"
ARABIC = "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق ٠١٢٣٤٥٦٧٨٩ وقد وهبوا عقلاً وضميرًا"
HEBREW = "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם שָׁלוֹם"
HINDI = "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है १२३"
THAI = "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน"
GREEK = "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι ΣΊΣΥΦΟΣ ς"
RUSSIAN = "Все люди рождаются свободными и равными в своём достоинстве и правах Ёё Йй"
GERMAN = "Alle Menschen sind frei und gleich an Würde geboren: straße STRASSE ẞ ÄÖÜ naïve café"
TURKISH = "Bütün insanlar hür İstanbul ısı IĞDIR doğarlar"
EMOJI = ["😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "❤️", "☺", "1️⃣", "🧑🏿‍🚀", "🫠"]
MARKS = ["e\u0301", "a\u0328\u0301", "\u0301", "q\u0307\u0323", "\u1100\u1161\u11a8", "Å", "\u212b",
         "\ufb01", "½", "Ⅷ", "①", "ﷺ", "\u0958", "\U0001d15e", "ǆ", "\u0344", "\u1e9b\u0323"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\xa0",
          "\u1680", "\u180e", "\u2000", "\u2009", "\u200b", "\u200d", "\u2028", "\u2029", "\u202f",
          "\u205f", "\u3000", "\ufeff", " \n", "\n ", "\t\t\t", "        "]
ODD = ["\x00", "\x01", "\x7f", "\x1b[0m", "\ufffd", "\ue000", "\uffff", "\U0010ffff", "▁", "▁▁a", "Ġ", "Ċ",
       "<0x0A>", "<unk>", "\u00ad", "٣٤", "²³", "一二三", "...", "!!!???", "------", "=====", "''''", "'S 'Ll"]
BROKEN = [b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80",
          b"a\x80b", b"\xe4\xb8", b"\xfe\xfe"]
ADDED = ["<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|><|im_end|>", "<tool>",
         "<toolbox>", "word", "sword", " strip ", "  <strip>  ", "ṠOFT", "<|eot|>\n", "<|im_", "\n\n\n\n", "S\u0307oft"]


def letters(text, random, low=1, high=12):
    start = random.randrange(len(text))
    return text[start:start + random.randint(low, high)]


def any_char(r):
    """One that every version of Unicode in use knows: libraries differ over those that are new."""
    while True:
        c = chr(r.choice([r.randrange(0x20, 0xd800), r.randrange(0xe000, 0x30000)]))
        if unicodedata.ucd_3_2_0.category(c) != "Cn":
            return c


def fragment(r):
    """A small piece of text of some kind, as bytes."""
    kind = r.random()
    if kind < 0.30:
        return " ".join(r.choice(ENGLISH) for _ in range(r.randint(1, 8))).encode()
    if kind < 0.38:
        return " ".join(r.choice(CODE) for _ in range(r.randint(1, 6))).encode()
    if kind < 0.50:
        return letters(CHINESE, r, 1, 24).encode()
    if kind < 0.72:
        return letters(r.choice([JAPANESE, KOREAN, ARABIC, HEBREW, HINDI, THAI, GREEK, RUSSIAN, GERMAN, TURKISH]),
                       r, 1, 20).encode()
    if kind < 0.76:
        return r.choice(EMOJI).encode()
    if kind < 0.80:
        return r.choice(MARKS).encode()
    if kind < 0.88:
        return r.choice(SPACES).encode()
    if kind < 0.91:
        return r.choice(ODD).encode()
    if kind < 0.93:
        return r.choice(BROKEN)
    if kind < 0.95:
        return str(r.randrange(10 ** r.randint(1, 12))).encode()
    if kind < 0.96:
        return any_char(r).encode()
    if kind < 0.985:
        return r.choice(ADDED).encode()
    return (r.choice(["a", " ", "\n", "中", "é", "-", "😀", "0", "ab", "\t"]) * r.randint(10, 60)).encode()


def text(seed, fragments):
    """Bytes of mixed text; now and then with a space between fragments."""
    r = random.Random(seed)
    return b"".join(fragment(r) + (b" " if r.random() < 0.4 else b"") for _ in range(fragments))


def plain(data):
    """As a tokenizer reads bytes: what is no UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", errors="replace")
