#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes fixtures/<family>/<case>/: tiny random models and what Hugging Face transformers computes.

A development-time tool (needs torch and transformers 5); the fixtures are committed, so that
building and testing need neither. Usage: make_fixtures.py [FAMILY | FAMILY/CASE]...

Each case is a folder as save_pretrained writes it, in some cases rewritten to an older spelling, plus

    expected.safetensors
        ids, targets   int32 [T]      packed documents; target -100: ignored
        doc_starts     int32 [n + 1]
        logits         fp32 [T, vocab]; every document was run by itself, positions from 0
        loss           fp64 [1]       mean over all targets of all documents
        grad.NAME      fp32           gradient of that mean, by the parameter's name and in its
                                      shape: experts' matrices are [out, in], gate over up
    and where the routers' auxiliary loss is asked for (output_router_logits)
        aux_loss       fp64 [1]       its mean over micro-batches, weighted by their targets, times
                                      router_aux_loss_coef; grad.NAME is of the sum of both
        micro_starts   int32 [m]      the documents that begin a micro-batch

Only eager attention is a valid reference: others drop soft caps.
"""
import json
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (AutoConfig, AutoModelForCausalLM, DeepseekV2Config, LlamaConfig,
                          LlamaForCausalLM)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=12,
             max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)

# head_dim is not hidden / heads; the window is shorter than most documents.
TINY = dict(vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
            max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=None)
DOCUMENTS = [1, 31, 7, 18]


def rope(theta=10000.0, rope_type="default", **more):
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=theta, **more))


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
# The bounds of the ramp are 0.4 and 4.0, which matters because they are not made whole.
FRACTIONAL = dict(YARN, beta_fast=2.0, beta_slow=0.25, truncate=False)
# Positions go beyond the 16 of the training before; the norms of the latents ignore rms_norm_eps.
MLA = dict({k: v for k, v in TINY.items() if k != "head_dim"},
           num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=10, q_lora_rank=9,
           qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=7, n_routed_experts=8,
           n_shared_experts=2, moe_intermediate_size=6, num_experts_per_tok=3,
           first_k_dense_replace=1)
BEYOND = [1, 60, 17]
# In heads of few columns some norm of q, k or o is so small that dividing by it shows the rounding
# of the reference itself.
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=20,
             linear_value_head_dim=18)
# A coefficient with which the routers' gradients are largely those of the auxiliary loss.
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.7)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# family/case: model_type, configuration, lengths of the documents (inputs), how it is written:
#     bf16            the weights are stored in BF16
#     shards          at most so many bytes a file
#     config          a function that rewrites config.json
#     fused           all experts of a layer in one tensor, in place of one each
#     mxfp4           the experts' matrices are quantised, as GPT-OSS is released
#     micro           with output_router_logits: the documents that begin a micro-batch
#     predict         layers for multi-token prediction follow the last one
#     wrap            (model_type, prefix): the language model of a multi-modal one
CASES = {
    "llama/gqa": ("llama", dict(SMALL, **rope()), [1, 70, 13, 1, 33], {}),
    "llama/mha_tied": ("llama", dict(SMALL, vocab_size=101, num_key_value_heads=4, head_dim=8,
                                     tie_word_embeddings=True, rms_norm_eps=1e-6,
                                     **rope(500000.0)),
                       [5, 1, 40], dict(bf16=True)),
    "llama/llama3": ("llama", dict(SMALL, num_hidden_layers=3, head_dim=16, num_key_value_heads=1,
                                   **rope(10000.0, "llama3", **LLAMA3)),
                     [48, 1, 41], dict(config="v4")),
    "llama/biases": ("llama", dict(SMALL, attention_bias=True, mlp_bias=True, **rope()),
                     [9, 1, 24], {}),
    "llama/linear_sharded": ("llama", dict(SMALL, **rope(10000.0, "linear", factor=4.0)),
                             [1, 37, 8], dict(shards="48KB")),
    "llama/yarn": ("llama", dict(SMALL, head_dim=16,
                                 **rope(10000.0, "yarn", factor=4.0,
                                        original_max_position_embeddings=64)),
                   [40, 1, 19], {}),
    "mistral/v0.1": ("mistral", dict(TINY, sliding_window=6, **rope()), DOCUMENTS,
                     dict(bf16=True, config="v4")),
    "mistral/nemo": ("mistral", dict(TINY, sliding_window=None, head_dim=10, **rope(1e6)), DOCUMENTS,
                     dict(bf16=True)),
    "mistral/small3.1": ("mistral", dict(TINY, sliding_window=None, num_key_value_heads=1,
                                         **rope(1e5)), DOCUMENTS,
                         dict(bf16=True, wrap=("mistral3", "language_model."))),
    "mistral/ministral": ("ministral", dict(TINY, sliding_window=5, num_hidden_layers=3,
                                            layer_types=MIXED, **rope(1e6)), DOCUMENTS,
                          dict(bf16=True)),
    "mistral/ministral3": ("ministral3", dict(TINY, sliding_window=None,
                                              **rope(10000.0, **YARN, beta_fast=32.0, beta_slow=1.0,
                                                     mscale=1.0, mscale_all_dim=1.0,
                                                     llama_4_scaling_beta=0.3)),
                           [1, 60, 17], dict(bf16=True)),
    "qwen/qwen2": ("qwen2", dict(TINY, num_hidden_layers=3, use_sliding_window=True,
                                 sliding_window=6, max_window_layers=1, tie_word_embeddings=True,
                                 **rope(1e6)), DOCUMENTS,
                   dict(bf16=True, config="without layer_types")),
    "qwen/qwen2.5_yarn": ("qwen2", dict(TINY, use_sliding_window=False, sliding_window=4,
                                        max_window_layers=1, **rope(10000.0, **YARN)), [1, 60, 17],
                          dict(bf16=True, config="v4")),
    "qwen/qwen3": ("qwen3", dict(TINY, tie_word_embeddings=True, **rope(1e6)), DOCUMENTS,
                   dict(bf16=True)),
    "qwen/qwen3_biases": ("qwen3", dict(TINY, num_hidden_layers=3, attention_bias=True,
                                        use_sliding_window=True, sliding_window=5,
                                        layer_types=MIXED, **rope(1e6)), DOCUMENTS,
                          dict(bf16=True)),
    "gemma/gemma": ("gemma", dict(TINY, num_key_value_heads=1, hidden_act="gelu_pytorch_tanh",
                                  **rope()), DOCUMENTS,
                    dict(bf16=True, config="gemma 1")),
    "gemma/gemma2": ("gemma2", dict(TINY, num_hidden_layers=4, sliding_window=6,
                                    query_pre_attn_scalar=5, attn_logit_softcapping=2.0,
                                    final_logit_softcapping=3.0, **rope()), DOCUMENTS,
                     dict(bf16=True, config="without layer_types")),
    "gemma/gemma3_v4": ("gemma3_text", dict(
        TINY, num_hidden_layers=6, sliding_window=6, sliding_window_pattern=3,
        query_pre_attn_scalar=11, rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=100000.0),
            sliding_attention=dict(rope_type="default", rope_theta=500.0))), DOCUMENTS,
        dict(bf16=True, config="gemma 3 v4", wrap=("gemma3", "language_model."))),
    "gemma/gemma3_v5": ("gemma3_text", dict(
        TINY, num_hidden_layers=4, num_key_value_heads=1, sliding_window=5, attention_bias=True,
        final_logit_softcapping=5.0,
        layer_types=MIXED + ["full_attention"], rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=2.0, rope_theta=20000.0),
            sliding_attention=dict(rope_type="default", rope_theta=700.0))), DOCUMENTS,
        dict(bf16=True)),
    "mistral/mixtral": ("mixtral", dict(TINY, intermediate_size=8, sliding_window=7,
                                        num_local_experts=5, num_experts_per_tok=2, **rope(1e6)),
                        DOCUMENTS, dict(bf16=True)),
    "qwen/qwen2_moe": ("qwen2_moe", dict(TINY, num_hidden_layers=3, num_experts=6,
                                         num_experts_per_tok=2, moe_intermediate_size=6,
                                         shared_expert_intermediate_size=10, mlp_only_layers=[1],
                                         use_sliding_window=True, sliding_window=5,
                                         max_window_layers=2, **rope(1e6)), DOCUMENTS,
                       dict(bf16=True, config="without layer_types")),
    "qwen/qwen3_moe": ("qwen3_moe", dict(TINY, num_experts=6, num_experts_per_tok=3,
                                         moe_intermediate_size=6, norm_topk_prob=True,
                                         **rope(1e6)), DOCUMENTS, dict(bf16=True)),
    "qwen/qwen3_moe_fused": ("qwen3_moe", dict(TINY, num_hidden_layers=3, num_experts=4,
                                               num_experts_per_tok=2, moe_intermediate_size=6,
                                               decoder_sparse_step=2, attention_bias=True,
                                               use_sliding_window=True, sliding_window=6,
                                               **rope(1e6)), DOCUMENTS,
                             dict(bf16=True, fused=True)),
    # Documents longer than a chunk of 64 tokens, and of one token.
    "qwen/qwen3_next": ("qwen3_next", dict(TINY, num_hidden_layers=3, num_experts=6,
                                           num_experts_per_tok=2, moe_intermediate_size=6,
                                           shared_expert_intermediate_size=10, mlp_only_layers=[2],
                                           full_attention_interval=2, **DELTA, **rope(1e6, partial_rotary_factor=0.25)),
                        [1, 70, 7], dict(bf16=True, config="hybrid")),
    "qwen/qwen3_next_biases": ("qwen3_next", dict(
        TINY, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
        decoder_sparse_step=2, moe_intermediate_size=6, shared_expert_intermediate_size=4,
        attention_bias=True, layer_types=["full_attention", "linear_attention"],
        linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=5,
        linear_value_head_dim=7, linear_conv_kernel_dim=2,
        **rope(1e4, partial_rotary_factor=0.5)), DOCUMENTS, dict(bf16=True, fused=True)),
    "qwen/qwen3_5": ("qwen3_5_text", dict(TINY, num_hidden_layers=2, tie_word_embeddings=True,
                                          full_attention_interval=2, **DELTA, **rope(1e6, partial_rotary_factor=0.25)),
                     [66, 1, 9], dict(bf16=True, wrap=("qwen3_5", "model.language_model."))),
    "qwen/qwen3_5_moe": ("qwen3_5_moe_text", dict(
        {k: v for k, v in TINY.items() if k != "intermediate_size"}, num_hidden_layers=3,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=6,
        shared_expert_intermediate_size=10,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **DELTA, **rope(1e6, partial_rotary_factor=0.25)), DOCUMENTS,
        dict(bf16=True, fused=True, wrap=("qwen3_5_moe", "model.language_model."))),
    "gpt_oss/bf16": ("gpt_oss", dict(TINY, intermediate_size=10, num_hidden_layers=3, head_dim=16,
                                     sliding_window=6, num_local_experts=5, num_experts_per_tok=2,
                                     swiglu_limit=0.9, **rope(100.0, **FRACTIONAL)), DOCUMENTS,
                     dict(bf16=True)),
    "gpt_oss/mxfp4": ("gpt_oss", dict(TINY, hidden_size=32, intermediate_size=32, head_dim=16,
                                      num_key_value_heads=1, sliding_window=5, num_local_experts=4,
                                      num_experts_per_tok=3, swiglu_limit=1.5,
                                      layer_types=MIXED[1:], **rope(100.0, **FRACTIONAL)),
                      DOCUMENTS, dict(bf16=True, config="gpt_oss release", mxfp4=True)),
    # Not in transformers; built from its Llama and the experts of deepseek_v2, which are the same.
    "deepseek/moe": ("deepseek", dict(TINY, num_hidden_layers=3, num_key_value_heads=4, head_dim=6,
                                      n_routed_experts=6, n_shared_experts=2,
                                      num_experts_per_tok=2, moe_intermediate_size=6,
                                      first_k_dense_replace=1, **rope()), DOCUMENTS,
                     dict(bf16=True)),
    "deepseek/v2_lite": ("deepseek_v2", dict(MLA, q_lora_rank=None, n_group=1, topk_group=1,
                                             **rope(10000.0, **YARN, mscale=0.707,
                                                    mscale_all_dim=0.707)), BEYOND,
                         dict(bf16=True, config="v4")),
    "deepseek/v2": ("deepseek_v2", dict(MLA, topk_method="group_limited_greedy", n_group=4,
                                        topk_group=2, routed_scaling_factor=3.0,
                                        attention_bias=True, mlp_bias=True,
                                        **rope(10000.0, **YARN, mscale=1.0, mscale_all_dim=0.5)),
                    BEYOND, dict(bf16=True)),
    "deepseek/v3": ("deepseek_v3", dict(MLA, n_shared_experts=1, n_group=4, topk_group=2,
                                        num_mtp_layers=1,
                                        **rope(10000.0, **YARN, mscale=1.0, mscale_all_dim=1.0)),
                    BEYOND, dict(bf16=True, config="v4", predict=True)),
    "deepseek/v3_fused": ("deepseek_v3", dict(MLA, q_lora_rank=None, n_group=1, topk_group=1,
                                              norm_topk_prob=False, routed_scaling_factor=1.5,
                                              rope_interleave=False, attention_bias=True,
                                              **rope()), DOCUMENTS, dict(bf16=True, fused=True)),
    # Last, so that the draws of the others stay as they are.
    "mistral/mixtral_balanced": ("mixtral", dict(TINY, intermediate_size=8, sliding_window=None,
                                                 num_local_experts=5, num_experts_per_tok=2,
                                                 **BALANCED, **rope(1e6)),
                                 DOCUMENTS, dict(bf16=True, micro=[0])),
    "qwen/qwen2_moe_balanced": ("qwen2_moe", dict(TINY, num_hidden_layers=3, num_experts=6,
                                                  num_experts_per_tok=2, moe_intermediate_size=6,
                                                  shared_expert_intermediate_size=10,
                                                  mlp_only_layers=[1], **BALANCED, **rope(1e6)),
                                DOCUMENTS, dict(bf16=True, micro=[0, 2])),
    "qwen/qwen3_next_balanced": ("qwen3_next", dict(TINY, num_hidden_layers=2, num_experts=6,
                                                    num_experts_per_tok=2, moe_intermediate_size=6,
                                                    shared_expert_intermediate_size=10,
                                                    full_attention_interval=2, **DELTA, **BALANCED,
                                                    **rope(1e6, partial_rotary_factor=0.25)),
                                 DOCUMENTS, dict(bf16=True, micro=[0])),
    "gpt_oss/balanced": ("gpt_oss", dict(TINY, intermediate_size=10, head_dim=16, sliding_window=6,
                                         num_local_experts=5, num_experts_per_tok=2,
                                         swiglu_limit=0.9, **BALANCED, **rope(100.0, **FRACTIONAL)),
                         DOCUMENTS, dict(bf16=True, micro=[0, 1, 3])),
}


def deepseek_moe(values):
    """DeepSeek-MoE: Llama's attention with experts in place of most MLPs."""
    llama = LlamaConfig(**values, attn_implementation="eager")
    moe = DeepseekV2Config(**values, experts_implementation="eager")
    model = LlamaForCausalLM(llama)
    for layer in model.model.layers[values["first_k_dense_replace"]:]:
        layer.mlp = DeepseekV2Moe(moe)
    model.values = values
    return model


