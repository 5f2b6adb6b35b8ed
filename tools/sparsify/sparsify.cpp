#include "tools/sparsify/sparsify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "dist/comm/ordered_sum.h"
#include "nn/base/check.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/step.h"
#include "optim/clip.h"
#include "train/metrics/npy.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

// One rank in a step.
struct RankStep {
  std::size_t count = 0;  // entries sent
  double threshold = 0;   // Compressor::threshold()
  std::size_t over_capacity = 0;
  // Messages of all rounds, as StepReport counts them: a sum counts its length once each way, a gather
  // brings the blocks of the other ranks.
  std::size_t bytes_up = 0, bytes_down = 0;
  // The contribution before its weight, as the ranks decoded it, if the method reports it. Without indices
  // the values are of all positions.
  bool known = false;
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
};

struct RanksStep {
  bool committed = false;  // false: a NaN or Inf; the step was discarded on all ranks
  std::vector<RankStep> ranks;
  std::span<const float> average;  // where committed; until the next step
};

// The ranks in one thread: their compressors are driven through encode, decode and commit or discard as the
// exchange drives them (dist/exchange/exchange.h), each rank with its two memories.
class SparsifyRanks {
 public:
  // Throws UserError if the options make no sense together.
  SparsifyRanks(const CompressOptions& options, const GroupSpec& group);

  // Where a step's gradient goes before step().
  std::span<float> gradient(std::size_t rank) { return memories_[rank].gradient; }
  // `info.rank` is set here. Throws Error if ranks differ in the average.
  RanksStep step(const StepContext& info);
  Applied applied() const { return compressors_[0]->applied(); }

 private:
  struct Memories {
    std::vector<float> gradient, residual;
  };
  std::size_t size() const { return compressors_.size(); }
  // Carries one round of messages; returns those of the next, or none.
  std::vector<Message> round(std::vector<Message>& messages, std::vector<RankStep>& ranks);
  // After commit: which memory holds the average; it becomes `gradient`.
  std::span<const float> settle(std::size_t rank, std::span<float> average);

  std::string name_;
  std::vector<std::unique_ptr<Compressor>> compressors_;  // by rank, as the memories
  std::vector<Memories> memories_;
};

// In rank order, as the collectives of compressed methods do.
template <class T>
void add_up(std::vector<Message>& messages, std::span<T> Message::*sum) {
  const std::span<T> total = messages[0].*sum;
  std::vector<const T*> sources;
  for (const Message& message : messages) sources.push_back((message.*sum).data());
  ordered_sum(std::span<const T* const>(sources), total.data(), total.size());
  for (std::size_t r = 1; r < messages.size(); ++r)
    std::copy(total.begin(), total.end(), (messages[r].*sum).begin());
}

SparsifyRanks::SparsifyRanks(const CompressOptions& options, const GroupSpec& group) : name_(options.name) {
  for (int r = 0; r < group.ranks; ++r) {
    compressors_.push_back(make_compressor(options, group));
    memories_.push_back({std::vector<float>(group.numel), std::vector<float>(group.numel)});
  }
}

RanksStep SparsifyRanks::step(const StepContext& info) {
  RanksStep result;
  result.ranks.resize(size());
  std::vector<Message> messages;
  for (std::size_t r = 0; r < size(); ++r) {
    RankStep& rank = result.ranks[r];
    if (name_ == "dense") {  // it sends its gradient and keeps no copy
      rank.known = true;
      rank.values = memories_[r].gradient;
    }
    StepContext own = info;
    own.rank = static_cast<int>(r);
    messages.push_back(compressors_[r]->encode({memories_[r].gradient, memories_[r].residual}, own));
    rank.count = compressors_[r]->selected();
    rank.threshold = compressors_[r]->threshold();
    rank.over_capacity = compressors_[r]->over_capacity();
  }
  while (!messages.empty()) messages = round(messages, result.ranks);

  result.committed = true;
  for (const auto& compressor : compressors_) result.committed &= compressor->finite();
  for (std::size_t r = 0; r < size(); ++r) {
    if (!result.committed) {
      compressors_[r]->discard();
      continue;
    }
    RankStep& rank = result.ranks[r];
    if (const auto own = compressors_[r]->contributed()) {
      rank.known = true;
      rank.indices.assign(own->indices.begin(), own->indices.end());
      rank.values.assign(own->values.begin(), own->values.end());
    }
    result.average = settle(r, compressors_[r]->commit({}));
  }
  return result;
}

