#include "tests/support/bfloat16.h"
#include "tests/support/built_model.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr std::int64_t kBatch = 3, kSteps = 4, kTokens = 11;

ModelOptions options_of(std::int64_t tokens, int layers, int heads, int width, int context) {
  ModelOptions options;
  options.input = {kSteps, 1, 1};
  options.outputs = tokens;
  options.set("layers", layers), options.set("heads", heads), options.set("width", width),
      options.set("context", context);
  options.dropout = 0;
  return options;
}
ModelOptions tiny() {
  return options_of(kTokens, 2, 2, 8, 6);
}
ModelOptions grouped() {
  ModelOptions options = options_of(kTokens, 2, 4, 16, 6);
  options.set("kv_heads", 2), options.set("feed_forward", 12);
  return options;
}

ModelOptions grouped_or_tiny(const std::string& name) {
  return name == "llama" ? grouped() : tiny();
}

struct BuiltTransformer : BuiltModel {
  BuiltTransformer(const std::string& name, const ModelOptions& options) : BuiltModel(name, options) {
    for (std::int64_t i = 0; i < kBatch * kSteps; ++i) {
      ids.push_back(float(i * i % kTokens));
      next.push_back(std::int32_t(i * 5 % kTokens));
    }
  }
  Variable input() const { return Variable(Tensor::from(ids, {kBatch, kSteps, 1, 1})); }
  Variable loss(const ForwardContext& context = {}) { return model->loss(input(), next, 0, context); }
  std::vector<float> ids;
  std::vector<std::int32_t> next;
};

double deviation(const Parameter& p) {
  double squares = 0;
  for (std::size_t i = 0; i < p.numel(); ++i) squares += double(p.value()[i]) * p.value()[i];
  return std::sqrt(squares / double(p.numel()));
}

}  // namespace

TEST_CASE("transformers have the published number of parameters") {
  CHECK(parameters_of("gpt", options_of(50257, 12, 12, 768, 1024)) == 124439808);
  CHECK(parameters_of("gpt", options_of(50257, 24, 16, 1024, 1024)) == 354823168);
  CHECK(parameters_of("gpt", options_of(50257, 48, 25, 1600, 1024)) == 1557611200);
  ModelOptions characters = options_of(65, 4, 4, 128, 64);  // nanoGPT's on a CPU
  characters.set("bias", false);
  CHECK(parameters_of("gpt", characters) == 804096);
  CHECK(parameters_of("llama", options_of(32000, 32, 32, 4096, 2048)) == 6738415616);
  ModelOptions tiny_llama = options_of(32000, 22, 32, 2048, 2048);  // TinyLlama 1.1B: grouped heads
  tiny_llama.set("kv_heads", 4), tiny_llama.set("feed_forward", 5632);
  CHECK(parameters_of("llama", tiny_llama) == 1100048384);
}

TEST_CASE("transformers begin with N(0, 0.02), gpt's ends of branches with less, and lose about ln V") {
  ModelOptions options = options_of(kTokens, 3, 4, 64, 8);
  BuiltTransformer gpt("gpt", options), llama("llama", options);
  CHECK(deviation(gpt.parameter("wte.weight")) == Approx(0.02).epsilon(0.1));
  CHECK(deviation(gpt.parameter("wpe.weight")) == Approx(0.02).epsilon(0.1));
  CHECK(deviation(gpt.parameter("h.1.attn.c_attn.weight")) == Approx(0.02).epsilon(0.05));
  for (const char* name : {"h.2.attn.c_proj.weight", "h.0.mlp.c_proj.weight"})
    CHECK(deviation(gpt.parameter(name)) == Approx(0.02 / std::sqrt(6.0)).epsilon(0.05));
  CHECK(deviation(gpt.parameter("h.0.attn.c_attn.bias")) == 0);
  CHECK(deviation(gpt.parameter("h.0.ln_1.weight")) == 1);
  CHECK(deviation(llama.parameter("layers.0.mlp.down_proj.weight")) == Approx(0.02).epsilon(0.05));
  for (BuiltTransformer* model : {&gpt, &llama})
    CHECK(model->loss().value().data()[0] == Approx(std::log(kTokens)).epsilon(0.1));
}

TEST_CASE("a transformer's matrices are hidden but for the embeddings, positions and the head") {
  for (const char* name : {"gpt", "llama"}) {
    const BuiltTransformer built(name, grouped_or_tiny(name));
    for (const auto& p : built.store.parameters()) {
      INFO(p->name());
      const bool outer = p->name() == "wte.weight" || p->name() == "wpe.weight" ||
                         p->name() == "embed_tokens.weight" || p->name() == "lm_head.weight";
      CHECK(p->hidden() == (p->shape().rank() > 1 && !outer));
    }
  }
}

TEST_CASE("the gradient of every parameter of a transformer is the loss's slope") {
  ModelOptions nano = tiny(), tied = grouped();
  nano.set("bias", false), nano.set("gelu", "exact"), tied.set("tied", true);
  for (const auto& [name, options] : std::vector<std::pair<std::string, ModelOptions>>{
           {"gpt", tiny()}, {"gpt", nano}, {"llama", grouped()}, {"llama", tied}}) {
    BuiltTransformer built(name, options);
    // First values are too small for a slope in floats: layers would hardly count.
    for (const auto& p : built.store.parameters())
      if (p->shape().rank() > 1)
        for (std::size_t i = 0; i < p->numel(); ++i) p->value()[i] *= 15;
    backward(built.loss());
    CHECK(built.store.arena().zero_unwritten_gradients().empty());
    for (Parameter* const& p : built.store.arena().parameters()) {
      INFO(name << ": " << p->name());
      // A key's bias moves all scores of a query alike: its gradient is 0, so c_attn's is checked as a whole.
      check_slope(
          {&p, 1}, [&] { return double(built.loss().value().data()[0]); }, 0.01);
    }
  }
}

