#include <fmt/format.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "dist/exchange/transport.h"
#include "dist/sparse/coded_sum.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "nn/core/rng.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"
#include "train/plan/profile.h"

namespace topknot {
namespace {

constexpr std::size_t kMostNoise = std::size_t{1} << 22;
constexpr std::size_t kSmallest = 64;          // bytes
constexpr std::size_t kStep = 4;               // from size to size
constexpr std::int64_t kMost = 9, kLeast = 3;  // repetitions of one size, the first is not counted
constexpr double kBudget = 0.4;                // seconds for one operation, all sizes
constexpr int kRoundTrips = 20;
// A link is known by messages of this size: shorter ones may still fit into buffers on their way.
constexpr std::size_t kLinkBytes = std::size_t{1} << 20;

struct Course {
  LinearFit fit;
  double slope = 0;  // seconds a byte from the last but one to the last size
};

// Times `once` at rising sizes and fits those up to `fitted` bytes; `prepare`, if given, goes before each and is not
// timed. How often, and whether at all, rank 0 decides for all.
template <class Once>
Course measure(CollectiveQueue& queue, std::size_t largest, std::size_t fitted, const Once& once,
               const std::function<void(std::size_t bytes)>& prepare = {}) {
  const bool root = queue.communicator().rank() == 0;
  std::vector<double> sizes, times;
  const auto begin = Clock::now();
  double expected = 0;  // seconds of one call of this size
  for (std::size_t bytes = kSmallest;; bytes = std::min(bytes * kStep, largest)) {
    std::int64_t repetitions = kMost;
    const double left = kBudget - seconds_since(begin);
    if (expected * static_cast<double>(kMost) > left) repetitions = kLeast;
    if (!sizes.empty() && expected * static_cast<double>(kLeast) > left) repetitions = 0;
    std::vector<double> taken;
    queue.run([&](Communicator& c) {
      c.broadcast(std::as_writable_bytes(std::span(&repetitions, 1)), 0);
      for (std::int64_t i = 0; i < repetitions; ++i) {
        if (prepare) prepare(bytes);
        c.barrier();
        const auto start = Clock::now();
        once(c, bytes);
        if (i > 0) taken.push_back(std::max(seconds_since(start), 1e-9));
      }
    });
    if (repetitions == 0) break;
    sizes.push_back(static_cast<double>(bytes));
    times.push_back(quantile(taken, 0.5));
    expected = times.back() * static_cast<double>(kStep);
    if (bytes >= largest) break;
  }
  if (!root) return {};
  Course course;
  const std::size_t last = sizes.size() - 1;
  if (last > 0)
    course.slope = std::max(0.0, (times[last] - times[last - 1]) / (sizes[last] - sizes[last - 1]));
  const auto count = static_cast<std::size_t>(
      std::upper_bound(sizes.begin(), sizes.end(), static_cast<double>(fitted)) - sizes.begin());
  course.fit = fit_network(std::span(sizes).first(count), std::span(times).first(count));
  return course;
}

double one_way(CollectiveQueue& queue) {
  std::vector<double> taken;
  queue.run([&](Communicator& c) {
    const std::vector<std::byte> mine(8);
    std::vector<std::byte> theirs;
    const int rank = c.rank();
    c.barrier();
    for (int i = 0; i < kRoundTrips; ++i) {
      const auto start = Clock::now();
      c.send_receive(rank == 0 ? 1 : -1, mine, rank == 1 ? 0 : -1, theirs);
      c.send_receive(rank == 1 ? 0 : -1, mine, rank == 0 ? 1 : -1, theirs);
      taken.push_back(seconds_since(start) / 2);
    }
  });
  return quantile(taken, 0.5);
}

constexpr int kSizes = 5;                                // of groups
constexpr int kWarmUp = 2, kTimed = 7, kLeastTimed = 2;  // rounds of one size
constexpr double kEnough = 0.2;                          // seconds for one size; then kLeastTimed rounds do

Group run_of(std::span<Parameter* const> parameters, bool compressed) {
  const std::size_t begin = parameters.front()->offset();
  Group group{.begin = begin, .end = begin, .compressed = compressed, .parameters = {}};
  for (Parameter* parameter : parameters) {
    group.end += parameter->numel();
    group.parameters.push_back(parameter);
  }
  return group;
}

// About kSizes runs of neighbouring parameters, from the smallest one to all, by rising size.
std::vector<Group> sample_groups(std::span<Parameter* const> parameters, bool compressed) {
  std::vector<double> sums{0};  // elements before each parameter
  double least = 1e300;
  for (const Parameter* parameter : parameters) {
    const auto elements = static_cast<double>(parameter->numel());
    sums.push_back(sums.back() + elements);
    least = std::min(least, elements);
  }
  std::vector<Group> groups;
  for (int i = 0; i < kSizes; ++i) {
    const double target = least * std::pow(sums.back() / least, static_cast<double>(i) / (kSizes - 1));
    std::size_t from = 0, to = 1;
    double best = 1e300;
    for (std::size_t b = 0; b < parameters.size(); ++b) {
      // The first run of at least that size, and the one before it.
      const auto first = sums.begin() + static_cast<std::ptrdiff_t>(b) + 1;
      const auto reached =
          static_cast<std::size_t>(std::lower_bound(first, sums.end(), sums[b] + target) - sums.begin());
      for (const std::size_t e : {reached - 1, reached}) {
        if (e <= b || e >= sums.size()) continue;
        const double off = std::abs(std::log((sums[e] - sums[b]) / target));
        if (off < best) best = off, from = b, to = e;
      }
    }
    Group group = run_of(parameters.subspan(from, to - from), compressed);
    if (groups.empty() || groups.back().numel() < group.numel()) groups.push_back(std::move(group));
  }
  return groups;
}

ExchangeProfile::Group measure_group(const Group& group, const ExchangeOptions& options, double density,
                                     int ranks, const Noise& noise, bool& sums) {
  const std::unique_ptr<Compressor> compressor =
      make_group_compressor(group, {0, group.numel()}, options, ranks);
  std::vector<float> one(group.numel()), other(group.numel());
  Slice slice{one, other};
  std::vector<double> encode, decode;
  const std::vector<float> weights(static_cast<std::size_t>(ranks), 1.0f);
  ExchangeProfile::Group cost;
  cost.elements = static_cast<double>(group.numel());
  const auto begin = Clock::now();
  for (int round = 0; round < kWarmUp + kTimed; ++round) {
    noise.fill(slice.gradient, round);
    StepContext info;
    info.step = round;
    info.density = group_density(group, options, density);
    info.weights = weights;
    auto start = Clock::now();
    Message message = compressor->encode(slice, info);
    const double encoding = seconds_since(start);
    cost.bytes = static_cast<double>(message.bytes());
    cost.later_bytes = 0;
    sums = message.kind != Message::Kind::block;
    double decoding = 0;
    for (bool more = true; more;) {
      Round round;
      round.sum = message.sum, round.sum_bfloat16 = message.sum_bfloat16;
      // Simulates a gather in which every rank sends this rank's block.
      std::vector<std::vector<std::byte>> blocks;
      if (message.kind == Message::Kind::block) blocks.assign(static_cast<std::size_t>(ranks), message.block);
      round.blocks = blocks;
      start = Clock::now();
      std::optional<Message> next = compressor->decode(round);
      decoding += seconds_since(start);
      if ((more = next.has_value())) {
        message = std::move(*next);
        cost.later_bytes += static_cast<double>(message.bytes());
      }
    }
    start = Clock::now();
    if (compressor->commit({}).data() == slice.residual.data()) std::swap(slice.gradient, slice.residual);
    decoding += seconds_since(start);
    if (round < kWarmUp) continue;
    encode.push_back(encoding);
    decode.push_back(decoding);
    if (round - kWarmUp + 1 >= kLeastTimed && seconds_since(begin) > kEnough) break;
  }
  cost.encode_s = quantile(encode, 0.5);
  cost.decode_s = quantile(decode, 0.5);
  return cost;
}

constexpr int kWarmUpPasses = 2, kTimedPasses = 7;  // passes
constexpr double kRate = 1e-12;  // of the updates: the weights stay what they are, and finite

}  // namespace

Noise::Noise(std::size_t size) : values_(std::min(size, kMostNoise)) {
  const CounterRng rng(1, RngUse::test);
  for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = 0.01f * rng.normal(i);
}

void Noise::fill(std::span<float> to, int round) const {
  std::size_t from = (static_cast<std::size_t>(round) * 1000003) % values_.size();
  for (std::size_t done = 0; done < to.size();) {
    const std::size_t count = std::min(to.size() - done, values_.size() - from);
    const float scale = 1 + 1e-3f * static_cast<float>(done / values_.size());
    for (std::size_t i = 0; i < count; ++i) to[done + i] = scale * values_[from + i];
    done += count;
    from = 0;
  }
}

LinearFit fit_network(std::span<const double> bytes, std::span<const double> seconds) {
  TOPKNOT_CHECK(!bytes.empty() && bytes.size() == seconds.size(), "a fit needs a time for each size");
  // Both sides of alpha + bytes beta = time, divided by the root of the time: p alpha + q beta = root.
  double pp = 0, pq = 0, qq = 0, p_sum = 0, q_sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    TOPKNOT_CHECK(seconds[i] > 0 && bytes[i] >= 0, "a fit needs sizes and times above 0");
    const double root = std::sqrt(seconds[i]), p = 1 / root, q = bytes[i] / root;
    pp += p * p, pq += p * q, qq += q * q, p_sum += p * root, q_sum += q * root;
  }
  const double determinant = pp * qq - pq * pq;
  LinearFit fit;
  if (determinant > 1e-12 * pp * qq) {
    fit.alpha = (p_sum * qq - q_sum * pq) / determinant;
    fit.beta = (q_sum * pp - p_sum * pq) / determinant;
  } else {
    fit.alpha = p_sum / pp;
  }
  if (fit.beta < 0) fit = {p_sum / pp, 0};
  if (fit.alpha < 0) fit = {0, q_sum / qq};
  return fit;
}