std::vector<Message> SparsifyRanks::round(std::vector<Message>& messages, std::vector<RankStep>& ranks) {
  std::vector<std::vector<std::byte>> blocks;
  std::size_t block_bytes = 0;
  for (const Message& message : messages) {
    TOPKNOT_CHECK(message.kind == messages[0].kind && message.sum.size() == messages[0].sum.size() &&
                      message.sum_bfloat16.size() == messages[0].sum_bfloat16.size(),
                  "ranks disagree on a message");
    if (message.kind == Message::Kind::block) block_bytes += message.bytes();
  }
  const bool sum = messages[0].kind != Message::Kind::block;
  for (std::size_t r = 0; r < size(); ++r) {
    const std::size_t bytes = messages[r].bytes();
    ranks[r].bytes_up += bytes;
    if (size() > 1) ranks[r].bytes_down += sum ? bytes : block_bytes - bytes;
  }
  if (messages[0].kind == Message::Kind::sum)
    add_up(messages, &Message::sum);
  else if (sum)
    add_up(messages, &Message::sum_bfloat16);
  else
    for (Message& message : messages) blocks.push_back(std::move(message.block));

  std::vector<Message> next;
  for (std::size_t r = 0; r < size(); ++r) {
    Round received;
    received.blocks = blocks;
    received.sum = messages[r].sum;
    received.sum_bfloat16 = messages[r].sum_bfloat16;
    if (auto message = compressors_[r]->decode(received)) next.push_back(std::move(*message));
  }
  TOPKNOT_CHECK(next.empty() || next.size() == size(), "ranks disagree on another round");
  return next;
}

std::span<const float> SparsifyRanks::settle(std::size_t rank, std::span<float> average) {
  Memories& own = memories_[rank];
  if (average.data() == own.residual.data()) std::swap(own.gradient, own.residual);
  TOPKNOT_CHECK(average.data() == own.gradient.data() && average.size() == own.gradient.size(),
                "the average is in neither memory");
  const std::vector<float>& first = memories_[0].gradient;
  TOPKNOT_CHECK(first.empty() || std::memcmp(first.data(), average.data(), average.size_bytes()) == 0,
                "ranks disagree on the average");
  return average;
}

constexpr std::size_t kMostRanks = 1024;  // as dist.ranks

struct RecordedSize {
  std::size_t steps = 1, ranks = 1, numel = 0;
};

RecordedSize extent(const std::string& path, const std::vector<std::size_t>& shape) {
  const auto refuse = [&](const std::string& what) {
    throw UserError(path + ": shape " + npy_shape_text(shape) + " " + what);
  };
  if (shape.empty() || shape.size() > 3)
    refuse("is none of [d], [steps, d] and [steps, ranks, d]; reshape it: x.reshape(steps, -1)");
  RecordedSize extent;
  extent.numel = shape.back();
  if (shape.size() > 1) extent.steps = shape[0];
  if (shape.size() > 2) extent.ranks = shape[1];
  if (extent.ranks == 0) refuse("has no ranks");
  if (extent.ranks > kMostRanks)
    refuse(fmt::format("is of {} ranks, and {} are the most; is it [steps, ranks, d]?", extent.ranks,
                       kMostRanks));
  if (extent.numel > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
    refuse("has vectors of 2^31 elements or more; positions are 31-bit numbers");
  return extent;
}

void clip(std::span<float> values, double greatest) {
  const double factor = clip_factor(l2_norm(values), greatest);
  if (factor != 1)
    for (float& x : values) x = static_cast<float>(x * factor);
}

Json list_of(const std::vector<float>& values) {
  Json list = Json::array();
  for (const float value : values) list.push_back(json_number(value));
  return list;
}

// Positions with their values: those listed in `indices`, ascending, and those where `values` is not 0.
void put_where(Json& line, std::span<const float> values, std::span<const std::uint32_t> indices) {
  std::vector<std::uint32_t> positions;
  std::vector<float> chosen;
  std::size_t next = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool listed = next < indices.size() && indices[next] == i;
    if (listed) ++next;
    if (!listed && values[i] == 0) continue;
    positions.push_back(static_cast<std::uint32_t>(i));
    chosen.push_back(values[i]);
  }
  line["indices"] = positions;
  line["values"] = list_of(chosen);
}

void write_step(OutputFile& out, std::size_t step, const RanksStep& result, std::size_t numel) {
  std::vector<std::uint32_t> sent;  // by any rank
  std::vector<std::size_t> bytes_down;
  for (std::size_t r = 0; r < result.ranks.size(); ++r) {
    const RankStep& rank = result.ranks[r];
    Json line{{"step", step}, {"rank", r}};
    if (!result.committed) line["skipped"] = true;
    line["count"] = result.committed ? rank.count : 0;
    line["threshold"] = json_number(result.committed ? rank.threshold : 0.0);
    if (!result.committed)
      line["indices"] = line["values"] = Json::array();
    else if (!rank.known)
      line["indices"] = line["values"] = nullptr;
    else if (rank.indices.empty() && rank.values.size() == numel)
      put_where(line, rank.values, {});
    else
      line["indices"] = rank.indices, line["values"] = list_of(rank.values);
    line["bytes_up"] = rank.bytes_up;
    if (result.committed && rank.over_capacity > 0) line["over_capacity"] = rank.over_capacity;
    out.write(line.dump() + "\n");
    bytes_down.push_back(rank.bytes_down);
  }
  if (result.committed)
    for (const auto& rank : result.ranks) sent.insert(sent.end(), rank.indices.begin(), rank.indices.end());
  std::sort(sent.begin(), sent.end());
  sent.erase(std::unique(sent.begin(), sent.end()), sent.end());
  Json line{{"step", step}, {"aggregate", true}};
  if (!result.committed) line["skipped"] = true;
  put_where(line, result.average, sent);
  line["bytes_down"] = bytes_down;
  line["dense_bytes"] = numel * sizeof(float);
  out.write(line.dump() + "\n");
}

