// Decoder-only transformers. Parameters have the names of Hugging Face's files without the prefix
// ("transformer.", "model."), weights {out, in}; train/checkpoint/model_names.h has the whole table.
//
// gpt: GPT-2 (Radford, Wu, Child, Luan, Amodei, Sutskever, "Language models are unsupervised multitask
// learners", 2019, section 2.3): learned positions, layer norm before each branch and at the end, GELU, the
// output layer tied to the embedding. First values as Hugging Face's: N(0, 0.02), the layers that end a
// branch N(0, 0.02 / sqrt(2 layers)), biases 0. model.bias=false, model.gelu=exact: nanoGPT's.
//
// llama: Touvron et al., arXiv 2302.13971, section 2.2: RMS norm, SwiGLU, rotary positions, no biases;
// grouped key-value heads as Llama 2's (arXiv 2307.09288, section 2.2). First values N(0, 0.02).
//
// With w = width, L layers, a sequence of T tokens and V classes a token takes 24 w^2 L operations in gpt's
// products (2 ((2 + 2 kv_heads / heads) w^2 + 3 w feed_forward) L in llama's), 2 V w in the output layer and
// 2 T w L in causal attention; three times that with the gradients.
#include <fmt/format.h>

#include <cmath>
#include <optional>

#include "nn/base/check.h"
#include "nn/models/model.h"
#include "nn/ops/ops.h"

namespace topknot {
namespace {

constexpr float kInitStd = 0.02f;
constexpr std::int64_t kMostOfRope = 512;  // elements of a head, of rope()

Initializer normal(float std) {
  return [std](std::span<float> values, const CounterRng& rng) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = std * rng.normal(i);
  };
}

const Option kHeads{"heads", 4, "heads of attention; they divide model.width", 1, 1e4};
const Option kKvHeads{"kv_heads", 0, "heads of keys and values; they divide model.heads; 0: as many", 0, 1e4};
const Option kFeedForward{
    "feed_forward", 0,
    "width of the feed-forward layers; 0: 4 model.width in gpt, 8/3 to a multiple of 256 in llama", 0, 1e6};
const Option kBias{"bias", true, "linear layers and norms have biases; false: as nanoGPT's"};
const Option kGelu{.name = "gelu",
                   .standard = "tanh",
                   .help = "GELU by tanh, as GPT-2's, or exact, as nanoGPT's",
                   .choices = {"tanh", "exact"}};
const Option kNormEpsilon{"norm_epsilon", 1e-5, "added to the variance in norms", 0, 1, /*above=*/true};
const Option kRopeBase{"rope_base", 1e4, "base of the rotary positions' angles", 1, 1e9, /*above=*/true};

// Throws UserError for keys that do not go together.
struct Sizes {
  explicit Sizes(const ModelOptions& options)
      : tokens(options.outputs),
        width(options.get<int>(option::width)),
        heads(options.get<int>(kHeads)),
        kv_heads(options.get<int>(kKvHeads)),
        window(options.input[0]),
        context(options.get<int>(option::context)) {
    if (kv_heads == 0) kv_heads = heads;
    if (context == 0) context = window;
    if (width % heads != 0)
      throw UserError(fmt::format("model.heads: {} heads do not divide model.width={}", heads, width));
    if (heads % kv_heads != 0)
      throw UserError(fmt::format("model.kv_heads: {} do not divide model.heads={}", kv_heads, heads));
    if (options.on_gpu && head() > kWidestHeadOnGpu)
      throw UserError(
          fmt::format("model.heads: {} heads of model.width={} have {} elements each, and attention on a GPU "
                      "takes up to {}; give more heads, or train.device=cpu",
                      heads, width, head(), kWidestHeadOnGpu));
    if (window > context)
      throw UserError(
          fmt::format("model.context: {} positions for data.sequence_length={}; raise it", context, window));
  }
  std::int64_t head() const { return width / heads; }
  std::int64_t qkv() const { return (heads + 2 * kv_heads) * head(); }

  std::int64_t tokens, width, heads, kv_heads, window, context;
};

// A linear layer whose first weights are normal, with or without a bias of zeros.
class NormalLinear {
 public:
  NormalLinear(ParameterStore& store, const std::string& name, std::int64_t in, std::int64_t out, bool bias,
               float std = kInitStd)
      : weight_(&store.add(name + ".weight", {out, in}, normal(std))),
        bias_(bias ? &store.add(name + ".bias", {out}, constant(0.0f)) : nullptr) {}
  Variable operator()(const Variable& x, const ForwardContext& context) const {
    return linear(x, context.use(*weight_), bias_ ? context.use(*bias_) : Variable());
  }