def save_deepseek_moe(model, folder):
    folder.mkdir(parents=True)
    config = dict(model.values, model_type="deepseek", architectures=["DeepseekForCausalLM"],
                  torch_dtype="bfloat16", scoring_func="softmax", norm_topk_prob=False,
                  aux_loss_alpha=0.001, seq_aux=True, moe_layer_freq=1, hidden_act="silu")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {}
    for name, t in model.state_dict().items():
        layer = name.rpartition("experts.")[0]
        for e, matrix in enumerate(t if ".mlp.experts." in name else []):
            parts = dict(down_proj=matrix) if name.endswith("down_proj") else dict(
                zip(("gate_proj", "up_proj"), matrix.chunk(2)))
            for part, value in parts.items():
                tensors[f"{layer}experts.{e}.{part}.weight"] = value.contiguous()
        if ".mlp.experts." not in name:
            tensors[name] = t
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))


def load(folder, values):
    if (folder / "config.json").read_text().find('"deepseek"') < 0:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                    attn_implementation="eager",
                                                    experts_implementation="eager").eval()
    model = deepseek_moe(values)
    tensors = load_file(folder / "model.safetensors")
    for name in model.state_dict():
        if ".mlp.experts." not in name:
            continue
        layer = name.rpartition("experts.")[0]
        parts = ["down_proj"] if name.endswith("down_proj") else ["gate_proj", "up_proj"]
        tensors[name] = torch.stack([
            torch.cat([tensors.pop(f"{layer}experts.{e}.{part}.weight") for part in parts])
            for e in range(values["n_routed_experts"])])
    model.load_state_dict(tensors)
    return model.float().eval()


