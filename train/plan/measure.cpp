// The measurements of a starting run: its layers, the messages of its methods, the network.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <utility>

#include "dist/exchange/transport.h"
#include "dist/sparse/coded_sum.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/text.h"
#include "nn/core/rng.h"
#include "train/evaluate.h"
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

// Normally distributed values; each round starts at another offset, so that no two rounds in a row are equal.
// Longer vectors repeat them at slightly different scales, so that there are no ties.
class Noise {
 public:
  explicit Noise(std::size_t size) : values_(std::min(size, kMostNoise)) {
    const CounterRng rng(1, RngUse::test);
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = 0.01f * rng.normal(i);
  }

  void fill(std::span<float> to, int round) const {
    std::size_t from = (static_cast<std::size_t>(round) * 1000003) % values_.size();
    for (std::size_t done = 0; done < to.size();) {
      const std::size_t count = std::min(to.size() - done, values_.size() - from);
      const float scale = 1 + 1e-3f * static_cast<float>(done / values_.size());
      for (std::size_t i = 0; i < count; ++i) to[done + i] = scale * values_[from + i];
      done += count;
      from = 0;
    }
  }

 private:
  std::vector<float> values_;
};

struct Course {
  LinearFit fit;
  double slope = 0;  // seconds a byte from the last but one to the last size
};

// Times `once` at rising sizes and fits those up to `fitted` bytes; `prepare`, if given, goes before each and is not
// timed. How often, and whether at all, rank 0 decides for all.
Course measure(CollectiveQueue& queue, std::size_t largest, std::size_t fitted, const auto& once,
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
    Group group = group_of(parameters.subspan(from, to - from), compressed);
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
    // Pieces take the time of a gather of one.
    cost.bytes = static_cast<double>(message.block.size() / std::max(1, message.pieces) +
                                     message.sum.size_bytes() + message.sum_bfloat16.size_bytes());
    cost.later_bytes = 0;
    sums = message.kind != Message::Kind::block;
    double decoding = 0;
    for (bool more = true; more;) {
      Round round;
      round.sum = message.sum, round.sum_bfloat16 = message.sum_bfloat16;
      // Simulates a gather in which every rank sends this rank's block.
      std::vector<std::span<const std::byte>> blocks;
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

// Rank 0's size, on every rank: a rank's own comes from its own rounds, whose number its clock decides.
std::size_t largest_size(CollectiveQueue& queue, double bytes) {
  auto size = static_cast<std::uint64_t>(bytes);
  queue.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(&size, 1)), 0); });
  return std::max<std::size_t>(size, kSmallest);
}

LinearFit measure_coded_sum(CollectiveQueue& queue, std::size_t bytes, bool bfloat16) {
  const std::size_t width = bfloat16 ? sizeof(BFloat16) : sizeof(float);
  CodedSum coded;
  std::vector<float> floats(bytes / width);
  std::vector<BFloat16> narrow(bfloat16 ? floats.size() : 0);
  const Noise noise(floats.size());
  int round = 0;
  // The sum that is left there would be another one's summand.
  const auto prepare = [&](std::size_t of) {
    const auto values = std::span(floats).first(of / width);
    noise.fill(values, round++);
    if (bfloat16) to_bfloat16(values.data(), values.size(), narrow.data());
  };
  const auto once = [&](Communicator& c, std::size_t of) {
    if (bfloat16)
      coded.sum(c, std::span(narrow).first(of / width));
    else
      coded.sum(c, std::span(floats).first(of / width));
  };
  return measure(queue, bytes, bytes, once, prepare).fit;
}

// The largest message of a rank that is summed, or gathered.
double largest_message(const ExchangeProfile& profile, bool summed) {
  return std::max(profile.sums == summed ? profile.groups.back().bytes : 0,
                  profile.dense_sums == summed ? profile.dense.bytes : 0);
}

// Gives all profiles the network's times, and each that codes its sums the times of these.
void measure_network(CollectiveQueue& queue, std::vector<ExchangeProfile>& profiles, SumOrder order,
                     double least_bytes) {
  const int ranks = queue.communicator().size();
  if (ranks == 1) return;
  double gathered = least_bytes, summed = least_bytes;
  for (const ExchangeProfile& profile : profiles) {
    gathered = std::max(gathered, largest_message(profile, false));
    summed = std::max(summed, largest_message(profile, true));
  }
  const std::size_t gather_bytes = largest_size(queue, gathered);
  const std::vector<std::byte> block(std::max(gather_bytes, kLinkBytes));
  std::vector<std::vector<std::byte>> all;
  const auto gather_once = [&](Communicator& c, std::size_t bytes) {
    c.all_gather(std::span(block).first(bytes), all);
  };
  const auto [gather, slope] = measure(queue, block.size(), gather_bytes, gather_once);
  std::vector<float> floats(largest_size(queue, summed) / sizeof(float));
  const auto reduce_once = [&](Communicator& c, std::size_t bytes) {
    c.all_reduce(std::span(floats).first(bytes / sizeof(float)), order);
  };
  const std::size_t reduced = floats.size() * sizeof(float);
  const LinearFit reduce = measure(queue, reduced, reduced, reduce_once).fit;
  Link link{one_way(queue), slope / (ranks - 1)};
  if (ranks > 2) link.overhead = std::max(0.0, (gather.alpha - link.alpha) / (ranks - 2));
  std::array<std::optional<LinearFit>, 2> coded;  // by the width of the values
  for (ExchangeProfile& profile : profiles) {
    profile.link = link, profile.gather = {gather, ranks}, profile.reduce = {reduce, ranks};
    if (!codes_sums(profile.collective)) continue;
    const double bytes = largest_message(profile, true);
    const bool bfloat16 = profile.is_dense() && bytes < 3 * profile.groups.back().elements;
    auto& fit = coded[bfloat16];
    if (!fit) fit = measure_coded_sum(queue, largest_size(queue, std::max(bytes, least_bytes)), bfloat16);
    profile.reduce = {*fit, ranks};
  }
}