NetworkTimes measure_network(CollectiveQueue& queue, std::size_t gather_bytes, std::size_t reduce_bytes,
                             SumOrder order) {
  NetworkTimes times;
  const int ranks = queue.communicator().size();
  times.gather.ranks = times.reduce.ranks = ranks;
  if (ranks == 1) return times;
  // A rank's own sizes come from its own rounds, whose number its clock decides.
  std::uint64_t sizes[] = {gather_bytes, reduce_bytes};
  queue.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(sizes)), 0); });
  gather_bytes = std::max<std::size_t>(sizes[0], kSmallest), reduce_bytes = sizes[1];
  const std::vector<std::byte> block(std::max(gather_bytes, kLinkBytes));
  std::vector<std::vector<std::byte>> all;
  const auto gather_once = [&](Communicator& c, std::size_t bytes) {
    c.all_gather(std::span(block).first(bytes), all);
  };
  const auto [gather, slope] = measure(queue, block.size(), gather_bytes, gather_once);
  std::vector<float> floats(std::max(reduce_bytes, kSmallest) / sizeof(float));
  const auto reduce_once = [&](Communicator& c, std::size_t bytes) {
    c.all_reduce(std::span(floats).first(bytes / sizeof(float)), order);
  };
  const std::size_t reduced = floats.size() * sizeof(float);
  const LinearFit reduce = measure(queue, reduced, reduced, reduce_once).fit;
  times.gather.alpha = gather.alpha, times.gather.beta = gather.beta;
  times.reduce.alpha = reduce.alpha, times.reduce.beta = reduce.beta;
  times.link.alpha = one_way(queue);
  times.link.beta = slope / (ranks - 1);
  if (ranks > 2) times.link.overhead = std::max(0.0, (gather.alpha - times.link.alpha) / (ranks - 2));
  return times;
}