def randomise(model, generator):
    """Weights large enough that attention is far from uniform and no gradient is near zero."""
    one_plus = model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("norm.weight"):
            p.data = (0 if one_plus and "linear_attn" not in name else 1) + 0.2 * noise
        elif name.endswith(("A_log", "dt_bias", "conv1d.weight")):
            p.data = 0.5 * noise
        elif name.endswith("sinks"):
            p.data = noise
        elif name.endswith("bias"):
            p.data = 0.3 * noise
        elif "embed_tokens" in name:
            p.data = (0.1 if one_plus else 0.5) * noise
        else:
            p.data = 0.2 * noise
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.copy_(0.1 * torch.randn(b.shape, generator=generator))


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def quantise(model):
    """Rounds the experts' matrices to MXFP4: {NAME_blocks, NAME_scales}, and the model's own are
    what these stand for."""
    codes = torch.tensor(E2M1 + [-v for v in E2M1])
    packed = {}
    for name, p in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            w = p.data.transpose(1, 2)  # (out, in)
            groups = w.reshape(*w.shape[:2], -1, 32)
            scale = groups.abs().amax(-1).log2().floor() - 2
            unit = torch.exp2(scale)[..., None]
            code = ((groups / unit)[..., None] - codes).abs().argmin(-1)
            packed[name + "_blocks"] = (code[..., 0::2] + 16 * code[..., 1::2]).byte()
            packed[name + "_scales"] = (scale + 127).byte()
            p.data = (codes[code] * unit).reshape(w.shape).transpose(1, 2).contiguous()
            theirs = convert_moe_packed_tensors(packed[name + "_blocks"],
                                                packed[name + "_scales"], dtype=torch.float32)
            assert torch.equal(theirs, p.data), name
    return packed