// The method of `config` and the costs of its groups.
void measure_method(const Config& config, const std::map<std::string, double>& layer_density,
                    const ParameterArena& arena, CollectiveQueue& queue, ExchangeProfile& profile) {
  ExchangeOptions options = exchange_options(config);
  options.layer_density = layer_density;
  const bool compressing = options.compressing();
  profile.method = config.compress.name;
  profile.options = profile_options(config);
  profile.density = compressing ? config.compress.density : 1.0;
  profile.dense_sums = options.dense_values == "fp32";
  profile.collective = std::exchange(options.collective, "all_gather");
  const auto parameters = arena.parameters();
  std::size_t handled = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    profile.parameters[i].compressed = compressing && parameters[i]->compressible();
    handled += !compressing || parameters[i]->compressible();
  }
  const Noise noise(arena.size());
  const auto cost = [&](const Group& group, bool& sums) {
    queue.run([](Communicator& c) { c.barrier(); });
    return measure_group(group, options, profile.density, profile.ranks, noise, sums);
  };
  if (handled == 0) profile.groups.push_back({});
  if (handled > 0)
    for (const Group& group : sample_groups(parameters.first(handled), compressing))
      profile.groups.push_back(cost(group, profile.sums));
  bool sums = true;
  if (handled < parameters.size()) profile.dense = cost(group_of(parameters.subspan(handled), false), sums);
}

}  // namespace

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

ExchangeProfile measure_layers(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass) {
  constexpr int kWarmUpPasses = 2, kTimedPasses = 7;
  constexpr double kRate = 1e-12;  // of the updates: the weights stay what they are, and finite
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

  ExchangeProfile profile;
  profile.model = config.model.name, profile.dataset = config.data.name;
  profile.ranks = ranks, profile.threads = compute_threads(config), profile.batch = config.data.batch_size;
  std::map<const Parameter*, double> ready;
  double sum = 0;
  for (const Parameter* parameter : order) ready[parameter] = sum += quantile(times[parameter], 0.5);
  for (const Parameter* parameter : arena.parameters()) {
    profile.parameters.push_back(
        {parameter->name(), parameter->numel(), false, quantile(times[parameter], 0.5), ready[parameter]});
    profile.backward_s = std::max(profile.backward_s, ready[parameter]);
  }
  profile.data_s = quantile(data_s, 0.5);
  profile.forward_s = quantile(forward_s, 0.5);
  profile.update_s = quantile(update_s, 0.5);
  return profile;
}

std::vector<ExchangeProfile> measure_exchange(const std::vector<Config>& methods, const Dataset& data,
                                              const ParameterArena& arena, CollectiveQueue& queue,
                                              double least_bytes,
                                              const std::map<std::string, double>& layer_density) {
  const Config& config = methods[0];
  const Communicator& communicator = queue.communicator();
  ExchangeProfile run = measure_layers(config, data, communicator.rank(), communicator.size(),
                                       [&] { queue.run([](Communicator& c) { c.barrier(); }); });
  run.backend = communicator.network();
  run.overlaps = communicator.overlaps();
  if ((config.compress.clip > 0 || config.train.clip_local > 0) && config.train.clip_local_scope == "model")
    for (auto& parameter : run.parameters) {
      parameter.backward_s = &parameter == &run.parameters.front() ? run.backward_s : 0;
      parameter.ready_s = run.backward_s;
    }
  // In a step's batches, all backward passes but the last send nothing.
  const int batches = config.train.accumulate;
  run.data_s = batches * run.data_s;
  run.forward_s = batches * run.forward_s + (batches - 1) * run.backward_s;

  std::vector<ExchangeProfile> profiles(methods.size(), run);
  for (std::size_t i = 0; i < methods.size(); ++i)
    measure_method(methods[i], layer_density, arena, queue, profiles[i]);
  const bool ordered = compresses(config) || config.dist.ordered_sum;
  measure_network(queue, profiles, ordered ? SumOrder::ranks : SumOrder::library, least_bytes);
  return profiles;
}

}  // namespace topknot