double least_gather_seconds(CollectiveQueue& queue, std::size_t bytes) {
  constexpr int kTimes = 4;
  constexpr double kEnough = 0.25;  // seconds, after which no other one follows
  const std::vector<std::byte> block(bytes);
  std::vector<std::vector<std::byte>> all;
  double least = 0, total = 0;
  queue.run([&](Communicator& c) {
    for (int i = 0; i < kTimes; ++i) {
      std::uint8_t more = total < kEnough;  // rank 0 decides
      c.broadcast(std::as_writable_bytes(std::span(&more, 1)), 0);
      if (!more) break;
      c.barrier();
      const auto begin = Clock::now();
      c.all_gather(block, all);
      const double taken = seconds_since(begin);
      total += taken;
      least = i <= 1 ? taken : std::min(least, taken);  // the first may still fit into buffers on its way
    }
  });
  return least;
}

ExchangeProfile::Fit measure_coded_sum(CollectiveQueue& queue, std::size_t bytes, bool bfloat16) {
  ExchangeProfile::Fit fit;
  fit.ranks = queue.communicator().size();
  if (fit.ranks == 1) return fit;
  std::uint64_t size = bytes;  // as in measure_network()
  queue.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(&size, 1)), 0); });
  size = std::max<std::uint64_t>(size, kSmallest);
  CodedSum coded;
  std::vector<float> floats(size / (bfloat16 ? sizeof(BFloat16) : sizeof(float)));
  std::vector<BFloat16> narrow(bfloat16 ? floats.size() : 0);
  const Noise noise(floats.size());
  int round = 0;
  // The sum that is left there would be another one's summand.
  const auto prepare = [&](std::size_t of) {
    const auto values = std::span(floats).first(of / (bfloat16 ? sizeof(BFloat16) : sizeof(float)));
    noise.fill(values, round++);
    if (bfloat16) to_bfloat16(values.data(), values.size(), narrow.data());
  };
  const auto once = [&](Communicator& c, std::size_t of) {
    if (bfloat16)
      coded.sum(c, std::span(narrow).first(of / sizeof(BFloat16)));
    else
      coded.sum(c, std::span(floats).first(of / sizeof(float)));
  };
  const LinearFit line = measure(queue, size, size, once, prepare).fit;
  fit.alpha = line.alpha, fit.beta = line.beta;
  return fit;
}