def release_quantised(folder, packed):
    weights = load_file(folder / "model.safetensors")
    for name, value in packed.items():
        weights.pop(name.removesuffix("_blocks"), None)
        weights[name] = value
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn",
                                                      "model.layers.*.mlp.router",
                                                      "model.embed_tokens", "lm_head"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def v4(config):
    """As releases before transformers 5 wrote it: rope_theta and rope_scaling side by side."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype")


def gpt_oss_release(config):
    types = config["layer_types"]
    v4(config)
    config["layer_types"] = types
    for key in ("swiglu_alpha", "num_experts"):
        config.pop(key, None)
    config["initial_context_length"] = 16
    config["experts_per_token"] = config["num_experts_per_tok"]


def hybrid(config):
    """As Qwen3-Next is released."""
    v4(config)
    config["partial_rotary_factor"] = 0.25
    config["full_attention_interval"] = 2


def without_layer_types(config):
    del config["layer_types"]


def gemma1(config):
    """The released spelling of the activation, which means its tanh form."""
    v4(config)
    config["hidden_act"] = "gelu"
    config["hidden_activation"] = None
    del config["tie_word_embeddings"]


def gemma3_v4(config):
    ropes = config.pop("rope_parameters")
    del config["layer_types"]
    config["rope_theta"] = ropes["full_attention"].pop("rope_theta")
    config["rope_scaling"] = ropes["full_attention"]
    config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    config["sliding_window_pattern"] = 3
    for key in ("tie_word_embeddings", "attn_logit_softcapping"):
        del config[key]
    config["final_logit_softcapping"] = None


REWRITES = {"v4": v4, "without layer_types": without_layer_types, "gemma 1": gemma1,
            "gemma 3 v4": gemma3_v4, "hybrid": hybrid, "gpt_oss release": gpt_oss_release}


def wrap(folder, model_type, prefix):
    """The files of a multi-modal release that holds the language model."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    whole = {"architectures": [model_type.capitalize() + "ForConditionalGeneration"],
             "model_type": model_type, "text_config": config, "vision_config": {"hidden_size": 8}}
    config.pop("architectures")
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
    inner = prefix.startswith("model.")  # in place of "model.", not before it
    weights = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not inner:
            name = prefix + name
        elif name.startswith("model."):
            name = prefix + name.removeprefix("model.")
        weights[name] = value
    if inner:
        weights["model.visual.patch_embed.proj.weight"] = torch.ones(2, 3, dtype=torch.bfloat16)
        weights["mtp.fc.weight"] = torch.ones(3, 2, dtype=torch.bfloat16)
    else:
        weights["vision_tower.patch_embedding.weight"] = torch.ones(2, 3, dtype=torch.bfloat16)
        weights["multi_modal_projector.linear.weight"] = torch.ones(3, 2, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))


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


