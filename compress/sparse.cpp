#include "compress/sparse.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "compress/parallel.h"
#include "compress/select/passes/passes.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

// Filled, added and multiplied while it is in the first-level cache.
constexpr std::size_t kTile = 4096;

double density_of(const GroupSpec& group, std::size_t segment, double density) {
  return group.densities.empty() ? density : std::max(density, group.densities[segment]);
}

// Calls body(tile, its end, cursors), which must not throw, for tiles that cover a vector, by as many threads
// as `room` has cursors for; cursors[r]: rank r's first entry in the tile, which the body moves to its end.
template <class Body>
void for_tiles(std::span<const SparseView> contributions, std::span<float> vector,
               std::span<std::size_t> room, const Body& body) {
  const std::size_t parts = std::min(part_count(vector.size()), room.size() / contributions.size());
  for_parts(vector.size(), parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
    std::size_t* cursor = room.data() + part * contributions.size();
    for (std::size_t r = 0; r < contributions.size(); ++r) {
      const auto& indices = contributions[r].indices;
      cursor[r] =
          static_cast<std::size_t>(std::lower_bound(indices.begin(), indices.end(), begin) - indices.begin());
    }
    for (std::size_t tile = begin; tile < end; tile += kTile) body(tile, std::min(tile + kTile, end), cursor);
  });
}

CompressOptions with_choices(CompressOptions options, const SparsePreset& parts) {
  options.feedback_decay = parts.feedback_decay;
  options.aggregate = parts.aggregate;
  return options;
}

class SparseCompressor final : public HostCompressor {
 public:
  // Throws UserError as check_combination(). compress.capacity: beyond capacity * k entries per segment, the
  // exact largest of those selected are sent, the rest stays with the memory; 0 means none, else at least 1.
  SparseCompressor(const SparsePreset& parts, const CompressOptions& options, const GroupSpec& group)
      : HostCompressor(group, false),
        options_(with_choices(options, parts)),
        group_(group),
        capacity_(options.capacity),
        index_codec_(&index_codecs().find(parts.codec)),
        value_codec_(&value_codecs().find(parts.values)),
        received_(static_cast<std::size_t>(group.ranks)),
        contributions_(received_.size()) {
    check_combination(parts, options);
    const SelectorFactory& selector = selectors().find(parts.select);
    const MemoryFactory& memory = memories().find(parts.memory);
    traits_ = selector.traits;
    segment_options_ = settle_ranges(parts, options_, group_);
    TOPKNOT_CHECK(group_.densities.empty() || group_.densities.size() == group_.segments.size(),
                  "one density per segment");
    for (const CompressOptions& own : segment_options_) selectors_.push_back(selector.make(own));
    memory_ = memory.make(options_);
    transform_ = make_transform(parts.transform, group_);
    if (memory.traits.owns_momentum) applied_ = Applied::momentum;
    if (options.lr_inside) applied_ = Applied::learning_rate;
  }