 private:
  Parameter *weight_, *bias_;
};

// The shared part of both models: tokens go in, and the output layer and its loss are one op.
class Transformer : public Module {
 public:
  bool reads_tokens() const final { return true; }
  Variable forward(const Variable& ids, const ForwardContext& context) final {
    return linear(features(ids, context), context.use(*head_), {});
  }
  Variable loss(const Variable& ids, std::span<const std::int32_t> labels, float smoothing,
                const ForwardContext& context) final {
    return linear_cross_entropy(features(ids, context), context.use(*head_), labels, smoothing);
  }

 protected:
  // The input of the output layer: [steps * batch, width].
  virtual Variable features(const Variable& ids, const ForwardContext& context) = 0;
  Variable embed(const Variable& ids, const ForwardContext& context) const {
    const Variable y = embedding(ids, context.use(*embedding_));
    return y.value().device().kind == DeviceKind::cpu ? cast(y, context.cpu_activations) : y;
  }

  Parameter *embedding_ = nullptr, *head_ = nullptr;  // [tokens, width]; the same if they are tied
};

class Gpt final : public Transformer {
 public:
  Gpt(ParameterStore& store, const ModelOptions& options)
      : sizes_(options),
        exact_(options.get<std::string>(kGelu) == "exact"),
        epsilon_(static_cast<float>(options.get<double>(kNormEpsilon))),
        dropout_(static_cast<float>(options.dropout)) {
    if (sizes_.kv_heads != sizes_.heads)
      throw UserError("model.kv_heads: gpt has a key-value head for each head; choose llama");
    const std::int64_t width = sizes_.width;
    const std::int64_t given = options.get<int>(kFeedForward), hidden = given > 0 ? given : 4 * width;
    const float end_std = kInitStd / std::sqrt(2.0f * static_cast<float>(options.get<int>(option::layers)));
    const bool bias = options.get<bool>(kBias);
    const auto table = [&](const char* name, std::int64_t rows) {
      return &store.add(name, {rows, width}, normal(kInitStd)).mark_outer();
    };
    embedding_ = head_ = table("wte.weight", sizes_.tokens);
    positions_ = table("wpe.weight", sizes_.context);
    for (int i = 0; i < options.get<int>(option::layers); ++i) {
      const std::string name = fmt::format("h.{}.", i);
      // In the order of the forward pass, which is that of the braces.
      layers_.push_back(Layer{Norm(store, name + "ln_1", width, bias),
                              {store, name + "attn.c_attn", width, sizes_.qkv(), bias},
                              {store, name + "attn.c_proj", width, width, bias, end_std},
                              Norm(store, name + "ln_2", width, bias),
                              {store, name + "mlp.c_fc", width, hidden, bias},
                              {store, name + "mlp.c_proj", hidden, width, bias, end_std}});
    }
    norm_.emplace(store, "ln_f", width, bias);
  }

 private:
  struct Norm {
    Norm(ParameterStore& store, const std::string& name, std::int64_t width, bool bias)
        : weight(&store.add(name + ".weight", {width}, constant(1.0f))),
          bias(bias ? &store.add(name + ".bias", {width}, constant(0.0f)) : nullptr) {}
    Parameter *weight, *bias;
  };
  struct Layer {
    Norm norm1;
    NormalLinear qkv, attention_end;
    Norm norm2;
    NormalLinear up, down;
  };

  Variable features(const Variable& ids, const ForwardContext& context) override {
    const std::int64_t batch = ids.shape()[0];
    std::uint32_t index = 0;
    const auto drop = [&](const Variable& x) {
      return dropout_ > 0 ? Dropout(dropout_, index++).forward(x, context) : x;
    };
    const auto bias = [&](const Norm& of) { return of.bias ? context.use(*of.bias) : Variable(); };
    const auto add_norm = [&](const Variable& x, const Variable& branch, const Norm& of) {
      return add_layer_norm(x, branch, context.use(*of.weight), bias(of), epsilon_);
    };
    Variable x = drop(add_positions(embed(ids, context), batch, context.use(*positions_)));
    const Norm& first = layers_.front().norm1;
    SumAndNorm at{x, layer_norm(x, context.use(*first.weight), bias(first), epsilon_)};
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const Variable mixed = attention(layer.qkv(at.norm, context), sizes_.heads, sizes_.heads, batch,
                                       /*causal=*/true);
      at = add_norm(at.sum, drop(layer.attention_end(mixed, context)), layer.norm2);
      const Variable up = layer.up(at.norm, context), hidden = exact_ ? gelu(up) : gelu_tanh(up);
      at = add_norm(at.sum, drop(layer.down(hidden, context)),
                    i + 1 < layers_.size() ? layers_[i + 1].norm1 : *norm_);
    }
    return at.norm;
  }

