#pragma once
// Transformers' tensors in Hugging Face's files: other names, another order of a weight's elements.
//
//   model  in Topknot, {out, in}                     in the file
//   gpt    wte.weight, wpe.weight, ln_f.*            the same
//          h.N.ln_1.*, h.N.ln_2.*                    the same
//          h.N.attn.c_attn, h.N.attn.c_proj,         the same names; weights [in, out] (as Conv1D has),
//          h.N.mlp.c_fc, h.N.mlp.c_proj              biases the same
//          (wte.weight)                              lm_head.weight, in nanoGPT's files: left out if it
//                                                    has wte.weight's bytes
//          -                                         h.N.attn.bias, h.N.attn.masked_bias (masks): left out
//   llama  embed_tokens.weight, norm.weight          the same
//          layers.N.{input,post_attention}_layernorm the same
//          layers.N.self_attn.qkv_proj.weight        q_proj, k_proj, v_proj, one below the other
//          layers.N.self_attn.o_proj.weight          the same
//          layers.N.mlp.gate_up_proj.weight          gate_proj, up_proj, one below the other
//          layers.N.mlp.down_proj.weight             the same
//          lm_head.weight                            the same, without the prefix
//          -                                         layers.N.self_attn.rotary_emb.inv_freq: left out
//
// In the file names may begin with "transformer." (gpt), "model." (llama), as *LMHeadModel and *ForCausalLM
// write them, or have no prefix. Of a GPT-2's file the shape of h.0.attn.c_attn.weight tells the order of all
// four weights of its layers: [w, 3 w] is Conv1D's, [3 w, w] linear layers' (nanoGPT's and our own files).

#include <cstddef>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "train/checkpoint/safetensors.h"

namespace topknot {

struct NamedTensors {
  std::vector<TensorView> tensors;            // of what was given, or of `memory`
  std::deque<std::vector<std::byte>> memory;  // of those that were moved or widened
};

// A file's tensors without what PyTorch's wrappers add to names, in any order: "_orig_mod" of torch.compile and
// its like wherever it stands, "module." of DistributedDataParallel and "model." of Lightning before it. Names
// of `known` (sorted), and such that two tensors would then have, stay as they are.
std::vector<TensorView> without_wrappers(std::span<const TensorView> tensors,
                                         std::span<const std::string> known);

// A file's tensors under Topknot's names and in its order; BF16 becomes F32. Tensors of other models, and
// such that the table does not know, stay as they are.
NamedTensors from_hugging_face(std::span<const TensorView> tensors);

// A model's tensors (model_tensors()) as Hugging Face's *LMHeadModel and *ForCausalLM have them. Throws
// UserError if they are of a model without a table.
NamedTensors to_hugging_face(std::span<const TensorView> tensors);

// Reads gpt's or llama's keys from `text`, a Hugging Face config.json: {"model.heads", "12"}, ... Throws
// UserError, which names `where`, for text that is no JSON object, another model_type, and features that
// Topknot does not compute (rope_scaling, another activation).
std::map<std::string, std::string> keys_from_hugging_face(const std::string& text, const std::string& where);

}  // namespace topknot