  Message encode(Slice slice, const StepContext& context) override {
    check_encode(slice, context);
    u_ = slice.gradient;
    density_ = context.density;
    if (applied_ == Applied::learning_rate) multiply_all(u_, static_cast<float>(context.lr));
    if (transform_) transform_->forward(u_);
    const FeedbackInput input = memory_->input(u_, slice.residual);

    sent_.finite = true;
    sent_.indices.clear();
    sent_.values.clear();
    cuts_.clear();
    threshold_ = group_.segments.empty() ? 0 : std::numeric_limits<double>::infinity();
    over_capacity_ = 0;
    all_ = input.every_entry;
    for (std::size_t s = 0; s < group_.segments.size(); ++s) {
      const auto [begin, end] = group_.segments[s];
      const FeedbackInput part = input.part(begin, end - begin);
      if (all_)
        select_whole(s, part);
      else
        select(s, part, context);
      sent_.finite &= selected_.finite;
      if (selected_.finite) threshold_ = std::min(threshold_, selected_.threshold);
      const std::size_t first = sent_.indices.size();
      for (const std::uint32_t index : selected_.indices)
        sent_.indices.push_back(index + static_cast<std::uint32_t>(begin));
      sent_.values.insert(sent_.values.end(), selected_.values.begin(), selected_.values.end());
      cuts_.emplace_back(first, sent_.indices.size());
    }
    if (!sent_.finite) {
      sent_.indices.clear();
      sent_.values.clear();
      threshold_ = 0;
    }
    Message message;
    message.kind = Message::Kind::block;
    message.block = write_block(sent_, group_.numel, *index_codec_, *value_codec_);
    if (value_codec_->exact) message.entries = &sent_;
    phase_ = Phase::encoded;
    return message;
  }
  // The step is not finite if a rank's entries are not, or if their sum could overflow.
  std::optional<Message> decode(const Round& round) override {
    check_decode();
    summed_ = round.entries != nullptr;
    if (summed_) {
      sum_ = *round.entries;
      finite_ = sum_.finite;
      // The sum has the weights in it, without what was rejected; the average divides it by how many contribute.
      std::fill(contributions_.begin(), contributions_.end(), SparseView());
      contributions_[0] = sum_;
    } else {
      check_blocks(round);
      finite_ = true;
      for (std::size_t r = 0; r < round.blocks.size(); ++r) {
        read_block(round.blocks[r], group_.numel, *index_codec_, *value_codec_, received_[r]);
        finite_ &= received_[r].finite;
        contributions_[r] = {received_[r], weights_[r]};
      }
      TOPKNOT_CHECK(own().indices == sent_.indices, "this rank's own block came back changed");
    }
    finite_ = finite_ && sent_.finite && summable();
    make_room_for_commit();
    phase_ = Phase::decoded;
    return std::nullopt;
  }
  std::span<float> commit(std::span<const std::uint32_t> rejected) override {
    check_commit();
    std::vector<std::uint32_t> sorted(rejected.begin(), rejected.end());
    std::sort(sorted.begin(), sorted.end());
    memory_->commit(u_, slice_.residual, own(), sorted);
    const std::span<float> average = memory_->has_residual() ? slice_.residual : u_;
    const bool by_contributors = options_.aggregate == "contributors";
    (by_contributors ? average_contributors : average_sparse)(contributions_, average, averaging_room_);

    if (!all_) report_to_selectors(sorted, average);
    memory_->finish(average);
    if (transform_) transform_->inverse(average);
    phase_ = Phase::idle;
    return average;
  }
  void discard() override {
    if (!all_)
      for (auto& selector : selectors_) selector->discard();
    memory_->discard();
    HostCompressor::discard();
  }
  std::optional<SparseView> contributed() const override { return own(); }
  Diagnostics diagnostics() const override {
    return {.selected = sent_.indices.size(),
            .over_capacity = over_capacity_,
            .target = planned_entries(traits_, segment_options_, group_, density_),
            .threshold = threshold_,
            .accumulated = u_};
  }