TEST_CASE("a transformer's own loss is that of its logits, in training and in evaluation") {
  for (const char* name : {"gpt", "llama"}) {
    BuiltTransformer built(name, grouped_or_tiny(name));
    for (const bool training : {true, false}) {
      ForwardContext context;
      context.training = training;
      const float apart =
          softmax_cross_entropy(built.model->forward(built.input(), context), built.next).value().data()[0];
      CHECK(built.loss(context).value().data()[0] == Approx(apart).epsilon(1e-5));
    }
  }
}

TEST_CASE("a transformer's logits do not depend on later tokens or other sequences, and do on earlier ones") {
  for (const char* name : {"gpt", "llama"}) {
    BuiltTransformer built(name, tiny());
    const auto logits = [&] { return values_of(built.model->forward(built.input(), evaluation())); };
    const std::vector<float> before = logits();
    float& id = built.ids[1 * kSteps + 2];  // of sequence 1, step 2
    id = id == 0.0f ? 1.0f : id - 1.0f;
    const std::vector<float> after = logits();
    for (std::int64_t row = 0; row < kBatch * kSteps; ++row) {
      INFO(name << ", step " << row / kBatch << " of sequence " << row % kBatch);
      const auto at = std::ptrdiff_t(row * kTokens);
      const bool same = std::equal(before.begin() + at, before.begin() + at + kTokens, after.begin() + at);
      CHECK(same == !(row % kBatch == 1 && row / kBatch >= 2));
    }
  }
}

TEST_CASE("a transformer's gradient of two accumulated passes is their mean, the shared weight's too") {
  ModelOptions tied = grouped();
  tied.set("tied", true);
  for (const auto& [name, options] :
       std::vector<std::pair<std::string, ModelOptions>>{{"gpt", tiny()}, {"llama", tied}}) {
    BuiltTransformer built(name, options);
    const std::vector<float> first_ids = built.ids;
    const auto pass = [&](bool second, float scale) {
      built.ids = first_ids;
      if (second) std::rotate(built.ids.begin(), built.ids.begin() + 1, built.ids.end());
      backward(built.loss(), {}, scale);
    };
    const auto gradients = [&] {
      std::vector<float> all;
      for (const auto& p : built.store.parameters())
        all.insert(all.end(), p->gradient(), p->gradient() + p->numel());
      built.store.arena().mark_gradients_unwritten();
      return all;
    };
    pass(false, 1);
    const std::vector<float> a = gradients();
    pass(true, 1);
    const std::vector<float> b = gradients();
    pass(false, 0.5f), pass(true, 0.5f);
    const std::vector<float> both = gradients();
    CHECK(a != b);
    for (std::size_t i = 0; i < both.size(); ++i)
      CHECK(both[i] == Approx(0.5 * (a[i] + b[i])).epsilon(1e-4).margin(1e-7));
  }
}

TEST_CASE("a transformer's loss and gradients in bfloat16 are near those in fp32") {
  if (!multiplies_bfloat16()) return;
  for (const char* name : {"gpt", "llama"}) {
    INFO(name);
    BuiltTransformer wide(name, grouped_or_tiny(name)), narrow(name, grouped_or_tiny(name));
    ForwardContext context;
    context.cpu_activations = DType::bf16;
    const Variable loss = narrow.loss(context), expected = wide.loss();
    CHECK(loss.value().data()[0] != expected.value().data()[0]);
    CHECK(loss.value().data()[0] == Approx(expected.value().data()[0]).epsilon(2e-3));
    backward(loss), backward(expected);
    for (const auto& p : wide.store.parameters()) {
      INFO(p->name());
      const float* g = narrow.parameter(p->name()).gradient();
      double difference = 0, norm = 0;
      for (std::size_t i = 0; i < p->numel(); ++i) {
        difference += std::pow(double(g[i]) - p->gradient()[i], 2);
        norm += std::pow(double(p->gradient()[i]), 2);
      }
      CHECK(std::sqrt(difference) < 0.05 * std::sqrt(norm) + 1e-6);
    }
  }
}

TEST_CASE("a transformer refuses heads that do not divide, and a window beyond its context") {
  const auto refused = [](const char* name, void (*change)(ModelOptions&)) {
    ModelOptions options = tiny();
    change(options);
    ParameterStore store;
    CHECK_THROWS_AS(make_model(name, store, options), UserError);
  };
  refused("gpt", [](ModelOptions& o) { o.set("heads", 3); });
  refused("gpt", [](ModelOptions& o) { o.set("context", int(kSteps - 1)); });
  refused("gpt", [](ModelOptions& o) { o.set("kv_heads", 1); });
  refused("llama", [](ModelOptions& o) { o.set("heads", 4), o.set("kv_heads", 3); });
  refused("llama", [](ModelOptions& o) { o.set("heads", 8); });  // heads of one element
  refused("llama",
          [](ModelOptions& o) { o.set("heads", 1), o.set("width", 514); });  // longer than rope() takes
  for (const char* name : {"gpt", "llama"})  // longer than attention() takes on a GPU
    refused(name, [](ModelOptions& o) { o.set("heads", 1), o.set("width", 258), o.on_gpu = true; });
}