def unpacked(config, name, value):
    """Qwen3-Next's projections, packed by key head, as Qwen 3.5 has them: {name: value}."""
    heads = config.linear_num_key_heads
    group = config.linear_num_value_heads // heads
    k, v = config.linear_key_head_dim, group * config.linear_value_head_dim
    widths = [k, k, v, v] if "qkvz" in name else [group, group]
    parts = [p.flatten(0, 1) for p in value.unflatten(0, (heads, -1)).split(widths, dim=1)]
    if "qkvz" in name:
        parts = [torch.cat(parts[:3]), parts[3]]
    ends = ("in_proj_qkv", "in_proj_z") if "qkvz" in name else ("in_proj_b", "in_proj_a")
    start = name.partition("in_proj")[0]
    return {f"{start}{end}.weight": p.contiguous() for end, p in zip(ends, parts)}


def as_parameter(model, name, value):
    """GPT-OSS's experts, (in, out) with gate and up in turn, as the others are: gate over up; and
    a convolution's weight without its middle dimension."""
    if name.endswith("conv1d.weight"):
        value = value.squeeze(1)
    if model.config.model_type == "gpt_oss" and ".experts." in name:
        if not name.endswith("_bias"):
            value = value.transpose(1, 2)
        if "gate_up" in name:
            value = torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)
    return value.contiguous()