LayerTimes measure_layer_times(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass) {
  const auto model = build_model(config, data);
  ParameterArena& arena = model->store.arena();
  const auto optimizer = make_optimizer(config.optimizer, arena);
  LoaderOptions options = loader_options(config, data, true, rank, ranks);
  options.workers = 0;
  Loader loader(data, options);
  loader.start_epoch(0);

  std::map<const Parameter*, std::vector<double>> times;
  std::vector<const Parameter*> order;  // of the last pass; the same in all
  std::vector<double> data_s, forward_s, update_s;
  for (int pass = 0; pass < kWarmUpPasses + kTimedPasses; ++pass) {
    if (before_pass) before_pass();
    double data_time = 0, forward_time = 0, update_time = 0;
    Batch batch;
    {
      Stopwatch watch(data_time);
      if (!loader.next(batch)) {
        loader.start_epoch(0);
        TOPKNOT_CHECK(loader.next(batch), "an epoch without batches");
      }
    }
    arena.mark_gradients_unwritten();
    const std::vector<std::int32_t> frames = output_frames(*model->module, batch);
    Variable loss;
    {
      Stopwatch watch(forward_time);
      ForwardContext context;
      context.frames = frames;
      context.seed = config.seed;
      context.step = static_cast<std::uint32_t>(pass);
      loss = model->loss(view_of(batch, frames), context);
    }
    order.clear();
    Clock::time_point last = Clock::now();
    backward(loss, [&](Parameter& parameter) {
      const auto now = Clock::now();
      if (pass >= kWarmUpPasses)
        times[&parameter].push_back(std::chrono::duration<double>(now - last).count());
      order.push_back(&parameter);
      last = now;
    });
    arena.zero_unwritten_gradients();
    {
      Stopwatch watch(update_time);
      optimizer->update(0, arena.gradient(0, arena.size()), {pass, kRate});
    }
    if (pass < kWarmUpPasses) continue;
    data_s.push_back(data_time);
    forward_s.push_back(forward_time);
    update_s.push_back(update_time);
  }

  std::map<const Parameter*, double> ready;
  double sum = 0;
  for (const Parameter* parameter : order) ready[parameter] = sum += quantile(times[parameter], 0.5);
  LayerTimes result;
  for (const Parameter* parameter : arena.parameters()) {
    result.backward.push_back(quantile(times[parameter], 0.5));
    result.ready.push_back(ready[parameter]);
  }
  result.data_s = quantile(data_s, 0.5);
  result.forward_s = quantile(forward_s, 0.5);
  result.update_s = quantile(update_s, 0.5);
  return result;
}