  const Sizes sizes_;
  const bool exact_;
  const float epsilon_, dropout_;
  Parameter* positions_;
  std::vector<Layer> layers_;
  std::optional<Norm> norm_;  // registered after the layers
};

class Llama final : public Transformer {
 public:
  Llama(ParameterStore& store, const ModelOptions& options)
      : sizes_(options),
        epsilon_(static_cast<float>(options.get<double>(kNormEpsilon))),
        base_(static_cast<float>(options.get<double>(kRopeBase))) {
    if (sizes_.head() % 2 != 0 || sizes_.head() > kMostOfRope)
      throw UserError(
          fmt::format("model.heads: heads of {} elements, and rotary positions take an even number up to {}",
                      sizes_.head(), kMostOfRope));
    const std::int64_t width = sizes_.width, mixed = sizes_.heads * sizes_.head();
    const std::int64_t given = options.get<int>(kFeedForward),
                       hidden = given > 0 ? given : default_hidden(width);
    const auto norm = [&](const std::string& name) {
      return &store.add(name + ".weight", {width}, constant(1.0f));
    };
    const auto table = [&](const char* name) {
      return &store.add(name, {sizes_.tokens, width}, normal(kInitStd)).mark_outer();
    };
    embedding_ = table("embed_tokens.weight");
    for (int i = 0; i < options.get<int>(option::layers); ++i) {
      const std::string name = fmt::format("layers.{}.", i);
      layers_.push_back(Layer{norm(name + "input_layernorm"),
                              {store, name + "self_attn.qkv_proj", width, sizes_.qkv(), false},
                              {store, name + "self_attn.o_proj", mixed, width, false},
                              norm(name + "post_attention_layernorm"),
                              {store, name + "mlp.gate_up_proj", width, 2 * hidden, false},
                              {store, name + "mlp.down_proj", hidden, width, false}});
    }
    norm_ = norm("norm");
    head_ = options.get<bool>(option::tied) ? embedding_ : table("lm_head.weight");
  }

 private:
  struct Layer {
    Parameter* norm1;
    NormalLinear qkv, attention_end;
    Parameter* norm2;
    NormalLinear gate_up, down;
  };

  // 2/3 of 4 width, rounded up to a multiple of 256, as Touvron et al.'s program has it.
  static std::int64_t default_hidden(std::int64_t width) { return (8 * width / 3 + 255) / 256 * 256; }

  Variable features(const Variable& ids, const ForwardContext& context) override {
    const std::int64_t batch = ids.shape()[0], heads = sizes_.heads, kv_heads = sizes_.kv_heads;
    const auto add_norm = [&](const Variable& x, const Variable& branch, const Parameter* weight) {
      return add_rms_norm(x, branch, context.use(*weight), epsilon_);
    };
    const Variable x = embed(ids, context);
    SumAndNorm at{x, rms_norm(x, context.use(*layers_.front().norm1), epsilon_)};
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const Variable qkv = rope(layer.qkv(at.norm, context), heads, kv_heads, batch, base_),
                     mixed = attention(qkv, heads, kv_heads, batch, /*causal=*/true);
      at = add_norm(at.sum, layer.attention_end(mixed, context), layer.norm2);
      at = add_norm(at.sum, layer.down(swiglu(layer.gate_up(at.norm, context)), context),
                    i + 1 < layers_.size() ? layers_[i + 1].norm1 : norm_);
    }
    return at.norm;
  }

  const Sizes sizes_;
  const float epsilon_, base_;
  Parameter* norm_;
  std::vector<Layer> layers_;
};

const bool gpt_registered = add_model<Gpt>(
    "gpt", "GPT-2: model.layers of model.width, model.heads, model.context, for texts and tokens",
    {option::width, option::layers, kHeads, option::context, kFeedForward, kBias, kGelu, kNormEpsilon});
const bool llama_registered = add_model<Llama>(
    "llama", "Llama: RMS norm, SwiGLU, rotary positions, model.kv_heads, for texts and tokens",
    {option::width, option::layers, option::tied, kHeads, kKvHeads, option::context, kFeedForward,
     kNormEpsilon, kRopeBase});

}  // namespace
}  // namespace topknot
