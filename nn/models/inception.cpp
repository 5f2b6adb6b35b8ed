// Inception-v4 (Szegedy, Ioffe, Vanhoucke, Alemi, "Inception-v4, Inception-ResNet and the impact of residual
// connections on learning", AAAI 2017, figures 3 to 9): 42,679,816 parameters for 1000 classes.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

struct InceptionLayer {
  enum Kind {
    convolution,
    fork,  // 1x3 next to 3x1, `out` channels each
    average_pool,
    max_pool,
  } kind = convolution;
  std::int64_t out = 0;
  Extent kernel = 3, stride = 1, padding = 0;
};

// The figures mark convolutions without padding by V.
InceptionLayer same(std::int64_t out, Extent kernel) {
  return {InceptionLayer::convolution, out, kernel, 1, {(kernel.height - 1) / 2, (kernel.width - 1) / 2}};
}
InceptionLayer valid(std::int64_t out, std::int64_t stride) {
  return {InceptionLayer::convolution, out, 3, stride, 0};
}
InceptionLayer fork(std::int64_t out) {
  return {InceptionLayer::fork, out};
}
const InceptionLayer kAveragePool{InceptionLayer::average_pool}, kMaxPool{InceptionLayer::max_pool};

using InceptionBranch = std::vector<InceptionLayer>;

class InceptionBuilder {
 public:
  InceptionBuilder(ParameterStore& store, std::int64_t in) : store_(store), channels_(in) {}
  std::int64_t channels() const { return channels_; }  // after what was built so far

  // Branches side by side on the last output, or one.
  ModulePtr block(const std::string& name, const std::vector<InceptionBranch>& branches) {
    auto modules = std::make_unique<Branches>();
    const std::int64_t in = channels_;
    std::int64_t out = 0;
    for (std::size_t b = 0; b < branches.size(); ++b) {
      channels_ = in;
      auto branch = std::make_unique<Sequential>();
      for (std::size_t i = 0; i < branches[b].size(); ++i)
        branch->add(layer(fmt::format("{}.branch{}.{}", name, b + 1, i + 1), branches[b][i]));
      modules->add(std::move(branch));
      out += channels_;
    }
    channels_ = out;
    return modules;
  }

 private:
  ModulePtr layer(const std::string& name, const InceptionLayer& l) {
    switch (l.kind) {
      case InceptionLayer::average_pool:  // over what lies inside the image
        return std::make_unique<Pool>(PoolGeometry{PoolKind::average, 3, 1, 1});
      case InceptionLayer::max_pool:
        return std::make_unique<Pool>(PoolGeometry{PoolKind::max, 3, 2, 0});
      case InceptionLayer::fork:
        return block(name, {{same(l.out, {1, 3})}, {same(l.out, {3, 1})}});
      default:
        return std::make_unique<ConvBn>(
            store_, name, ConvGeometry{std::exchange(channels_, l.out), l.out, l.kernel, l.stride, l.padding},
            Activation::relu, 1e-3f);
    }
  }

  ParameterStore& store_;
  std::int64_t channels_;
};

const std::vector<std::pair<const char*, std::vector<InceptionBranch>>> kInceptionStem{
    {"stem1", {{valid(32, 2), valid(32, 1), same(64, 3)}}},
    {"stem2", {{kMaxPool}, {valid(96, 2)}}},
    {"stem3", {{same(64, 1), valid(96, 1)}, {same(64, 1), same(64, {1, 7}), same(64, {7, 1}), valid(96, 1)}}},
    {"stem4", {{valid(192, 2)}, {kMaxPool}}},
};
const std::vector<InceptionBranch>  //
    kInceptionA{{same(96, 1)},
                {same(64, 1), same(96, 3)},
                {same(64, 1), same(96, 3), same(96, 3)},
                {kAveragePool, same(96, 1)}},
    kReductionA{{valid(384, 2)}, {same(192, 1), same(224, 3), valid(256, 2)}, {kMaxPool}},
    kInceptionB{{same(384, 1)},
                {same(192, 1), same(224, {1, 7}), same(256, {7, 1})},
                {same(192, 1), same(192, {7, 1}), same(224, {1, 7}), same(224, {7, 1}), same(256, {1, 7})},
                {kAveragePool, same(128, 1)}},
    kReductionB{{same(192, 1), valid(192, 2)},
                {same(256, 1), same(256, {1, 7}), same(320, {7, 1}), valid(320, 2)},
                {kMaxPool}},
    kInceptionC{{same(256, 1)},
                {same(384, 1), fork(256)},
                {same(384, 1), same(448, {3, 1}), same(512, {1, 3}), fork(256)},
                {kAveragePool, same(256, 1)}};

ModulePtr make_inception_v4(ParameterStore& store, const ModelOptions& options) {
  require_images(options, "inception_v4", 75);
  auto model = std::make_unique<Sequential>();
  InceptionBuilder builder(store, options.input[0]);
  const auto repeat = [&](const char* name, int times, const std::vector<InceptionBranch>& branches) {
    for (int i = 1; i <= times; ++i) model->add(builder.block(fmt::format("{}{}", name, i), branches));
  };
  for (const auto& [name, branches] : kInceptionStem) model->add(builder.block(name, branches));
  repeat("a", 4, kInceptionA);
  repeat("reduction_a", 1, kReductionA);
  repeat("b", 7, kInceptionB);
  repeat("reduction_b", 1, kReductionB);
  repeat("c", 3, kInceptionC);
  model->add<GlobalAveragePool>();
  model->add<Dropout>(options.dropout, 1);
  model->add<Linear>(store, "fc", builder.channels(), options.outputs);
  return model;
}

const bool inception_registered = add_model("inception_v4", "Inception-v4", make_inception_v4);

}  // namespace
}  // namespace topknot
