#include "tests/dist/exchange/exchange_fixture.h"

#include "compress/compressor.h"

namespace topknot::testing {
namespace {

Message block_of(const std::vector<float>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  Message message;
  message.block.assign(bytes.begin(), bytes.end());
  return message;
}
std::vector<std::vector<float>> floats_of(const Round& round) {
  std::vector<std::vector<float>> all;
  for (const auto& block : round.blocks) {
    all.emplace_back(block.size() / sizeof(float));
    std::memcpy(all.back().data(), block.data(), block.size());
  }
  return all;
}

class Rotate : public Compressor {
 public:
  Message encode(Slice slice, const StepContext& context) override {
    slice_ = slice;
    weights_.assign(context.weights.begin(), context.weights.end());
    bool finite = true;
    indices_.clear();
    std::vector<float> sent{1.0f};
    for (std::size_t i = 0; i < slice.gradient.size(); ++i) {
      finite = finite && std::isfinite(slice.gradient[i]);
      slice.gradient[i] += slice.residual[i];
      if ((i + static_cast<std::size_t>(context.step)) % 3 != 0) continue;
      indices_.push_back(i);
      sent.push_back(slice.gradient[i]);
    }
    if (!finite) sent.assign(1, 0.0f);  // well formed, and says that there is nothing in it
    return block_of(sent);
  }
  std::optional<Message> decode(const Round& round) override {
    blocks_ = floats_of(round);
    return {};
  }
  bool finite() const override {
    return std::ranges::all_of(blocks_, [](const auto& block) { return block[0] == 1.0f; });
  }
  std::span<float> commit(std::span<const std::uint32_t>) override {
    std::ranges::fill(slice_.residual, 0.0f);
    for (std::size_t rank = 0; rank < blocks_.size(); ++rank)
      for (std::size_t j = 0; j < indices_.size(); ++j)
        slice_.residual[indices_[j]] += weights_[rank] * blocks_[rank][j + 1];
    for (const std::size_t i : indices_) {
      slice_.gradient[i] = 0;
      slice_.residual[i] /= static_cast<float>(blocks_.size());
    }
    return slice_.residual;
  }
  void discard() override {}
  Diagnostics diagnostics() const override { return {.selected = indices_.size()}; }

 private:
  Slice slice_;
  std::vector<float> weights_;
  std::vector<std::size_t> indices_;
  std::vector<std::vector<float>> blocks_;
};

class CommonScale : public Compressor {
 public:
  Message encode(Slice slice, const StepContext& context) override {
    slice_ = slice;
    ranks_ = context.weights.size();
    weight_ = context.weights[context.rank];
    float largest = 0;
    for (std::size_t i = 0; i < slice.gradient.size(); ++i) {
      slice.gradient[i] += slice.residual[i];
      if (!std::isfinite(slice.gradient[i])) largest = INFINITY;
      largest = std::max(largest, std::fabs(slice.gradient[i]));
    }
    return block_of({largest});
  }
  std::optional<Message> decode(const Round& round) override {
    finite_ = true;
    if (round.blocks.empty()) return {};  // the second round: levels_ now holds the sum
    float largest = 0;
    for (const auto& block : floats_of(round)) largest = std::max(largest, block[0]);
    finite_ = std::isfinite(largest);
    if (!finite_) return {};  // the same on all ranks, so none of them sends more
    scale_ = largest == 0 ? 1.0f : largest / 64;
    levels_.clear(), own_.clear();
    for (const float value : slice_.gradient) {
      own_.push_back(std::nearbyint(value / scale_));
      levels_.push_back(weight_ * own_.back());
    }
    Message message;
    message.kind = Message::Kind::sum, message.sum = levels_;
    return message;
  }
  bool finite() const override { return finite_; }
  std::span<float> commit(std::span<const std::uint32_t>) override {
    for (std::size_t i = 0; i < levels_.size(); ++i) {
      slice_.gradient[i] -= own_[i] * scale_;
      slice_.residual[i] = levels_[i] * scale_ / static_cast<float>(ranks_);
    }
    return slice_.residual;
  }
  void discard() override {}

 private:
  Slice slice_;
  std::size_t ranks_ = 1;
  float weight_ = 1, scale_ = 1;
  std::vector<float> levels_, own_;
  bool finite_ = true;
};

template <class Kind>
std::unique_ptr<Compressor> make(const CompressOptions&, const GroupSpec&) {
  return std::make_unique<Kind>();
}

const bool registered = (compressors().add("test_rotate", "every third entry", {make<Rotate>}),
                         compressors().add("test_common_scale", "two rounds", {make<CommonScale>}), true);

}  // namespace

void write_gradient(Parameter& parameter, std::int64_t step, int rank, const GradientValue& value) {
  const GradientTarget target = parameter.variable().gradient_target();
  for (std::size_t i = 0; i < parameter.numel(); ++i) {
    const float g = value(step, rank, parameter.offset() + i);
    target.data[i] = target.accumulate ? target.data[i] + g : g;
  }
}

void backward(Exchange& exchange, ParameterArena& arena, std::int64_t step, int rank,
              const GradientValue& value, const std::vector<std::size_t>& order) {
  arena.mark_gradients_unwritten();
  for (std::size_t i = 0; i < (order.empty() ? arena.parameters().size() : order.size()); ++i) {
    Parameter& parameter = *arena.parameters()[order.empty() ? i : order[i]];
    write_gradient(parameter, step, rank, value);
    exchange.ready(parameter);
  }
}

std::vector<float> averages(Exchange& exchange, std::size_t size) {
  std::vector<float> result(size);
  for (const Group& group : exchange.groups())
    std::ranges::copy(exchange.averaged(group), result.begin() + group.begin);
  return result;
}

RankRecord run_rank(Communicator& communicator, const RunPlan& plan, ParameterArena& arena,
                    const OptimizerOptions& sgd) {
  const int rank = communicator.rank();
  RankRecord record;
  CollectiveQueue queue(communicator);
  Exchange exchange(arena, queue, plan.options);
  const auto optimizer = make_optimizer(sgd, arena);
  std::vector<float> u(arena.size());
  if (plan.observed)
    exchange.observe([&](const Group& group, std::span<const float> values) {
      std::ranges::copy(values, u.begin() + group.begin);
    });
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    exchange.begin_step({.step = step, .density = plan.density, .weights = plan.weights});
    backward(exchange, arena, step, rank, plan.gradient,
             plan.order ? plan.order(step, rank) : std::vector<std::size_t>());
    record.results.push_back(exchange.finish(!plan.loss_finite || plan.loss_finite(step, rank)));
    const bool committed = record.results.back().committed();
    record.averages.push_back(committed ? averages(exchange, arena.size()) : std::vector<float>());
    record.residuals.emplace_back(arena.size());
    for (const Group& group : exchange.groups())
      std::ranges::copy(arena.residual(group.begin, group.end),
                        record.residuals.back().begin() + group.begin);
    record.accumulated.push_back(u);
    for (const Group& group : exchange.groups())
      if (committed) optimizer->update(group.begin, exchange.averaged(group), {step, sgd.lr});
    record.weights.emplace_back(arena.weights().begin(), arena.weights().end());
  }
  return record;
}

}  // namespace topknot::testing