ExchangeProfile measure_layers(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue) {
  const Communicator& communicator = queue.communicator();
  ExchangeProfile profile;
  profile.model = config.model.name;
  profile.dataset = config.data.name;
  profile.ranks = communicator.size();
  profile.threads = compute_threads(config);
  profile.batch = config.data.batch_size;
  profile.backend = communicator.network();
  profile.overlaps = communicator.overlaps();
  const LayerTimes times = measure_layer_times(config, data, communicator.rank(), profile.ranks,
                                               [&] { queue.run([](Communicator& c) { c.barrier(); }); });
  double backward = 0;
  for (const double ready : times.ready) backward = std::max(backward, ready);
  const bool late =
      (config.compress.clip > 0 || config.train.clip_local > 0) && config.train.clip_local_scope == "model";
  const auto parameters = arena.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    profile.parameters.push_back({parameters[i]->name(), parameters[i]->numel(), false,
                                  late ? (i == 0 ? backward : 0) : times.backward[i],
                                  late ? backward : times.ready[i]});
  // In a step's batches, all backward passes but the last send nothing.
  const int batches = config.train.accumulate;
  profile.data_s = batches * times.data_s;
  profile.forward_s = batches * times.forward_s + (batches - 1) * backward;
  profile.backward_s = backward;
  profile.update_s = times.update_s;
  return profile;
}

void measure_method(const Config& config, const ParameterArena& arena, CollectiveQueue& queue,
                    const ExchangeOptions& options, ExchangeProfile& profile) {
  const bool compressing = config.compress.name != "dense";
  profile.method = config.compress.name;
  profile.options = profile_options(config);
  profile.density = compressing ? config.compress.density : 1.0;
  profile.dense_sums = options.dense_values == "fp32";
  ExchangeOptions plain = options;
  plain.collective = "all_gather";
  const auto parameters = arena.parameters();
  std::size_t handled = parameters.size();
  if (compressing)
    handled = static_cast<std::size_t>(std::count_if(parameters.begin(), parameters.end(),
                                                     [](const Parameter* p) { return p->compressible(); }));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    profile.parameters[i].compressed = compressing && parameters[i]->compressible();
  const Noise noise(arena.size());
  const auto cost = [&](const Group& group, bool& sums) {
    queue.run([](Communicator& c) { c.barrier(); });
    return measure_group(group, plain, profile.density, profile.ranks, noise, sums);
  };
  profile.groups.clear();
  if (handled > 0) {
    for (const Group& group : sample_groups(parameters.first(handled), compressing))
      profile.groups.push_back(cost(group, profile.sums));
  } else {
    profile.groups.push_back({});
  }
  bool sums = true;
  profile.dense = {};
  if (handled < parameters.size()) profile.dense = cost(run_of(parameters.subspan(handled), false), sums);
}

ExchangeProfile measure_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                                 CollectiveQueue& queue, const ExchangeOptions& options) {
  ExchangeProfile profile = measure_layers(config, data, arena, queue);
  measure_method(config, arena, queue, options, profile);
  constexpr double kLeastLargest = 65536;  // bytes, so that a model's small messages do not blur the fit
  const double message = profile.groups.back().bytes;
  const double gathered = std::max(profile.sums ? 0 : message, profile.dense_sums ? 0 : profile.dense.bytes);
  const double summed = std::max(profile.sums ? message : 0, profile.dense_sums ? profile.dense.bytes : 0);
  const SumOrder order =
      config.compress.name != "dense" || options.ordered_sum ? SumOrder::ranks : SumOrder::library;
  const NetworkTimes network =
      measure_network(queue, static_cast<std::size_t>(std::max(gathered, kLeastLargest)),
                      static_cast<std::size_t>(std::max(summed, kLeastLargest)), order);
  profile.link = network.link;
  profile.gather = network.gather;
  profile.reduce = codes_sums(options.collective)
                       ? measure_coded_sum(queue, static_cast<std::size_t>(std::max(summed, kLeastLargest)),
                                           sums_bfloat16(options))
                       : network.reduce;
  return profile;
}

}  // namespace topknot