def balance_loss(model, router_logits):
    """transformers' loss of a forward call with these logits, one tensor a layer."""
    config = model.config
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return config.router_aux_loss_coef * function(router_logits, model.num_experts,
                                                  config.num_experts_per_tok)


def check_balance(model, ids, targets):
    """What is expected of one document is the loss that transformers reports."""
    with torch.no_grad():
        out = model(input_ids=ids[None], labels=targets[None], shift_labels=targets[None],
                    use_cache=False)
        loss = F.cross_entropy(out.logits[0].float(), targets, ignore_index=-100)
        torch.testing.assert_close(out.loss, loss + balance_loss(model, out.router_logits))


def expected(model, docs, micro=None):
    n_targets = sum(int((t >= 0).sum()) for _, t in docs)
    logits, total, aux_total = [], 0.0, 0.0
    begins = micro or list(range(len(docs)))
    model.zero_grad()
    for first, end in zip(begins, begins[1:] + [len(docs)]):
        loss, routers, n = 0.0, [], 0
        for ids, targets in docs[first:end]:
            out = model(input_ids=ids[None], use_cache=False)
            logits.append(out.logits[0].detach().float())
            loss = loss + F.cross_entropy(out.logits[0].float(), targets, reduction="sum",
                                          ignore_index=-100)
            n += int((targets >= 0).sum())
            routers.append(out.router_logits if micro else ())
        total += loss.item()
        if micro:
            layers = tuple(torch.cat(layer) for layer in zip(*routers))
            aux = n * balance_loss(model, layers)
            aux_total += aux.item()
            loss = loss + aux
        (loss / n_targets).backward()
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
    if micro:
        tensors["aux_loss"] = torch.tensor([aux_total / n_targets], dtype=torch.float64)
        tensors["micro_starts"] = torch.tensor(micro, dtype=torch.int32)
    for name, p in model.named_parameters():
        whole = {name: as_parameter(model, name, p.grad)}
        if name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight")):
            whole = unpacked(model.config, name, p.grad)
        tensors.update({"grad." + n: g for n, g in whole.items()})
    return tensors


