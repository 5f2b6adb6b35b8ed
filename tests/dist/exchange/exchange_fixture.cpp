#include "tests/dist/exchange/exchange_fixture.h"

#include "compress/compressor.h"

namespace topknot::testing {
namespace {

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
    Message message;
    message.block.resize(sent.size() * sizeof(float));
    std::memcpy(message.block.data(), sent.data(), message.block.size());
    return message;
  }
  std::optional<Message> decode(const Round& round) override {
    blocks_.clear();
    for (const auto& block : round.blocks) blocks_.emplace_back(block.begin(), block.end());
    finite_ = true;
    for (const auto& block : blocks_) {
      float flag;
      std::memcpy(&flag, block.data(), sizeof flag);
      finite_ = finite_ && flag == 1.0f;
    }
    return {};
  }
  bool finite() const override { return finite_; }
  std::span<float> commit(std::span<const std::uint32_t>) override {
    std::fill(slice_.residual.begin(), slice_.residual.end(), 0.0f);
    for (std::size_t rank = 0; rank < blocks_.size(); ++rank)
      for (std::size_t j = 0; j < indices_.size(); ++j) {
        float value;
        std::memcpy(&value, blocks_[rank].data() + (j + 1) * sizeof value, sizeof value);
        slice_.residual[indices_[j]] += weights_[rank] * value;
      }
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
  std::vector<std::vector<std::byte>> blocks_;
  bool finite_ = true;
};

class CommonScale : public Compressor {
 public:
  Message encode(Slice slice, const StepContext& context) override {
    slice_ = slice;
    ranks_ = context.weights.size();
    weight_ = context.weights[static_cast<std::size_t>(context.rank)];
    float largest = 0;
    for (std::size_t i = 0; i < slice.gradient.size(); ++i) {
      slice.gradient[i] += slice.residual[i];
      if (!std::isfinite(slice.gradient[i])) largest = INFINITY;
      largest = std::max(largest, std::fabs(slice.gradient[i]));
    }
    Message message;
    message.block.resize(sizeof largest);
    std::memcpy(message.block.data(), &largest, sizeof largest);
    return message;
  }
  std::optional<Message> decode(const Round& round) override {
    if (round.blocks.empty()) {  // the second round: levels_ now holds the sum
      finite_ = true;
      return {};
    }
    float largest = 0;
    for (const auto& block : round.blocks) {
      float value;
      std::memcpy(&value, block.data(), sizeof value);
      largest = std::max(largest, value);
    }
    finite_ = std::isfinite(largest);
    if (!finite_) return {};  // the same on all ranks, so none of them sends more
    scale_ = largest == 0 ? 1.0f : largest / 64;
    levels_.resize(slice_.gradient.size());
    own_.resize(levels_.size());
    for (std::size_t i = 0; i < levels_.size(); ++i) {
      own_[i] = std::nearbyint(slice_.gradient[i] / scale_);
      levels_[i] = weight_ * own_[i];
    }
    Message message;
    message.kind = Message::Kind::sum;
    message.sum = levels_;
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

void write_gradient(Parameter& parameter, std::int64_t step, int rank,
                    const std::function<float(std::int64_t, int, std::size_t)>& value) {
  const GradientTarget target = parameter.variable().gradient_target();
  for (std::size_t i = 0; i < parameter.numel(); ++i) {
    const float g = value(step, rank, parameter.offset() + i);
    target.data[i] = target.accumulate ? target.data[i] + g : g;
  }
}

void backward(Exchange& exchange, ParameterArena& arena, std::int64_t step, int rank,
              const std::function<float(std::int64_t, int, std::size_t)>& value) {
  arena.mark_gradients_unwritten();
  for (Parameter* parameter : arena.parameters()) {
    write_gradient(*parameter, step, rank, value);
    exchange.ready(*parameter);
  }
}

std::vector<float> averages(Exchange& exchange, std::size_t size) {
  std::vector<float> result(size);
  for (const Group& group : exchange.groups()) {
    const auto average = exchange.averaged(group);
    std::copy(average.begin(), average.end(), result.begin() + static_cast<std::ptrdiff_t>(group.begin));
  }
  return result;
}

std::vector<float> residuals(Exchange& exchange, ParameterArena& arena) {
  std::vector<float> result(arena.size());
  for (const Group& group : exchange.groups()) {
    const auto residual = arena.residual(group.begin, group.end);
    std::copy(residual.begin(), residual.end(), result.begin() + static_cast<std::ptrdiff_t>(group.begin));
  }
  return result;
}

RankRecord run_rank(Communicator& communicator, const RunPlan& plan) {
  const int rank = communicator.rank();
  RankRecord record;
  TinyModel model;
  CollectiveQueue queue(communicator);
  Exchange exchange(*model.arena, queue, plan.options);
  for (std::int64_t step = 0; step < plan.steps; ++step) {
    const auto parameters = model.arena->parameters();
    std::vector<std::size_t> order(parameters.size());
    std::iota(order.begin(), order.end(), 0);
    if (plan.order) order = plan.order(step, rank);
    exchange.begin_step({.step = step, .density = plan.density, .weights = plan.weights});
    model.arena->mark_gradients_unwritten();
    for (const std::size_t position : order) {
      write_gradient(*parameters[position], step, rank, plan.gradient);
      exchange.ready(*parameters[position]);
    }
    record.results.push_back(exchange.finish(!plan.loss_finite || plan.loss_finite(step, rank)));
    const bool committed = record.results.back().committed();
    record.averages.push_back(committed ? averages(exchange, model.arena->size()) : std::vector<float>());
    record.residuals.push_back(residuals(exchange, *model.arena));
  }
  return record;
}

std::vector<RankRecord> run(const RunPlan& plan, const std::string& backend) {
  std::vector<RankRecord> records(static_cast<std::size_t>(plan.ranks));
  if (backend.empty())
    run_ranks(plan.ranks, plan.overlaps, [&](TestCommunicator& communicator) {
      RankRecord& record = records[static_cast<std::size_t>(communicator.rank())];
      record = run_rank(communicator, plan);
      record.calls = communicator.calls;
    });
  else
    topknot::run_ranks(backend, plan.ranks, [&](Communicator& communicator) {
      records[static_cast<std::size_t>(communicator.rank())] = run_rank(communicator, plan);
    });
  return records;
}

}  // namespace topknot::testing
