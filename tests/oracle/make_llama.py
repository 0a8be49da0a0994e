#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes fixtures/<case>/: tiny random Llamas and what Hugging Face transformers computes with them.

A development-time tool (needs torch and transformers); the fixtures are committed, so that building
and testing need neither. Each case is a folder as save_pretrained writes it, plus

    expected.safetensors
        ids, targets   int32 [T]      packed documents; target -100: ignored
        doc_starts     int32 [n + 1]
        logits         fp32 [T, vocab]; every document was run by itself, positions from 0
        loss           fp64 [1]       mean over all targets of all documents
        grad.NAME      fp32           gradient of that mean, by the parameter's name
"""
import json
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=12,
             max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)

# name: configuration, lengths of the documents (inputs), and how the weights are saved
CASES = {
    "gqa": (dict(SMALL, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
            [1, 70, 13, 1, 33], {}),
    "mha_tied": (dict(SMALL, vocab_size=101, num_key_value_heads=4, head_dim=8,
                      tie_word_embeddings=True, rms_norm_eps=1e-6,
                      rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
                 [5, 1, 40], dict(bf16=True)),
    "llama3": (dict(SMALL, num_hidden_layers=3, head_dim=16, num_key_value_heads=1,
                    rope_parameters=dict(LLAMA3, rope_theta=10000.0)),
               [48, 1, 41], dict(old_spelling=True)),
    "biases": (dict(SMALL, attention_bias=True, mlp_bias=True,
                    rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
               [9, 1, 24], {}),
    "linear_sharded": (dict(SMALL, rope_parameters=dict(rope_type="linear", factor=4.0,
                                                        rope_theta=10000.0)),
                       [1, 37, 8], dict(shards="48KB")),
    "yarn": (dict(SMALL, head_dim=16, rope_parameters=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)),
        [40, 1, 19], {}),
}


def randomise(model, generator):
    """Weights large enough that attention is far from uniform and no gradient is near zero."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("norm.weight"):
            p.data = 1 + 0.2 * noise
        elif name.endswith(".bias"):
            p.data = 0.3 * noise
        elif "embed_tokens" in name:
            p.data = 0.5 * noise
        else:
            p.data = 0.2 * noise


def old_spelling(folder):
    """config.json as older releases wrote it: rope_theta and rope_scaling side by side."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def documents(lengths, vocab, generator):
    """Ids and targets of every document; the longest one has its first third masked."""
    out = []
    for n in lengths:
        tokens = torch.randint(0, vocab, (n + 1,), generator=generator)
        targets = tokens[1:].clone()
        if n == max(lengths):
            targets[: n // 3] = -100
        out.append((tokens[:-1], targets))
    return out


def expected(model, docs):
    n_targets = sum(int((t >= 0).sum()) for _, t in docs)
    logits, total = [], 0.0
    model.zero_grad()
    for ids, targets in docs:
        out = model(input_ids=ids[None], use_cache=False).logits[0].float()
        loss = F.cross_entropy(out, targets, reduction="sum", ignore_index=-100)
        (loss / n_targets).backward()
        total += loss.item()
        logits.append(out.detach())
    starts = [0]
    for ids, _ in docs:
        starts.append(starts[-1] + len(ids))
    tensors = {
        "ids": torch.cat([d[0] for d in docs]).int(),
        "targets": torch.cat([d[1] for d in docs]).int(),
        "doc_starts": torch.tensor(starts, dtype=torch.int32),
        "logits": torch.cat(logits).contiguous(),
        "loss": torch.tensor([total / n_targets], dtype=torch.float64),
    }
    for name, p in model.named_parameters():
        tensors["grad." + name] = p.grad.contiguous()
    return tensors


def make(root, index, name, values, lengths, how):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(1000 + index)
    config = LlamaConfig(**values)
    model = LlamaForCausalLM(config).float()
    randomise(model, generator)
    if how.get("bf16"):
        model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=how.get("shards", "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if how.get("old_spelling"):
        old_spelling(folder)

    # What is expected comes from the files, so that these are what both sides read.
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                             attn_implementation="eager")
    model.eval()
    docs = documents(lengths, config.vocab_size, generator)
    tensors = expected(model, docs)
    save_file(tensors, folder / "expected.safetensors")
    shards = sorted(p.name for p in folder.glob("model*.safetensors"))
    print(f"{name:15} loss {tensors['loss'].item():.6f}  parameters "
          f"{sum(p.numel() for p in model.parameters())}  files {len(shards)}  "
          f"largest logit {tensors['logits'].abs().max():.2f}  smallest gradient "
          f"{min(t.abs().max() for n, t in tensors.items() if n.startswith('grad.')):.2e}")
    stored = load_file(folder / shards[0])
    assert all(t.dtype == (torch.bfloat16 if how.get("bf16") else torch.float32)
               for t in stored.values())
    assert bool(how.get("shards")) == (len(shards) in (2, 3)), shards


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = pathlib.Path(__file__).parent / "fixtures"
    only = sys.argv[1:]
    for index, (name, case) in enumerate(CASES.items()):
        if not only or name in only:
            make(root, index, name, *case)


if __name__ == "__main__":
    main()