 private:
  void select(std::size_t segment, const FeedbackInput& input, const StepContext& context) {
    const auto [begin, end] = group_.segments[segment];
    SelectStep step;
    step.density = density_of(group_, segment, context.density);
    step.k = traits_.target(step.density, end - begin, segment_options_[segment]);
    step.step = context.step;
    step.rank = context.rank;
    step.position = group_.offset + begin;
    TOPKNOT_CHECK(step.k >= 1 && step.k <= end - begin, "k outside 1 to the vector's length");
    selectors_[segment]->select(u_.subspan(begin, end - begin), input, step, selected_);
    if (capacity_ == 0) return;
    const double bound = capacity_ * static_cast<double>(step.k);
    const std::size_t count = selected_.indices.size();
    if (static_cast<double>(count) > bound) keep_largest(selected_, static_cast<std::size_t>(bound));
    over_capacity_ += count - selected_.indices.size();
  }
  void select_whole(std::size_t segment, const FeedbackInput& input) {
    const auto [begin, end] = group_.segments[segment];
    const std::span<float> u = u_.subspan(begin, end - begin);
    if (begin_selection(accumulate(u, input), selected_)) select_all(u, selected_);
  }
  // Whether the sum of what was received cannot overflow, nor what the memory adds to it; the same on all ranks. If it
  // can, the step is no better than one with an infinity in it.
  bool summable() const {
    double bound = 0;
    for (const SparseView& from : contributions_) {
      MagnitudeKey largest = 0;
      for (const float value : from.values) largest = std::max(largest, key_of(value));
      bound += static_cast<double>(from.weight) * static_cast<double>(magnitude_of(largest));
    }
    constexpr double kMost = std::numeric_limits<float>::max(), kRounding = 1 + 1e-6;
    const double average = bound / static_cast<double>(contributions_.size());
    return bound <= kMost &&
           static_cast<double>(memory_->largest_kept(contributions_)) + average * kRounding <= kMost;
  }
  void make_room_for_commit() {
    averaging_room_ = averaging_room(received_.size(), group_.numel);
    if (!traits_.reads_average) return;
    accepted_.indices.reserve(sent_.indices.size());
    accepted_.values.reserve(sent_.indices.size());
  }
  // For a selection that learns from the average, entries in the sorted list `rejected` were not sent.
  void report_to_selectors(std::span<const std::uint32_t> rejected, std::span<const float> average) {
    const SparseVector& mine = own();
    for (std::size_t s = 0; s < group_.segments.size(); ++s) {
      const auto [begin, end] = group_.segments[s];
      accepted_.indices.clear();
      accepted_.values.clear();
      for (std::size_t i = cuts_[s].first; traits_.reads_average && i < cuts_[s].second; ++i) {
        if (std::binary_search(rejected.begin(), rejected.end(), mine.indices[i])) continue;
        accepted_.indices.push_back(mine.indices[i] - static_cast<std::uint32_t>(begin));
        accepted_.values.push_back(mine.values[i]);
      }
      const double weight = static_cast<double>(weights_[rank_]) / group_.ranks;
      selectors_[s]->commit({accepted_, average.subspan(begin, end - begin), weight});
    }
  }
  // This rank's entries as the other ranks decoded them.
  const SparseVector& own() const { return summed_ ? sent_ : received_[rank_]; }
  void save(StateWriter& writer) const override {
    TOPKNOT_CHECK(phase_ == Phase::idle, "state is saved between steps");
    writer.put<std::uint64_t>(group_.numel);
    writer.put<std::uint64_t>(selectors_.size());
    for (const auto& selector : selectors_) selector->save(writer);
    memory_->save(writer);
  }
  void load(StateReader& reader) override {
    TOPKNOT_CHECK(phase_ == Phase::idle, "state is loaded between steps");
    reader.expect_group(group_.numel, selectors_.size());
    for (std::size_t s = 0; s < selectors_.size(); ++s) {
      reader.range = group_.segments[s].second - group_.segments[s].first;
      selectors_[s]->load(reader);
    }
    reader.range = group_.numel;
    memory_->load(reader);
  }

  const CompressOptions options_;  // with the preset's choices
  GroupSpec group_;
  std::vector<CompressOptions> segment_options_;
  SelectorTraits traits_;
  double capacity_ = 0;
  std::vector<std::unique_ptr<Selector>> selectors_;  // one per segment
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<BlockTransform>
      transform_;  // null: none; then u, residual and entries are of its coefficients
  const IndexCodec* index_codec_;
  const ValueCodec* value_codec_;

  bool all_ = false;  // every entry is sent, the selectors were not asked
  // This step's gradient: encode() makes u there, commit() the next residual, or the average without one.
  std::span<float> u_;
  double density_ = 1;
  SparseVector sent_;
  std::vector<std::pair<std::size_t, std::size_t>> cuts_;  // each segment's entries in sent_
  Selection selected_;                                     // scratch
  double threshold_ = 0;                                   // the least over the segments
  std::size_t over_capacity_ = 0;
  std::vector<SparseVector> received_;  // by rank
  bool summed_ = false;                 // what came back is sum_, not received_
  SparseVector sum_;
  std::vector<SparseView> contributions_;    // by rank, of received_ or sum_
  std::vector<std::size_t> averaging_room_;  // scratch
  SparseVector accepted_;                    // scratch: a segment's, positions in it
};

}  // namespace

