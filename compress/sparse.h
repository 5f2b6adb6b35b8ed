#pragma once
// Selection + memory + codec as one compressor that sends blocks. compress.name picks the three (and the
// value codec) as a preset; the keys compress.select, .memory, .codec and .values override them one by one.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/transform.h"

namespace topknot {

// Keys by their whole names ("compress.density"), with values as a file has them.
using Settings = std::vector<std::pair<std::string, std::string>>;

// A method by its pieces. compress.select, .memory, .codec and .values override them one by one.
struct SparsePreset {
  std::string select, memory = "residual", codec = "raw", values = "fp32";
  std::string aggregate = "ranks";  // compress.aggregate
  double feedback_decay = 1;        // compress.feedback_decay, of memory residual
  std::string transform = "none";   // compress.transform
  bool layerwise = false;           // the method is defined layer by layer: compress.scope must be tensor
  // The paper's or its authors' values of keys that are no pieces, for keys that are not given.
  Settings settings = {};
};
Registry<SparsePreset>& sparse_presets();  // compress.name, of methods that are such a combination
// Registers a preset, and the compressor that it makes.
bool add_sparse(const std::string& name, const std::string& help, const SparsePreset& preset);

// A published way to use a method with local steps. `train` takes its name for compress.name.
struct Recipe {
  std::string method;
  Settings settings;
};
Registry<Recipe>& recipes();

// Keys that a method or recipe of this name sets.
const Settings& settings_of(const std::string& name);

// The preset with the options' own choices in place.
SparsePreset resolve(const SparsePreset& preset, const CompressOptions& options);

// The pieces that the options name, or nothing if compress.name is no combination of pieces.
std::optional<SparsePreset> pieces_of(const CompressOptions& options);

// Throws UserError for unknown names, a combination that makes no sense, a capacity below 1.
void check_combination(const SparsePreset& parts, const CompressOptions& options);

// Gives the group the ranges that the method selects in, and returns each one's options. If the selection goes by chunks
// and the entries lie in blocks (compress.transform), a range is a tensor, and a chunk a block or a part of one.
std::vector<CompressOptions> settle_ranges(const SparsePreset& parts, const CompressOptions& options,
                                           GroupSpec& group);

// Entries that a density asks for, over the group's segments.
std::size_t planned_entries(const SelectorTraits& traits, const std::vector<CompressOptions>& by_segment,
                            const GroupSpec& group, double density);

// The average of sparse contributions: sum_r(weight[r] * g_r) * (1 / P), added in rank order onto zeros, so
// that every rank gets the same bits whatever its threads. The dense compressor ends with the same
// multiplication, by 1 / P rounded to float. Overwrites `average`, its whole length. `contributions` are by
// rank; P is their number. Allocates nothing; `room` is averaging_room().
void average_sparse(std::span<const SparseView> contributions, std::span<float> average,
                    std::span<std::size_t> room);
// compress.aggregate contributors: at each position the mean over the ranks that sent it, sum(weight[r] * g_r) over the sum
// of their weights; 0 where none did. Added in rank order too.
void average_contributors(std::span<const SparseView> contributions, std::span<float> average,
                          std::span<std::size_t> room);
// Scratch of both, for so many contributions to a vector of this size.
std::vector<std::size_t> averaging_room(std::size_t ranks, std::size_t size);

// The compressor that `options` describe, with what `preset` names for each key that is empty.
std::unique_ptr<Compressor> make_sparse(const SparsePreset& preset, const CompressOptions& options,
                                        const GroupSpec& group);

}  // namespace topknot