// The entries of one rank by the density.
std::size_t target_of(const SparsifySetup& setup) {
  const std::optional<SparsePreset> parts = pieces_of(setup.compress);
  if (!parts) return setup.group.numel;
  return planned_entries(selectors().find(parts->select).traits, setup.compress, setup.group, setup.density);
}

SparsifySummary run(SparsifyRanks& ranks, const SparsifySetup& setup, const NpyReader& input,
                    const RecordedSize& extent, OutputFile& out) {
  SparsifySummary summary;
  summary.steps = extent.steps;
  summary.ranks = extent.ranks;
  summary.numel = extent.numel;
  const std::vector<float> weights(setup.weights.begin(), setup.weights.end());
  std::uint64_t count = 0;
  for (std::size_t t = 0; t < extent.steps; ++t) {
    if (stop_signal() != 0) throw Interrupted("interrupted; no output was written");
    for (std::size_t r = 0; r < extent.ranks; ++r) {
      const std::span<float> gradient = ranks.gradient(r);
      input.read((t * extent.ranks + r) * extent.numel, gradient);
      if (setup.clip > 0) clip(gradient, setup.clip);
    }
    StepContext info;
    info.step = static_cast<std::int64_t>(t);
    info.density = setup.density;
    info.weights = weights;
    info.lr = setup.lr;
    const RanksStep result = ranks.step(info);
    write_step(out, t, result, extent.numel);
    summary.skipped += !result.committed;
    for (const auto& rank : result.ranks) {
      if (result.committed) count += rank.count;
      summary.bytes_up += rank.bytes_up;
      summary.bytes_down += rank.bytes_down;
      summary.dense_bytes += extent.numel * sizeof(float);
    }
  }
  const std::size_t committed = (extent.steps - summary.skipped) * extent.ranks;
  if (committed > 0) summary.mean_count = static_cast<double>(count) / static_cast<double>(committed);
  if (const std::size_t k = target_of(setup); k > 0)
    summary.mean_ratio = summary.mean_count / static_cast<double>(k);

  summary.notes = setup.notes;
  const Applied applied = ranks.applied();
  if (setup.momentum_given && setup.compress.momentum > 0 && applied != Applied::momentum)
    summary.notes.push_back("momentum has no effect: only a memory that owns momentum (dgc) applies it");
  if (setup.lr_given && applied != Applied::learning_rate)
    summary.notes.push_back("lr has no effect without lr_inside=true");
  return summary;
}

}  // namespace

SparsifySummary sparsify(const SparsifyOptions& options) {
  const NpyReader input(options.input);
  const RecordedSize size = extent(options.input, input.shape());
  const SparsifySetup setup = sparsify_setup(options, size.ranks, size.numel);
  const auto make_out = [&] {
    std::error_code error;
    if (std::filesystem::equivalent(options.input, options.out, error))
      throw UserError("--out: " + options.out + " is the input; choose another name");
    check_output(options.out, Replace::reports, "choose another name");
    return OutputFile(options.out);
  };
  SparsifyRanks ranks(setup.compress, setup.group);
  OutputFile out = make_out();
  const SparsifySummary summary = run(ranks, setup, input, size, out);
  out.close();
  return summary;
}

std::string summary_text(const SparsifySummary& summary) {
  const auto count = [](std::size_t n, const char* what) {
    return count_text(static_cast<std::int64_t>(n), what);
  };
  std::string text = fmt::format("{} of {}, {}", count(summary.steps, "step"), count(summary.ranks, "rank"),
                                 count(summary.numel, "element"));
  if (summary.skipped > 0) text += "; skipped for a NaN or Inf: " + count(summary.skipped, "step");
  text += fmt::format("; mean count {:g}", summary.mean_count);
  if (summary.mean_ratio > 0) text += fmt::format(" = {:g} k", summary.mean_ratio);
  const auto up = static_cast<double>(summary.bytes_up), down = static_cast<double>(summary.bytes_down);
  if (const double messages = static_cast<double>(summary.steps) * static_cast<double>(summary.ranks);
      messages > 0)
    text += fmt::format("; bytes per step and rank: {:g} up, {:g} down", up / messages, down / messages);
  if (up > 0) text += fmt::format("; dense over up: {:g}", static_cast<double>(summary.dense_bytes) / up);
  return text;
}

}  // namespace topknot