std::vector<std::size_t> averaging_room(std::size_t ranks, std::size_t size) {
  return std::vector<std::size_t>(ranks * part_count(size));
}

void average_sparse(std::span<const SparseView> contributions, std::span<float> average,
                    std::span<std::size_t> room) {
  const float factor = 1.0f / static_cast<float>(contributions.size());
  for_tiles(contributions, average, room, [&](std::size_t tile, std::size_t tile_end, std::size_t* cursor) {
    std::fill(average.data() + tile, average.data() + tile_end, 0.0f);
    bool touched = false;
    for (std::size_t r = 0; r < contributions.size(); ++r) {
      const SparseView& from = contributions[r];
      std::size_t i = cursor[r];
      touched |= i < from.indices.size() && from.indices[i] < tile_end;
      if (from.weight == 1.0f) {
        for (; i < from.indices.size() && from.indices[i] < tile_end; ++i)
          average[from.indices[i]] += from.values[i];
      } else {
        for (; i < from.indices.size() && from.indices[i] < tile_end; ++i)
          average[from.indices[i]] += from.weight * from.values[i];
      }
      cursor[r] = i;
    }
    if (touched && contributions.size() > 1) multiply(average.data() + tile, tile_end - tile, factor);
  });
}

void average_contributors(std::span<const SparseView> contributions, std::span<float> average,
                          std::span<std::size_t> room) {
  for_tiles(contributions, average, room, [&](std::size_t tile, std::size_t tile_end, std::size_t* cursor) {
    std::fill(average.data() + tile, average.data() + tile_end, 0.0f);
    std::array<float, kTile> weights{};
    bool touched = false;
    for (std::size_t r = 0; r < contributions.size(); ++r) {
      const SparseView& from = contributions[r];
      std::size_t i = cursor[r];
      for (; i < from.indices.size() && from.indices[i] < tile_end; ++i) {
        average[from.indices[i]] += from.weight * from.values[i];
        weights[from.indices[i] - tile] += from.weight;
        touched = true;
      }
      cursor[r] = i;
    }
    if (!touched) return;
    for (std::size_t i = tile; i < tile_end; ++i)
      if (weights[i - tile] > 0) average[i] /= weights[i - tile];
  });
}

std::unique_ptr<Compressor> make_sparse(const SparsePreset& preset, const CompressOptions& options,
                                        const GroupSpec& group) {
  return std::make_unique<SparseCompressor>(resolve(preset, options), options, group);
}

Registry<SparsePreset>& sparse_presets() {
  static Registry<SparsePreset> registry("sparse method (compress.name)");
  return registry;
}

Registry<Recipe>& recipes() {
  static Registry<Recipe> registry("recipe (compress.name)");
  return registry;
}

const Settings& settings_of(const std::string& name) {
  static const Settings none;
  if (recipes().contains(name)) return recipes().find(name).settings;
  return sparse_presets().contains(name) ? sparse_presets().find(name).settings : none;
}

SparsePreset resolve(const SparsePreset& preset, const CompressOptions& options) {
  SparsePreset parts = preset;
  if (!options.select.empty()) parts.select = options.select;
  if (!options.memory.empty()) parts.memory = options.memory;
  if (!options.codec.empty()) parts.codec = options.codec;
  if (!options.values.empty()) parts.values = options.values;
  if (options.aggregate != "auto") parts.aggregate = options.aggregate;
  if (parts.memory != preset.memory) parts.feedback_decay = 1;
  if (options.feedback_decay) parts.feedback_decay = *options.feedback_decay;
  if (options.transform != "auto") parts.transform = options.transform;
  return parts;
}

std::optional<SparsePreset> pieces_of(const CompressOptions& options) {
  if (!sparse_presets().contains(options.name)) return std::nullopt;
  return resolve(sparse_presets().find(options.name), options);
}