def margin(model, docs):
    """The smallest distance, in probability, of a picked expert from one that was not."""
    found = [1.0]

    def gap(p, k):
        p = p.sort(-1, descending=True).values
        if k < p.shape[-1]:
            found.append((p[:, k - 1] - p[:, k]).min().item())

    def look(module, args, out):
        bias = getattr(module, "e_score_correction_bias", None)
        p = out[0].float().softmax(-1) if bias is None else out[0].float().sigmoid() + bias
        if bias is not None or getattr(module, "topk_method", "greedy") != "greedy":
            groups = p.view(p.shape[0], module.num_group, -1)
            best = groups.topk(1 if bias is None else 2).values.sum(-1)
            gap(best, module.topk_group)
            picked = best.topk(module.topk_group).indices
            p = groups.gather(1, picked[..., None].expand(-1, -1, groups.shape[-1])).flatten(1)
        gap(p, module.top_k)

    hooks = [m.register_forward_hook(look) for m in model.modules()
             if type(m).__name__.lower().endswith("topkrouter")]
    assert hooks or not hasattr(model.config, "num_experts_per_tok")
    expected(model, docs)
    for hook in hooks:
        hook.remove()
    return min(found)


def make(root, index, name, *case):
    """Draws anew until no router is so close to a tie that rounding decides."""
    for attempt in range(100):
        if try_make(root, index + 100 * attempt, name, *case):
            return
    raise RuntimeError(name + ": every draw has a router near a tie")


def try_make(root, index, name, model_type, values, lengths, how):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(1000 + index)
    if model_type == "deepseek":
        model = deepseek_moe(values)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    model.float()
    randomise(model, generator)
    packed = quantise(model) if how.get("mxfp4") else {}
    if how.get("bf16"):
        model.to(torch.bfloat16)
    if model_type == "deepseek":
        save_deepseek_moe(model, folder)
    else:
        model.save_pretrained(folder, max_shard_size=how.get("shards", "1GB"),
                              save_original_format=not how.get("fused"))
    (folder / "generation_config.json").unlink(missing_ok=True)

    # What is expected comes from the files, so that these are what both sides read.
    model = load(folder, values)
    docs = documents(lengths, model.config.vocab_size, generator)
    if margin(model, docs) < 1e-3:
        return False
    assert how.get("micro") or not getattr(model.config, "output_router_logits", False)
    if how.get("micro"):
        check_balance(model, *max(docs, key=lambda d: len(d[0])))
    tensors = expected(model, docs, how.get("micro"))
    save_file(tensors, folder / "expected.safetensors")
    if how.get("config"):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        REWRITES[how["config"]](config)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        # The older spelling must mean the same to the reference.
        assert torch.equal(expected(load(folder, values), docs)["logits"], tensors["logits"]), name
    if how.get("predict"):
        weights = load_file(folder / "model.safetensors")
        layer = f"model.layers.{values['num_hidden_layers']}."
        for name, t in list(weights.items()):
            if name.startswith("model.layers.1.") or "embed_tokens" in name:
                weights[layer + name.split(".", 3 if "layers" in name else 1)[-1]] = t * 2
        weights[layer + "eh_proj.weight"] = torch.ones(2, 4, dtype=torch.bfloat16)
        save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    if how.get("wrap"):
        wrap(folder, *how["wrap"])
    if packed:
        release_quantised(folder, packed)
    shards = sorted(p.name for p in folder.glob("model*.safetensors"))
    grads = [t.abs().max() for n, t in tensors.items() if n.startswith("grad.")]
    print(f"{name:20} loss {tensors['loss'].item():.6f}  parameters "
          f"{sum(p.numel() for p in model.parameters())}  files {len(shards)}  "
          f"largest logit {tensors['logits'].abs().max():.2f}  smallest gradient {min(grads):.2e}")
    stored = load_file(folder / shards[0])
    assert all(t.dtype == (torch.bfloat16 if how.get("bf16") else torch.float32)
               for n, t in stored.items() if n not in packed)
    assert bool(how.get("shards")) == (len(shards) in (2, 3)), shards
    return True


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = pathlib.Path(__file__).parent / "fixtures"
    only = sys.argv[1:]
    for index, (name, case) in enumerate(CASES.items()):
        if not only or name in only or name.split("/")[0] in only:
            make(root, index, name, *case)


if __name__ == "__main__":
    main()