std::vector<CompressOptions> settle_ranges(const SparsePreset& parts, const CompressOptions& options,
                                           GroupSpec& group) {
  const std::vector<Option>& declared = selectors().options(parts.select);
  const auto chunk = std::find_if(declared.begin(), declared.end(),
                                  [](const Option& option) { return option.name == "chunk"; });
  if (parts.transform == "none" || chunk == declared.end())
    return std::vector<CompressOptions>(group.segments.size(), options);
  std::vector<CompressOptions> by_segment;
  group.segments.clear();
  for (const TensorSpec& tensor : tensors_of(group)) {
    if (tensor.rows == 0) continue;  // of an empty group
    const std::size_t block = BlockTransform::side(tensor.rows) * BlockTransform::side(tensor.cols);
    by_segment.push_back(options);
    by_segment.back().set(chunk->name, std::min(options.get<int>(*chunk), static_cast<int>(block)));
    group.segments.emplace_back(tensor.begin, tensor.begin + tensor.rows * tensor.cols);
  }
  return by_segment;
}

std::size_t planned_entries(const SelectorTraits& traits, const std::vector<CompressOptions>& by_segment,
                            const GroupSpec& group, double density) {
  std::size_t count = 0;
  for (std::size_t s = 0; s < group.segments.size(); ++s)
    count += traits.target(density_of(group, s, density), group.segments[s].second - group.segments[s].first,
                           by_segment[s]);
  return count;
}

void check_combination(const SparsePreset& parts, const CompressOptions& options) {
  if (options.capacity != 0 && !(options.capacity >= 1 && std::isfinite(options.capacity)))
    throw UserError("compress.capacity is " + short_text(options.capacity) +
                    ": it must be none, or a multiple of k of at least 1, because less would cut what the "
                    "density asks for");
  const SelectorTraits& selection = selectors().find(parts.select).traits;
  if (selection.check) selection.check(options);
  const auto refuse = [](const std::string& a, const std::string& b, const std::string& reason) {
    throw UserError(a + " makes no sense with " + b + ": " + reason);
  };
  const std::string memory = "compress.memory: " + parts.memory;
  const MemoryTraits& kept = memories().find(parts.memory).traits;
  if (kept.sends_differences && selection.reads_average)
    refuse("compress.select: " + parts.select, memory,
           parts.select + " compares what it sent with what the average made of it, and " + parts.memory +
               " sends differences; use memory residual");
  if (parts.feedback_decay != 1 && parts.memory != "residual")
    refuse("compress.feedback_decay", memory, "it is for memory residual");
  if (parts.aggregate == "contributors") {
    const std::string aggregate = "compress.aggregate: contributors";
    if (kept.sends_differences)
      refuse(aggregate, memory,
             parts.memory + " sends differences to an estimate of the mean over all ranks");
    if (selection.reads_average)
      refuse(aggregate, "compress.select: " + parts.select,
             parts.select + " takes the average for the mean over all ranks");
  }
  if (!options.lr_inside) return;
  if (*kept.depends_on_lr)
    refuse("compress.lr_inside", memory,
           std::string(kept.depends_on_lr) + " would mix learning rates; use memory residual");
  if (options.momentum > 0)
    refuse("compress.lr_inside", "momentum above 0",
           "LAGS-SGD has none: what is sent is a step, not a gradient; set optimizer.momentum to 0, or with "
           "exchange.every exchange.outer.momentum");
}

bool add_sparse(const std::string& name, const std::string& help, const SparsePreset& preset) {
  sparse_presets().add(name, help, preset);
  return compressors().add(name, help,
                           {[](const CompressOptions& options, const GroupSpec& group) {
                              return make_sparse(sparse_presets().find(options.name), options, group);
                            },
                            [](const CompressOptions& options, const GroupSpec& group, double density) {
                              const SparsePreset parts = *pieces_of(options);
                              check_combination(parts, options);
                              GroupSpec ranges = group;
                              const auto by_segment = settle_ranges(parts, options, ranges);
                              const std::size_t entries = planned_entries(
                                  selectors().find(parts.select).traits, by_segment, ranges, density);
                              return expected_block_bytes(parts.codec, parts.values, entries, group.numel);
                            }});
}

}  // namespace topknot
